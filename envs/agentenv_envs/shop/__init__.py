"""ShopSimulator: a shop of near-identical goods, on the synthetic catalogue or on the official one."""

from .env import ShopMultiTurnEnv, ShopPersonaEnv, ShopSingleTurnEnv
from .remote import RemoteShopEnv

__all__ = ["RemoteShopEnv", "ShopMultiTurnEnv", "ShopPersonaEnv", "ShopSingleTurnEnv"]
