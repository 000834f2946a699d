"""What `check` says of transformers is what `from_pretrained` does, case by case."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.dialects.read import read_scales
from fp8calib.dialects.write import write_table
from fp8calib.engines.check import check_folder
from fp8calib.engines.replay.folder import open_folder
from fp8calib.engines.replay.verdicts import EngineReport, Status
from fp8calib.fp8.formats import E4M3FN
from fp8calib.scales.convert import convert_table
from tests.dialects.foreign import FOLDER, LLAMA_ATTENTION, find_geometry
from tests.engines.check_handmade import FP8, PER_HEAD, PER_TENSOR

pytest.importorskip("compressed_tensors")

INTEGERS = {**PER_TENSOR, "kv_cache_scheme": {**PER_TENSOR["kv_cache_scheme"], "type": "int"}}  # type: ignore[dict-item]
HEADS = [[[0.25]], [[0.3]]]

HANDMADE: Mapping[str, tuple[object, Mapping[str, object]]] = {
    "plain": (None, {}),
    "bare pair": (None, {"k_scale": [0.25], "v_scale": [0.3]}),
    "tgi's kv_scale": (None, {"kv_scale": [0.25]}),
    "pair": (PER_TENSOR, {"k_scale": [0.25], "v_scale": [0.3]}),
    "0-dim": (PER_TENSOR, {"k_scale": 0.25, "v_scale": 0.3}),
    "kv_scale": (PER_TENSOR, {"kv_scale": [0.25]}),
    "k alone": (PER_TENSOR, {"k_scale": [0.25]}),
    "odd numbers": (PER_TENSOR, {"k_scale": [0.0], "v_scale": [-1.0]}),
    "heads": (PER_HEAD, {"k_scale": HEADS, "v_scale": HEADS}),
    "heads where one is wanted": (PER_TENSOR, {"k_scale": HEADS, "v_scale": HEADS}),
    "one number for heads": (PER_HEAD, {"k_scale": [0.25], "v_scale": [0.3]}),
    "integers": (INTEGERS, {"k_scale": [0.25], "v_scale": [0.3]}),
    "autofp8's old kv_scale": (FP8, {"kv_scale": [0.25]}),
}
"""The quantization_config, and the scales of every layer."""

TOOLS = (
    "llmcompressor-fp8-static-kv",
    "llmcompressor-kv",
    "llmcompressor-kv-head",
    "modelopt-fp8-kv",
    "modelopt-kv",
    "quark-fp8-kv",
    "quark-autofp8-kv",
)


def _save(folder: Path, quantization: object, scales: Mapping[str, object]) -> Path:
    """Write the llama with scales in its one file."""
    tensors = load_file(FOLDER / "llama" / "model.safetensors")
    for index in range(2):
        for suffix, number in scales.items():
            name = f"{LLAMA_ATTENTION.format(index)}.{suffix}"
            tensors[name] = torch.tensor(number, dtype=torch.float32)
    config = json.loads((FOLDER / "llama" / "config.json").read_text())
    if quantization is not None:
        config["quantization_config"] = quantization
    return _save_folder(folder, tensors, config)


def _save_tool(folder: Path, name: str) -> Path:
    """Write what a tool wrote, with the weights that were left out of it."""
    weights = load_file(FOLDER / "llama" / "model.safetensors")
    tensors = weights | load_file(FOLDER / name / "model.safetensors")
    return _save_folder(folder, tensors, json.loads((FOLDER / name / "config.json").read_text()))


def _save_folder(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, object]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _compare(folder: Path) -> EngineReport:
    """Load the folder in transformers and hold every verdict against the modules."""
    opened = open_folder(folder)
    checked = check_folder(opened, find_geometry("llama"), ["transformers"], 1)
    report = checked.engines["transformers"]
    if report.layers[0].k.status is Status.REFUSED:
        with pytest.raises(Exception):  # noqa: B017, PT011 -- whatever the engine raises
            _load(folder)
        return report
    modules, unexpected = _load(folder)
    for layer in report.layers:
        for role, verdict in (("k", layer.k), ("v", layer.v)):
            held = getattr(modules[layer.layer], f"{role}_scale", None)
            if verdict.value is not None and verdict.status is not Status.DROPPED:
                assert held is not None
                assert held.max().item() == verdict.value
            elif "unexpected" in verdict.why:
                assert held is None
            if verdict.status is Status.DROPPED and "unexpected" in verdict.why:
                assert any(name.startswith(f"model.layers.{layer.layer}.") for name in unexpected)
    return report


def _load(folder: Path) -> tuple[list[Any], set[str]]:
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", output_loading_info=True
    )
    return [layer.self_attn for layer in model.model.layers], set(info["unexpected_keys"])


@pytest.mark.parametrize("name", HANDMADE)
def test_what_is_made_by_hand(tmp_path: Path, name: str) -> None:
    _compare(_save(tmp_path / "model", *HANDMADE[name]))


@pytest.mark.parametrize("name", TOOLS)
def test_what_tools_wrote(tmp_path: Path, name: str) -> None:
    report = _compare(_save_tool(tmp_path / "model", name))
    assert report.ok is name.startswith("llmcompressor")


@pytest.mark.parametrize("form", ["kv-overlay", "kv-overlay-head", "tgi"])
def test_what_we_write(tmp_path: Path, form: str) -> None:
    geometry = find_geometry("llama")
    table = read_scales(FOLDER / "llmcompressor-kv-head", geometry).table
    fitted = convert_table(table, fmt=E4M3FN, per_head=form == "kv-overlay-head")
    with Checkpoint.open(FOLDER / "llama") as source:
        write_table(fitted, form, tmp_path / "out", source=source)

    report = _compare(tmp_path / "out")

    assert report.ok is (form != "tgi")
    if report.ok:
        modules, _ = _load(tmp_path / "out")
        for module, (_, attention) in zip(modules, geometry.attentions(), strict=True):
            for role in ("k", "v"):
                stored = getattr(module, f"{role}_scale").float().flatten()
                expected = fitted.scales[attention.site(role)].values.flatten()  # type: ignore[arg-type]
                assert stored.equal(expected)
