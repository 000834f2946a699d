"""For any bytes, a reader returns scales or raises one ModelError."""

import io
import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from fp8calib.errors import ModelError
from fp8calib.formats.read import has_kv_scales, read_scales
from fp8calib.formats.table import ScaleTable
from fp8calib.numerics.formats import E4M3FNUZ, Fp8Format
from tests.formats.handmade import make_attention, make_geometry
from tests.kit.minutes import HAS_MINUTES

TWO_LAYERS = make_geometry([make_attention(0), make_attention(1)])
NAMES = [
    f"{prefix}.{layer}.self_attn.{suffix}"
    for prefix in ("model.layers", "layers", "x.layers")
    for layer in ("0", "1", "2")
    for suffix in ("k_scale", "v_scale", "kv_scale", "q_scale", "k_proj.k_scale", "k_zero_point")
]
FUZZ = settings(
    max_examples=200 if HAS_MINUTES else 60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)


def _outcome(path: Path, source_fmt: Fp8Format | None) -> ScaleTable | ModelError:
    try:
        has_kv_scales(path)
        return read_scales(path, TWO_LAYERS, source_fmt=source_fmt).table
    except ModelError as error:
        return error


def _read(path: Path) -> None:
    """Read twice; every number that comes out is a scale, every error begins with the file."""
    for source_fmt in (None, E4M3FNUZ):
        outcome = _outcome(path, source_fmt)
        if isinstance(outcome, ModelError):
            assert outcome.message.startswith(str(path))
            continue
        values = torch.cat([scale.values.flatten() for scale in outcome.scales.values()])
        assert all(math.isfinite(value) and value > 0 for value in values.tolist())
        assert len(outcome.scales) in (4, 6)


@FUZZ
@given(st.binary(max_size=200))
@pytest.mark.parametrize("suffix", ["json", "safetensors", "npz"])
def test_any_bytes_are_refused(tmp_path: Path, suffix: str, raw: bytes) -> None:
    path = tmp_path / f"rank0.{suffix}"
    path.write_bytes(raw)
    with pytest.raises(ModelError):
        read_scales(path, TWO_LAYERS)


tensors = st.dictionaries(
    st.sampled_from(NAMES),
    st.tuples(
        st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.bool]),
        st.sampled_from([(), (1,), (2, 1, 1), (4, 1, 1), (3,), (0,)]),
        st.sampled_from([0.5, 1.0, 1.0, 0.0, -1.0, float("nan"), float("inf")]),
    ),
    max_size=8,
)


def _make(described: Mapping[str, tuple[torch.dtype, tuple[int, ...], float]]) -> bytes:
    made = {
        name: torch.full(shape, value).nan_to_num(value if dtype.is_floating_point else 0).to(dtype)
        for name, (dtype, shape, value) in described.items()
    }
    return bytes(save(made))


@FUZZ
@given(tensors)
def test_any_tensors_are_read_or_refused(
    tmp_path: Path, described: Mapping[str, tuple[torch.dtype, tuple[int, ...], float]]
) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(_make(described))
    _read(path)


def _safetensors() -> bytes:
    names = [name for name in NAMES if name.startswith("model.layers") and "layers.2" not in name]
    pairs = [name for name in names if name.endswith(("attn.k_scale", "attn.v_scale"))]
    return bytes(save({name: torch.ones(1) for name in pairs}))


def _archive() -> bytes:
    target = io.BytesIO()
    np.savez(target, **{f"layers.{i}.kv_cache_scaling_factor": np.ones(1, "f4") for i in (0, 1)})
    return target.getvalue()


def _json() -> bytes:
    factors = {"rank0": {"0": 0.5, "1": 2.0}}
    kv_cache = {"dtype": "float8_e4m3fn", "scaling_factor": factors}
    return json.dumps({"model_type": "llama", "kv_cache": kv_cache}).encode()


@pytest.mark.parametrize(
    ("suffix", "good"), [("safetensors", _safetensors()), ("npz", _archive()), ("json", _json())]
)
@FUZZ
@given(data=st.data())
def test_a_good_file_with_flipped_bytes_is_read_or_refused(
    tmp_path: Path, suffix: str, good: bytes, data: st.DataObject
) -> None:
    path = tmp_path / f"rank0.{suffix}"
    path.write_bytes(good)
    assert has_kv_scales(path)
    read_scales(path, TWO_LAYERS)

    raw = bytearray(good)
    places = st.integers(0, len(raw) - 1)
    for place in data.draw(st.lists(places, min_size=1, max_size=4)):
        raw[place] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(places)] if data.draw(st.booleans()) else raw)
    _read(path)
