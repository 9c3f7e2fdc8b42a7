"""What a household can hold: rooms, receptacles, objects, what fits where, and what can be done to an object.

Names of receptacles, objects and families are those of the ALFRED tasks, so that commands read alike. The tables are
our own: common sense, on the strict side.

Invariant: each room in `FAMILY_ROOMS` has what the family's tasks need: a basin, a microwave, a fridge, a lamp's place.
"""

from collections.abc import Mapping
from typing import Final

__all__ = [
    "CONTAINERS",
    "FAMILIES",
    "FAMILY_ROOMS",
    "FITS",
    "LAMPS",
    "LAMP_PLACES",
    "OBJECTS",
    "OPENABLE",
    "PROPERTIES",
    "ROOMS",
    "SHARING",
    "STATIONS",
    "fits",
]

FAMILIES: Final = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)

STATIONS: Final = {
    "pick_clean_then_place_in_recep": ("clean", "SinkBasin"),
    "pick_heat_then_place_in_recep": ("heat", "Microwave"),
    "pick_cool_then_place_in_recep": ("cool", "Fridge"),
}
"""Family -> what is done to the object on its way, and with what."""

OPENABLE: Final = frozenset({"Cabinet", "Drawer", "Fridge", "Microwave", "Safe"})
SHARING: Final = frozenset({"Cabinet", "Drawer", "Shelf", "StoveBurner"})
"""Receptacles of which several may be reached from one place."""

ROOMS: Final[Mapping[str, Mapping[str, tuple[int, int]]]] = {
    "kitchen": {
        "Cabinet": (3, 8),
        "CoffeeMachine": (0, 1),
        "CounterTop": (1, 3),
        "DiningTable": (0, 2),
        "Drawer": (2, 6),
        "Fridge": (1, 1),
        "GarbageCan": (1, 1),
        "Microwave": (1, 1),
        "Shelf": (0, 3),
        "SinkBasin": (1, 1),
        "StoveBurner": (2, 4),
    },
    "bathroom": {
        "Cabinet": (2, 4),
        "CounterTop": (1, 2),
        "Drawer": (0, 3),
        "GarbageCan": (1, 1),
        "HandTowelHolder": (1, 2),
        "Shelf": (0, 2),
        "SinkBasin": (1, 2),
        "Toilet": (1, 1),
        "ToiletPaperHanger": (1, 1),
        "TowelHolder": (1, 1),
    },
    "bedroom": {
        "Bed": (1, 1),
        "Desk": (1, 2),
        "Drawer": (2, 6),
        "Dresser": (0, 1),
        "GarbageCan": (1, 1),
        "Safe": (0, 1),
        "Shelf": (1, 4),
        "SideTable": (1, 2),
    },
    "livingroom": {
        "ArmChair": (1, 2),
        "CoffeeTable": (1, 1),
        "DiningTable": (0, 1),
        "Drawer": (1, 4),
        "GarbageCan": (1, 1),
        "Safe": (0, 1),
        "Shelf": (0, 3),
        "SideTable": (1, 3),
        "Sofa": (1, 1),
    },
}
"""Room -> receptacle -> fewest and most of it."""

_FOOD: Final = ("Apple", "Bread", "Egg", "Lettuce", "Potato", "Tomato")
_DISHES: Final = ("Bowl", "Cup", "Mug", "Plate")
_POTS: Final = ("Pan", "Pot")
_CUTLERY: Final = ("ButterKnife", "Fork", "Knife", "Ladle", "Spatula", "Spoon")

OBJECTS: Final[Mapping[str, tuple[str, ...]]] = {
    "kitchen": (
        *_FOOD,
        *_DISHES,
        *_POTS,
        *_CUTLERY,
        "DishSponge",
        "Kettle",
        "PepperShaker",
        "SaltShaker",
        "SoapBottle",
        "WineBottle",
    ),
    "bathroom": (
        "Candle",
        "Cloth",
        "HandTowel",
        "SoapBar",
        "SoapBottle",
        "SprayBottle",
        "TissueBox",
        "ToiletPaper",
        "Towel",
    ),
    "bedroom": (
        "AlarmClock",
        "Book",
        "Bowl",
        "CD",
        "CellPhone",
        "CreditCard",
        "KeyChain",
        "Laptop",
        "Mug",
        "Pen",
        "Pencil",
        "Pillow",
    ),
    "livingroom": (
        "Book",
        "Box",
        "CreditCard",
        "KeyChain",
        "Laptop",
        "Newspaper",
        "Pillow",
        "RemoteControl",
        "Statue",
        "TissueBox",
        "Vase",
        "Watch",
    ),
}
"""Room -> objects that may lie in it."""

LAMPS: Final = ("DeskLamp", "FloorLamp")
LAMP_PLACES: Final = ("Desk", "Dresser", "SideTable", "CoffeeTable", "Shelf")
CONTAINERS: Final = frozenset({*_DISHES, *_POTS, "Box"})

PROPERTIES: Final[Mapping[str, frozenset[str]]] = {
    "clean": frozenset({*_FOOD, *_DISHES, *_POTS, *_CUTLERY, "Cloth", "DishSponge", "Kettle", "SoapBar"})
    - {"Bread"},
    "heat": frozenset({"Apple", "Bread", "Cup", "Egg", "Mug", "Plate", "Potato", "Tomato"}),
    "cool": frozenset({*_FOOD, *_DISHES, *_POTS, "WineBottle"}),
    "slice": frozenset(_FOOD),
}
"""What can be done -> to which objects."""

_SMALL: Final = (
    "AlarmClock",
    "Book",
    "CD",
    "CellPhone",
    "CreditCard",
    "KeyChain",
    "Newspaper",
    "Pen",
    "Pencil",
    "RemoteControl",
    "Watch",
)
_BATH: Final = ("Candle", "Cloth", "SoapBar", "SoapBottle", "SprayBottle", "TissueBox", "ToiletPaper")
_TABLETOP: Final = (
    *_FOOD,
    *_DISHES,
    *_POTS,
    *_CUTLERY,
    *_SMALL,
    "Box",
    "DishSponge",
    "Kettle",
    "Laptop",
    "PepperShaker",
    "SaltShaker",
    "SoapBottle",
    "Statue",
    "TissueBox",
    "Vase",
    "WineBottle",
)
_SHELF: Final = (
    *_DISHES,
    *_POTS,
    *_SMALL,
    *_BATH,
    "Box",
    "Kettle",
    "PepperShaker",
    "SaltShaker",
    "Statue",
    "Vase",
)

FITS: Final[Mapping[str, frozenset[str]]] = {
    "ArmChair": frozenset({"Book", "Box", "CellPhone", "Laptop", "Newspaper", "Pillow", "RemoteControl"}),
    "Bed": frozenset({"Book", "CellPhone", "Laptop", "Newspaper", "Pillow"}),
    "Cabinet": frozenset({*_DISHES, *_POTS, *_BATH, "Kettle", "PepperShaker", "SaltShaker"}),
    "CoffeeMachine": frozenset({"Mug"}),
    "CoffeeTable": frozenset(_TABLETOP) - {"Kettle"},
    "CounterTop": frozenset({*_TABLETOP, *_BATH}) - {"Newspaper"},
    "Desk": frozenset({*_SMALL, *_DISHES, "Box", "Laptop", "Statue", "TissueBox", "Vase"}),
    "DiningTable": frozenset(_TABLETOP),
    "Drawer": frozenset({*_CUTLERY, *_SMALL, *_BATH, "DishSponge", "PepperShaker", "SaltShaker"})
    - {"AlarmClock"},
    "Dresser": frozenset({*_SMALL, *_DISHES, "Box", "Laptop", "Statue", "Vase"}),
    "Fridge": frozenset({*_FOOD, *_DISHES, *_POTS, "WineBottle"}),
    "GarbageCan": frozenset({*_FOOD, *_BATH, "CD", "DishSponge", "Newspaper", "Pen", "Pencil", "WineBottle"})
    - {"Candle"},
    "HandTowelHolder": frozenset({"HandTowel"}),
    "Microwave": PROPERTIES["heat"],
    "Safe": frozenset({"CD", "CellPhone", "CreditCard", "KeyChain", "Statue", "Vase", "Watch"}),
    "Shelf": frozenset(_SHELF) - {"Pan"},
    "SideTable": frozenset({*_SMALL, *_DISHES, "Box", "Laptop", "Statue", "TissueBox", "Vase"}),
    "SinkBasin": frozenset({*_FOOD, *_DISHES, *_POTS, *_CUTLERY, "Cloth", "DishSponge", "Kettle", "SoapBar"})
    - {"Bread"},
    "Sofa": frozenset({"Book", "Box", "CellPhone", "CreditCard", "KeyChain", "Laptop", "Newspaper", "Pillow"})
    | {"RemoteControl"},
    "StoveBurner": frozenset({*_POTS, "Kettle"}),
    "Toilet": frozenset(_BATH),
    "ToiletPaperHanger": frozenset({"ToiletPaper"}),
    "TowelHolder": frozenset({"Towel"}),
}
"""Receptacle -> objects that may be put into or on it."""

FAMILY_ROOMS: Final[Mapping[str, tuple[str, ...]]] = {
    "pick_and_place_simple": tuple(ROOMS),
    "look_at_obj_in_light": ("bedroom", "livingroom"),
    "pick_clean_then_place_in_recep": ("kitchen", "bathroom"),
    "pick_heat_then_place_in_recep": ("kitchen",),
    "pick_cool_then_place_in_recep": ("kitchen",),
    "pick_two_obj_and_place": tuple(ROOMS),
}


def fits(receptacle: str, thing: str) -> bool:
    """Whether a thing, an object or a lamp, may be in or on a receptacle."""
    return receptacle in LAMP_PLACES if thing in LAMPS else thing in FITS[receptacle]
