"""Add KV scales to a quantized model, and read back what was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from fp8calib.engines.registry import ENGINES
from fp8calib.engines.replay.folder import open_folder
from fp8calib.model.geometry_from_config import read_geometry
from tests.cli.program import succeed

SHARD = "model-00002-of-00002.safetensors"
LINKED = "model-00001-of-00002.safetensors"
PLAIN = "compressed-tensors"
ATTENTION = "model.layers.{}.self_attn"


def graft(calibrated: Path, model: object, out: Path, *options: object) -> Any:
    """Export an overlay of a quantized model, and give what --json printed."""
    asked = () if "--format" in options else ("--format", "kv-overlay")
    command = ("export", calibrated / "stats.safetensors", *asked, "--model", model, "--out", out)
    return succeed(*command, *options, "--json").json


def expected_scales(calibrated: Path) -> dict[tuple[int, str], float]:
    """Divide the amax of K and V by 448, from the file of statistics itself."""
    stats = load_file(calibrated / "stats.safetensors")
    return {
        (layer, role): float(stats[f"{ATTENTION.format(layer)}.{role}/amax"].max() / 448)
        for layer in range(2)
        for role in "kv"
    }


def stored_scales(folder: Path, name: str = "{}_scale") -> dict[tuple[int, str], float]:
    """Read the scales of an overlay's own shard."""
    tensors = load_file(folder / SHARD)
    return {
        (layer, role): tensors[f"{ATTENTION.format(layer)}.{name.format(role)}"].item()
        for layer in range(2)
        for role in "kv"
    }


def statuses(folder: Path, engine: str) -> set[str]:
    """Give the statuses of the scales in an engine, whether or not it can load the weights."""
    geometry = read_geometry(folder, json.loads((folder / "config.json").read_text()))
    replay = ENGINES[engine].replay_folder
    assert replay is not None
    layers = replay(open_folder(folder), geometry, 1).layers
    return {str(verdict.status) for layer in layers for verdict in (layer.k, layer.v)}


def name_command(pack: object, model: object, out: Path, *options: object) -> tuple[object, ...]:
    return (
        *("extract-kv-scales", "--quantized-model", pack, "--model", model),
        *("--save-path", out, *options),
    )
