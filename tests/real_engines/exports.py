"""Models, calibrated by the program itself, and the scales its files hold."""

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fp8calib.cli import main_inner
from tests import zoo
from tests.kit.checkpoints import load_folder

# vLLM's CPU kernels want FP8 heads of a multiple of 32 elements: 4 heads of 32.
WIDTH = {"hidden_size": 128}
HEADS = {**WIDTH, "head_dim": 32}
LATENT = {
    **WIDTH,
    "topk_method": "noaux_tc",
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}

MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", WIDTH),
    "llama-4-kv-heads": ("llama", {**WIDTH, "num_key_value_heads": 4}),
    "qwen2": ("qwen2", {**WIDTH, "num_key_value_heads": 4}),
    "opt": ("opt", {**WIDTH, "word_embed_proj_dim": 128}),
}
"""Tiny models by name: the family, and changes of its config in `tests/zoo.py`."""

Scales = dict[int, tuple[list[float], list[float]]]
"""By layer: k and v."""


class Exports:
    """Calibrates tiny models on random tokens, each once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        rows = torch.randint(3, 128, (4, 64), generator=torch.Generator().manual_seed(0))
        lines = (json.dumps({"input_ids": row}) for row in rows.tolist())
        self._data = folder / "rows.jsonl"
        self._data.write_text("".join(f"{line}\n" for line in lines))

    @functools.cache  # noqa: B019 -- one instance, as long as the session
    def __call__(self, name: str, *formats: str, tps: tuple[int, ...] = (1,)) -> Path:
        """Give the output folder for a model of `MODELS` in these formats, or in kv-overlay."""
        folder = self._folder / "-".join((name, *formats, *map(str, tps)))
        family, changes = MODELS[name]
        zoo.save(family, folder / "model", **changes)
        options = ("--data", self._data, "--seq-len", 64, "--dtype", "float32")
        ranks = [part for tp in tps for part in ("--tp", tp)]
        return calibrate(folder / "model", folder / "out", formats, *options, *ranks)


def calibrate(model: Path, out: Path, formats: tuple[str, ...], *options: object) -> Path:
    """Run `fp8calib calibrate` and give its output folder."""
    wanted = [part for name in formats or ("kv-overlay",) for part in ("--format", name)]
    arguments = ["calibrate", str(model), "--out", str(out), *wanted, *map(str, options)]
    assert main_inner(arguments) == 0
    return out


def read_scales(checkpoint: Path) -> Scales:
    """Read k and v of every layer out of the weight files of a checkpoint folder."""
    found: dict[int, dict[str, list[float]]] = {}
    for name, value in load_folder(checkpoint).items():
        if name.endswith("_scale"):
            role = name.rpartition(".")[2].removesuffix("_scale")
            found.setdefault(layer_index(name), {})[role] = value.flatten().tolist()
    return {layer: (values["k"], values["v"]) for layer, values in found.items()}


def read_json_scales(file: Path, block: str) -> dict[int, float]:
    """Read the scale of every layer from one rank's block of a JSON file."""
    factors = json.loads(file.read_text())["kv_cache"]["scaling_factor"][block]
    return {int(layer): scale for layer, scale in factors.items()}


def layer_index(module: str) -> int:
    """Give the number in a module's path."""
    (index,) = re.findall(r"\.(\d+)\.", module)
    return int(index)
