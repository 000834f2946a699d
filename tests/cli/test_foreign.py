"""The commands take what llm-compressor, ModelOpt and Quark really write."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.conftest import write_rows
from tests.cli.program import fail, succeed
from tests.formats.foreign import (
    FOLDER,
    GPT2_ATTENTION,
    KV_SCALES,
    LLAMA_ATTENTION,
    NO_KV_SCALES,
    load_kv_scales,
)
from tests.kit.checkpoints import change_tensors


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the tokens that the tools calibrated with."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 64, (8, 32), generator=generator).tolist()
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    return write_rows(path, [{"input_ids": row} for row in tokens])


def _extract(name: str, out: Path, *options: object) -> Any:
    model = FOLDER / KV_SCALES[name][0]
    command = ("extract-kv-scales", "--quantized-model", FOLDER / name, "--model", model)
    return succeed(*command, "--save-path", out, *options, "--json").json


def _load_pairs(path: Path, model: str, layer: int) -> tuple[list[float], list[float]]:
    tensors = load_file(path)
    module = (GPT2_ATTENTION if model == "gpt2" else LLAMA_ATTENTION).format(layer)
    k, v = (tensors[f"{module}.{role}_scale"].double().flatten().tolist() for role in "kv")
    return k, v


@pytest.mark.parametrize("value", [None, 2.5e-21, 6.5e21])
def test_a_q_scale_that_was_never_set_is_left_out_and_that_is_said(
    tmp_path: Path, value: float | None
) -> None:
    """By the memory, it may be a number above zero too."""
    source = shutil.copytree(FOLDER / "llmcompressor-attention-head", tmp_path / "source")
    names = [f"model.layers.{layer}.self_attn.q_scale" for layer in range(2)]
    change_tensors(source, {n: torch.full((4, 1, 1), value) for n in names if value is not None})
    command = ("extract-kv-scales", "--quantized-model", source, "--model", FOLDER / "llama")
    report = succeed(*command, "--save-path", tmp_path / "out", "--json").json
    assert [note for note in report["notes"] if note.startswith("q_scale is left out: ")]
    assert report["layers"][0]["q"] is None
    model, name = FOLDER / "llama", FOLDER / "llmcompressor-attention-head"
    assert "q_scale" in fail(4, "verify", model, "--scales", name, "--samples", 1)


def test_modelopt_measures_the_scales_that_calibrate_measures(tmp_path: Path, rows: Path) -> None:
    command = ("calibrate", FOLDER / "llama", "--data", rows, "--seq-len", 32)
    options = ("--dtype", "bfloat16", "--format", "kv-scales", "--out", tmp_path / "out")
    succeed(*command, *options)
    ours = [
        _load_pairs(tmp_path / "out" / "kv_scales.safetensors", "llama", layer)
        for layer in range(2)
    ]
    theirs = load_kv_scales("modelopt-kv")
    # within one step of bf16: another processor may sum in another order
    for own, other in zip(ours, theirs, strict=True):
        for mine, found in zip(own, other, strict=True):
            assert mine == pytest.approx(found, rel=2.0**-7)


LINEARS = {
    f"{LLAMA_ATTENTION.format(layer)}.{name}" for layer in range(2) for name in ("q_proj", "o_proj")
} | {f"model.layers.{layer}.mlp.{name}" for layer in range(2) for name in ("up_proj", "down_proj")}


@pytest.mark.parametrize(
    "name",
    [
        "llmcompressor-fp8-static-kv",
        "llmcompressor-fp8-block",
        "llmcompressor-w8a16",
        "modelopt-fp8-channel-kv",
        "quark-fp8-kv",
        "quark-autofp8-kv",
        "modelopt-mixtral-fp8-kv",
        "llmcompressor-mixtral-fp8-static-kv",
    ],
)
def test_verify_emulates_the_whole_checkpoint(rows: Path, name: str) -> None:
    model = KV_SCALES[name][0] if name in KV_SCALES else NO_KV_SCALES[name]
    command = ("verify", FOLDER / model, "--scales", FOLDER / name, "--data", rows)
    options = ("--samples", 2, "--seq-len", 32, "--dtype", "float32", "--json")
    report = succeed(*command, *options).json
    candidate = report["candidates"][0]
    assert candidate["name"] == str(FOLDER / name)
    assert 0.9 < candidate["ppl_ratio"] < 1.1
    assert candidate["ppl_ratio"] != 1
    sites = {item["site"] for item in report["layers"] if item["candidate"] == candidate["name"]}
    has_kv = name in KV_SCALES
    assert {f"{LLAMA_ATTENTION.format(layer)}.k" for layer in range(2)} <= sites or not has_kv
    if model == "llama":
        assert {f"{linear}.weight" for linear in LINEARS} <= sites
        assert ({f"{linear}.input" for linear in LINEARS} <= sites) is ("w8a16" not in name)
    else:
        assert "model.layers.1.mlp.experts.down_proj.weight" in sites
        assert "model.layers.1.mlp.experts.gate_proj.input" in sites
