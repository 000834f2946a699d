"""Which methods have a place for KV scales, and what becomes of scales that are there already."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.graft.grafting import (
    ATTENTION,
    LINKED,
    expected_scales,
    graft,
    name_command,
    statuses,
    stored_scales,
)
from tests.cli.program import succeed
from tests.cli.quantized_children import BASE
from tests.formats.foreign import FOLDER
from tests.kit.checkpoints import WEIGHTS

Refused = Callable[..., str]


# --- the scales that a model has already ------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "old"),
    [
        ("llmcompressor-fp8-static-kv", "{}_scale"),
        ("modelopt-fp8-kv", "{0}_proj.{0}_scale"),
        ("quark-fp8-kv", "{}_proj.output_scale"),
        ("quark-autofp8-kv", "{}_scale"),
    ],
)
def test_scales_are_replaced_only_on_request(
    refused: Refused, calibrated: Path, tmp_path: Path, name: str, old: str
) -> None:
    child = FOLDER / name
    text = refused(7, child)
    first = f"{ATTENTION.format(0)}.{old.format('k')}"
    assert f"already has a tensor {first}, and 4 KV scales in all" in text
    assert "--replace-scales" in text

    report = graft(calibrated, child, tmp_path / "out", "--replace-scales")
    out = tmp_path / "out" / "kv-overlay"
    names = "{}_proj.output_scale" if name == "quark-fp8-kv" else "{}_scale"
    assert stored_scales(out, names) == pytest.approx(expected_scales(calibrated), rel=1e-7)
    assert any(f"replaced: {first}, " in warning for warning in report["warnings"])
    assert any("copied" in warning for warning in report["warnings"])
    kept = load_file(out / LINKED)
    source = load_file(child / WEIGHTS)
    assert source.keys() - kept.keys() == {
        f"{ATTENTION.format(layer)}.{old.format(role)}" for layer in range(2) for role in "kv"
    }
    assert all(torch.equal(kept[each].float(), source[each].float()) for each in kept)
    assert {statuses(out, engine).pop() for engine in ("vllm", "sglang")} == {"used"}


# --- who has no place -------------------------------------------------------------------------


@pytest.mark.parametrize("is_quantized", [True, False])
def test_scales_that_are_not_there_are_not_replaced_in_silence(
    calibrated: Path, child: Path, tmp_path: Path, is_quantized: bool
) -> None:
    model = child if is_quantized else BASE
    says = f"--replace-scales has no effect: {model} has no KV scales"
    warnings = graft(calibrated, model, tmp_path / "out", "--replace-scales")["warnings"]
    assert says in warnings
    pack = calibrated / "kv_scales.safetensors"
    command = name_command(pack, model, tmp_path / "pack", "--replace-scales", "--json")
    assert says in succeed(*command).json["notes"]
    served = tmp_path / "out" / "kv-overlay"
    again = graft(calibrated, served, tmp_path / "again", "--replace-scales")["warnings"]
    assert not any("has no effect" in warning for warning in again)
