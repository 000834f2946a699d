"""What each cache type stores, against computations by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers.cache_utils import Fp8QuantizedLayer

from fp8calib.plugins.kv_types import round_trips
from fp8calib.plugins.kv_types.types import CACHE_TYPES, Store
from tests.plugins.kv_types import by_hand
from tests.plugins.kv_types.by_hand import OneVector

DTYPES = (torch.bfloat16, torch.float32)


def draw_vectors(size: int, dtype: torch.dtype, *, seed: int = 3) -> torch.Tensor:
    """Draw vectors [batch, heads, tokens, size] of many magnitudes, with zeros and outliers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 2, 12, size, generator=generator)
    x = x * torch.exp(2 * torch.randn(2, 2, 12, 1, generator=generator))
    x[0, 0, 0] = 0
    x[0, 1, 1, 5] *= 1000
    x[1, 0, 2] *= 1e-7
    x[1, 1, 3] = 1.5
    return x.to(dtype)


def store_by_hand(store: OneVector, x: torch.Tensor) -> torch.Tensor:
    rows = [store(row.numpy()) for row in x.float().reshape(-1, x.shape[-1])]
    return torch.from_numpy(np.stack(rows)).reshape(x.shape)


GLOBAL = torch.tensor(0.0123)
EXACT: dict[str, tuple[Store, OneVector]] = {
    "fp8_per_token_head": (round_trips.e4m3_vectors, by_hand.fp8_per_token_head),
    "int8_per_token_head": (round_trips.int8_vectors, by_hand.int8_per_token_head),
    "int4, rotated": (round_trips.int4_as_rotated, by_hand.int4_as_rotated),
    "nvfp4": (partial(round_trips.nvfp4, scale=GLOBAL), partial(by_hand.nvfp4, scale=0.0123)),
    "turboquant, 4-bit values": (
        partial(round_trips.uniform_value, bits=4),
        by_hand.uniform_value(4),
    ),
    "turboquant, 3-bit values": (
        partial(round_trips.uniform_value, bits=3),
        by_hand.uniform_value(3),
    ),
    "ultraquant": (round_trips.ultraquant, by_hand.ultraquant),
    "fp8_ds_mla": (round_trips.latent_tiles, by_hand.fp8_tiles),
    "mxfp8": (round_trips.mxfp8, by_hand.mxfp8),
    "fp4_mx_block16": (round_trips.mx_block16, by_hand.mx_block16),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EXACT)
def test_values_are_those_by_hand(name: str, dtype: torch.dtype) -> None:
    store, store_one = EXACT[name]
    x = draw_vectors(256 if name == "fp8_ds_mla" else 64, dtype)
    assert torch.equal(store(x), store_by_hand(store_one, x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantized_cache_is_that_of_transformers(dtype: torch.dtype) -> None:
    """Its own class stores a prompt and a token; what it gives back of the prompt is compared."""
    x = draw_vectors(64, dtype)
    for sequence in x:
        layer = Fp8QuantizedLayer()
        prompt = sequence[None]
        layer.update(prompt, 2 * prompt)
        key, value = layer.update(prompt[:, :, :1], prompt[:, :, :1])
        found_key, found_value = (
            round_trips.first_update(each).to(dtype) for each in (prompt, 2 * prompt)
        )
        assert torch.equal(found_key, key[:, :, :-1])
        assert torch.equal(found_value, value[:, :, :-1])


ROTATED: dict[str, tuple[Store, OneVector]] = {
    "int4_per_token_head": (round_trips.int4_vectors, by_hand.int4_per_token_head),
    "ultraquant key": (round_trips.ultraquant_key, by_hand.ultraquant_key),
}


@pytest.mark.parametrize("name", ROTATED)
@pytest.mark.parametrize("size", [64, 96])
def test_rotated_values_are_those_by_hand(name: str, size: int) -> None:
    """Sums in another order may fall on the other side of a step: one in a thousand does."""
    if size & (size - 1) and name != "int4_per_token_head":
        pytest.skip("its heads are powers of two")
    store, store_one = ROTATED[name]
    x = draw_vectors(size, torch.bfloat16)
    found, wanted = store(x), store_by_hand(store_one, x)
    largest = wanted.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    is_near = (found - wanted).abs() <= 1e-5 * largest
    assert float(is_near.all(-1).float().mean()) > 0.95


@pytest.mark.parametrize("bits", [3, 4])
def test_levels_of_a_gaussian_are_those_of_the_table(bits: int) -> None:
    """Max, Quantizing for minimum distortion, 1960, table I."""
    halves = {3: [0.2451, 0.7560, 1.344, 2.152]}
    halves[4] = [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733]
    levels = round_trips.find_gaussian_levels(64, bits) * 8
    assert levels[2 ** (bits - 1) :].tolist() == pytest.approx(halves[bits], rel=3e-3)
    assert levels.tolist() == pytest.approx((-levels.flip(0)).tolist(), abs=1e-6)


@pytest.mark.parametrize("bits", [3, 4])
def test_key_is_the_nearest_direction_of_its_length(bits: int) -> None:
    x = draw_vectors(128, torch.bfloat16)[:, :, 4:]
    found = round_trips.gaussian_key(x, bits)
    wanted = store_by_hand(by_hand.turboquant_key(bits), x)
    error = (found - wanted).norm(dim=-1) / x.float().norm(dim=-1)
    # The table has four digits: values near a border may take the other level.
    assert float(error.median()) < 3e-3
    assert float(error.max()) < 0.2
    assert torch.allclose(found.norm(dim=-1), x.float().norm(dim=-1), rtol=1e-3)


@pytest.mark.parametrize("scale", [1.0, 0.0123])
def test_four_over_six_takes_the_smaller_error(scale: float) -> None:
    x = draw_vectors(64, torch.bfloat16)
    found = round_trips.nvfp4_four_over_six(x, torch.tensor(scale))
    wanted = store_by_hand(partial(by_hand.nvfp4_4over6, scale=scale), x)
    errors, least = (
        (each - x.float()).unflatten(-1, (-1, 16)).square().sum(-1) for each in (found, wanted)
    )
    assert torch.allclose(errors, least, rtol=1e-5)  # of two that are as good, either is taken
    assert float((found == wanted).float().mean()) > 0.98
    plain = round_trips.nvfp4(x, torch.tensor(scale))
    assert float((found - x.float()).square().sum()) < float((plain - x.float()).square().sum())


@pytest.mark.parametrize("name", CACHE_TYPES)
def test_every_type_keeps_shape_and_finite_values(name: str) -> None:
    cache_type = CACHE_TYPES[name]
    arguments: dict[str, Any] = {"scale": GLOBAL} if cache_type.has_global_scales else {}
    for store in (cache_type.key, cache_type.value or cache_type.key):
        for dtype in DTYPES:
            x = draw_vectors(128, dtype)
            found = store(x, **arguments)
            assert found.shape == x.shape
            assert found.dtype == torch.float32
            assert bool(found.isfinite().all())
            assert not found[0, 0, 0].any(), "zeros stay zeros"


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("fp8_per_token_head", 132, 132),
        ("int8_per_token_head", 132, 132),
        ("int4_per_token_head", 68, 68),
        ("nvfp4", 72, 72),
        ("turboquant_k8v4", 128, 68),
        ("turboquant_4bit_nc", 66, 68),
        ("turboquant_k3v4_nc", 50, 68),
        ("turboquant_3bit_nc", 50, 52),
        ("ultraquant_4bit", 68, 68),
    ],
)
def test_bytes_of_a_vector_of_128(name: str, key: int, value: int) -> None:
    cache_type = CACHE_TYPES[name]
    value_size = cache_type.key_size if cache_type.value is None else cache_type.value_size
    sizes = [bits * 128 / 8 + more for bits, more in (cache_type.key_size, value_size)]
    assert sizes == [key, value]
