"""KV scales are added to every form of quantized model, and nothing else changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from fp8calib.checkpoint.tensor_file import TensorFile
from tests import zoo
from tests.cli.conftest import write_rows
from tests.cli.graft.grafting import (
    SHARD,
    expected_scales,
    graft,
    statuses,
    stored_scales,
)
from tests.cli.program import snapshot, succeed
from tests.cli.quantized_children import FORMS, save_fp4, save_int
from tests.kit.checkpoints import change_config


@pytest.mark.parametrize("form", FORMS)
def test_scales_are_added_and_nothing_else_changes(
    calibrated: Path, children: Callable[[str], Path], tmp_path: Path, form: str
) -> None:
    child = children(form)
    before = snapshot(child)
    report = graft(calibrated, child, tmp_path / "out")
    out = tmp_path / "out" / "kv-overlay"

    assert snapshot(child) == before
    weights = [path for path in child.iterdir() if path.suffix == ".safetensors"]
    linked = {path.stat().st_ino for path in out.glob("*.safetensors")} - {
        (out / SHARD).stat().st_ino
    }
    assert linked == {path.stat().st_ino for path in weights}
    assert stored_scales(out) == pytest.approx(expected_scales(calibrated), rel=1e-7)
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == {
        *(name for path in weights for name in TensorFile(path).tensors),
        *load_file(out / SHARD),
    }
    old, new = (
        json.loads((folder / "config.json").read_text())["quantization_config"]
        for folder in (child, out)
    )
    added = {key: value for key, value in new.items() if old.get(key) != value}
    assert {**new, **{key: old.get(key) for key in added}} == {
        **old,
        **{key: old.get(key) for key in added},
    }
    assert added.keys() <= {"kv_cache_scheme"}
    named = {"vllm": "used", "sglang": "used"}
    assert {engine: statuses(out, engine).pop() for engine in named} == named
    assert not report["warnings"]


@pytest.mark.parametrize(
    "save",
    [
        lambda folder: save_int(folder, 8),
        lambda folder: save_int(folder, 4, group=32),
        lambda folder: save_fp4(folder, "nvfp4"),
        lambda folder: save_fp4(folder, "modelopt"),
    ],
    ids=["int8", "int4", "nvfp4", "ModelOpt, nvfp4"],
)
def test_integers_and_fp4_get_scales_too(
    calibrated: Path, tmp_path: Path, save: Callable[[Path], Path]
) -> None:
    child = save(tmp_path / "child")
    old = json.loads((child / "config.json").read_text())["quantization_config"]
    graft(calibrated, child, tmp_path / "out")
    out = tmp_path / "out" / "kv-overlay"
    new = json.loads((out / "config.json").read_text())["quantization_config"]
    assert {key: new[key] for key in old} == old
    assert new.keys() - old.keys() == {"kv_cache_scheme"}
    assert stored_scales(out) == pytest.approx(expected_scales(calibrated), rel=1e-7)
    assert [statuses(out, engine) for engine in ("vllm", "sglang")] == [{"used"}] * 2


def test_modelopts_own_file_is_merged_too(
    calibrated: Path, children: Callable[[str], Path], tmp_path: Path
) -> None:
    child = children("ModelOpt")
    graft(calibrated, child, tmp_path / "out")
    old, new = (
        json.loads((folder / "hf_quant_config.json").read_text())
        for folder in (child, tmp_path / "out" / "kv-overlay")
    )
    assert old["quantization"].pop("kv_cache_quant_algo") is None
    assert new["quantization"].pop("kv_cache_quant_algo") == "FP8"
    assert new == old


@pytest.mark.parametrize(
    "options",
    [
        ("--scheme", "fp8-block", "--format", "autofp8"),
        ("--scheme", "fp8-dynamic", "--format", "modelopt"),
        ("--scheme", "w8a16"),
    ],
)
def test_transformers_computes_the_same_logits(tmp_path: Path, options: tuple[str, ...]) -> None:
    """With compressed-tensors it also rounds K and V, unless the new entry is removed again."""
    pytest.importorskip("compressed_tensors")
    sizes = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "vocab_size": 64}
    zoo.save("llama", tmp_path / "base", **sizes)
    data = write_rows(tmp_path / "rows.jsonl", [{"input_ids": list(range(16))}])
    command = ("calibrate", tmp_path / "base", "--data", data, "--format", "kv-scales")
    succeed(*command, "--seq-len", 16, "--dtype", "float32", "--out", tmp_path / "measured")
    succeed("quantize", tmp_path / "base", *options, "--out", tmp_path / "child")
    graft(tmp_path / "measured", tmp_path / "child", tmp_path / "out")
    out = tmp_path / "out" / "kv-overlay"
    if options[-1] == "w8a16":
        change_config(out, lambda config: config["quantization_config"].pop("kv_cache_scheme"))
    ids = torch.arange(12).reshape(1, 12)
    load = transformers.AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        before, after = (load(folder)(ids).logits for folder in (tmp_path / "child", out))
    assert torch.equal(before, after)
