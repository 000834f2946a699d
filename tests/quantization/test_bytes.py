"""The bytes of FP8 checkpoints against numpy and ml_dtypes, from models of no known class."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from fp8calib.errors import ExportError, ModelError
from fp8calib.quantization.plan import CalibratedScales
from tests.formats.foreign import FOLDER
from tests.quantization.by_hand import (
    LAYER,
    Tensors,
    codes_of,
    make_tensors,
    run,
    save,
    scale_for,
    separate_scales,
    to_numpy,
)

LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def unit_inputs() -> CalibratedScales:
    """Give an input scale for every linear."""
    inputs = {f"{LAYER}.{name}": torch.tensor(0.25 + i) for i, name in enumerate(LINEARS)}
    return CalibratedScales(inputs=inputs, kv={})


def test_dead_rows_and_weights_get_usable_scales_and_are_listed(tmp_path: Path) -> None:
    tensors = make_tensors()
    tensors[f"{LAYER}.mlp.gate_proj.weight"][7] = 0
    tensors[f"{LAYER}.mlp.down_proj.weight"][:] = 0
    found = run(save(tmp_path / "source", tensors), tmp_path / "out", "fp8-dynamic")
    stored = found.tensors()
    gate = np.abs(to_numpy(tensors[f"{LAYER}.mlp.gate_proj.weight"])).max()
    assert stored[f"{LAYER}.mlp.gate_proj.weight_scale"][7].item() == scale_for(gate)
    largest = max(np.abs(to_numpy(tensors[f"{LAYER}.{name}.weight"])).max() for name in LINEARS)
    down = stored[f"{LAYER}.mlp.down_proj.weight_scale"]
    assert set(down.flatten().tolist()) == {float(scale_for(largest))}
    assert not codes_of(stored[f"{LAYER}.mlp.down_proj.weight"]).any()
    listed = {(dead.tensor, dead.count, dead.total) for dead in found.written.all_zero}
    assert listed == {
        (f"{LAYER}.mlp.gate_proj.weight", 1, 300),
        (f"{LAYER}.mlp.down_proj.weight", 200, 200),
    }


def test_a_lone_dead_weight_takes_one(tmp_path: Path) -> None:
    tensors = {f"{LAYER}.fc.weight": torch.zeros(4, 4, dtype=torch.float16)}
    found = run(save(tmp_path / "source", tensors), tmp_path / "out", "w8a16")
    assert found.tensors()[f"{LAYER}.fc.weight_scale"].tolist() == [[1.0]] * 4
    assert found.written.all_zero[0].count == 4


@pytest.mark.parametrize("scheme", ["fp8-static", "fp8-dynamic", "fp8-block"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_named_and_nothing_is_left(
    tmp_path: Path, scheme: str, value: float
) -> None:
    tensors = make_tensors()
    tensors[f"{LAYER}.self_attn.k_proj.weight"][129, 31] = value
    source = save(tmp_path / "source", tensors)
    with pytest.raises(ModelError) as raised:
        run(source, tmp_path / "out", scheme, scales=unit_inputs())
    expected = f"{LAYER}.self_attn.k_proj.weight holds {value} at [129, 31]"
    assert expected in raised.value.message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_nan_in_a_norm_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    tensors = make_tensors()
    (norm, *_) = (name for name in sorted(tensors) if name.endswith("layernorm.weight"))
    tensors[norm][3] = math.nan
    source = save(tmp_path / "source", tensors)
    with pytest.raises(ModelError, match=rf"{norm} holds nan at \[3\]"):
        run(source, tmp_path / "out", "fp8-dynamic")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_disk_too_small_is_told_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(tmp_path / "source", make_tensors())
    planned = run(source, tmp_path / "out", "w8a16").plan.size_bytes
    free = type("Usage", (), {"free": planned - 1})
    monkeypatch.setattr("shutil.disk_usage", lambda _: free)
    with pytest.raises(ExportError, match="are needed"):
        run(source, tmp_path / "other", "w8a16")
    free.free = planned  # type: ignore[attr-defined]
    assert run(source, tmp_path / "other", "w8a16").written.files


# --- the same bytes as llm-compressor and modelopt write of a model, where they divide as we do ---


def quantize(theirs: Tensors, out: Path, form: str, scheme: str) -> Tensors:
    """Quantize the model that the tool was given, with its input scales and no shared ones."""
    inputs = {
        name.removesuffix(".input_scale"): value.float().reshape(())
        for name, value in theirs.items()
        if name.endswith(".input_scale")
    }
    scales = CalibratedScales(inputs=inputs, kv={})
    with separate_scales():
        return run(FOLDER / "llama", out, scheme, form, scales=scales).tensors()
