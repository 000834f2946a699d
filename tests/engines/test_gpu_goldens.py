"""What vLLM's kernels gave on an H100 is what is emulated (`tests/real_engines/gpu_job.py`)."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from fp8calib.engines.arithmetic import read_numerics
from fp8calib.engines.registry import find_emulated
from fp8calib.numerics.formats import E4M3FN, E5M2, Fp8Format
from fp8calib.numerics.schemes import Granularity
from fp8calib.plugins.kv_types.types import CACHE_TYPES
from fp8calib.verification.emulation.fake_quantize import Quantizer
from fp8calib.verification.emulation.probabilities import AttentionCall, attend_in_fp32
from tests.kit.gpu_inputs import (
    ATTENTION_SCALES,
    DTYPES,
    HEAD_SIZES,
    RECORDED_ROWS,
    SCALES,
    draw_activations,
    draw_attention,
    draw_wide,
    list_edges,
)

GOLDENS = Path(__file__).parent / "goldens" / "h100.safetensors"
NUMERICS = find_emulated("vllm==0.26")[1]
CLOSE = 4e-3
"""Relative: the output is rounded to bfloat16 (1.7e-3), and FP8 tensor cores keep some 14 bits of
a sum."""

SMALLEST_SHARE = 0.999
"""So many codes are equal; the others are of numbers that lie next to the middle of two codes."""


@pytest.fixture(scope="module")
def goldens() -> Mapping[str, torch.Tensor]:
    with safe_open(GOLDENS, "pt") as file:
        assert file.metadata() == {"vllm": "0.26.0", "gpu": "NVIDIA H100 80GB HBM3"}
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def decode(codes: torch.Tensor, fmt: Fp8Format = E4M3FN) -> torch.Tensor:
    values: torch.Tensor = codes.view(getattr(torch, fmt.dtype_name)).float()
    return values


def assert_same(mine: torch.Tensor, found: torch.Tensor) -> None:
    torch.testing.assert_close(mine, found, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cache_holds_the_emulated_codes(
    goldens: Mapping[str, torch.Tensor], dtype: str, scales: str
) -> None:
    scale = torch.tensor(SCALES[scales]).reshape(-1, 1)
    given = {"kv": draw_wide(DTYPES[dtype], 32, 3, 64, seed=1)}
    if scales != "heads":
        given |= dict.fromkeys(("kv edges", "kv edges e5m2"), list_edges(DTYPES[dtype])[:, None])
    for name, x in given.items():
        fmt = E5M2 if name.endswith("e5m2") else E4M3FN
        mine = Quantizer(fmt=fmt, scale=scale).fake(x.float()).values
        assert_same(mine, decode(goldens[f"{dtype}/{name}/{scales}"], fmt) * scale)


@pytest.mark.parametrize("name", ["fp8_per_token_head", "int8_per_token_head"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_of_tokens_and_heads_are_the_emulated_ones_but_for_one_ulp(
    goldens: Mapping[str, torch.Tensor], dtype: str, name: str
) -> None:
    """For a GPU, Triton makes of a division by 448 a product with the reciprocal."""
    codes, scales = (goldens[f"{dtype}/{name}/{part}"] for part in ("codes", "scales"))
    found = decode(codes) if name.startswith("fp8") else codes.view(torch.int8).float()
    x = draw_wide(DTYPES[dtype], 32, 3, 64, seed=1)
    found = found * scales[..., None]
    mine = CACHE_TYPES[name].key(x)
    is_close = (mine - found).abs() <= 2.0**-22 * mine.abs()
    assert float(is_close.float().mean()) >= SMALLEST_SHARE


@pytest.mark.parametrize("scale", ["1", "0.037"])
@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_static_scale_gives_the_emulated_codes(
    goldens: Mapping[str, torch.Tensor], dtype: str, mode: str, scale: str
) -> None:
    """But for NaN, of which the kernel of eager mode makes 448."""
    values = torch.tensor(SCALES[scale])
    by_reciprocal = NUMERICS.input_by_reciprocal
    quantizer = Quantizer(fmt=E4M3FN, scale=values, by_reciprocal=by_reciprocal)
    x = list_edges(DTYPES[dtype])
    mine = quantizer.fake(x.float()).values
    if mode == "eager":
        mine = torch.where(x.isnan(), 448 * values, mine)
    assert_same(mine, decode(goldens[f"{dtype}/static/{mode}/{scale}"]) * values)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_of_tokens_are_the_emulated_ones(
    goldens: Mapping[str, torch.Tensor], dtype: str, mode: str
) -> None:
    """The kernel of eager mode divides where compiled code multiplies by reciprocals."""
    is_compiled = mode == "compiled"
    quantizer = Quantizer(
        fmt=E4M3FN,
        scale=Granularity.TOKEN,
        smallest_scale=NUMERICS.smallest_dynamic_scale,
        by_reciprocal=is_compiled and NUMERICS.token_by_reciprocal,
        scale_by_reciprocal=is_compiled and NUMERICS.token_scale_by_reciprocal,
    )
    x = draw_activations(DTYPES[dtype]).float()
    scales = goldens[f"{dtype}/token/{mode}/scales"]
    assert scales.min() == torch.tensor(read_numerics("vllm").smallest_dynamic_scale)
    assert_same(quantizer.scale_for(x), scales)
    assert_same(quantizer.fake(x).values, decode(goldens[f"{dtype}/token/{mode}/codes"]) * scales)


@pytest.mark.parametrize("name", ["group", "group of a power of two"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_of_channels_are_those_emulated(
    goldens: Mapping[str, torch.Tensor], dtype: str, name: str
) -> None:
    quantizer = Quantizer(
        fmt=E4M3FN,
        scale=Granularity.GROUP,
        block=(1, 128),
        smallest_scale=read_numerics("vllm").smallest_group_scale,
        power_of_two=name != "group",
    )
    scales = goldens[f"{dtype}/{name}/scales"].repeat_interleave(128, 1)
    mine = quantizer.fake(draw_activations(DTYPES[dtype]).float()).values
    assert_same(mine, decode(goldens[f"{dtype}/{name}/codes"]) * scales)


@pytest.mark.parametrize("size", HEAD_SIZES)
def test_attention_rounds_probabilities_tile_by_tile(
    goldens: Mapping[str, torch.Tensor], size: int
) -> None:
    """No other number of keys, nor all of them at once, comes as near as that of the engine."""
    tile = NUMERICS.find_tile(size)
    errors = {
        each: _compare(goldens[f"attention/{size}"], size, each) for each in range(0, 257, 16)
    }
    assert errors[tile] < CLOSE
    assert min(errors, key=lambda each: errors[each]) == tile


def _compare(found: torch.Tensor, size: int, tile: int) -> float:
    """Give the error of emulated attention relative to the kernel's output."""
    given = {}
    for name, x in draw_attention(size).items():
        quantizer = Quantizer(fmt=E4M3FN, scale=torch.tensor(ATTENTION_SCALES[name]))
        given[name] = quantizer.fake(x.float()).values.transpose(0, 1)[None]
    call = AttentionCall(
        function=lambda *_, **__: (torch.empty(0), None),
        module=nn.Identity(),
        query=given["q"],
        key=given["k"],
        value=given["v"],
        mask=None,
        options={"is_causal": True},
    )
    factor = torch.tensor(1 / NUMERICS.probability_factor)
    quantizer = Quantizer(fmt=E4M3FN, scale=factor, tile=tile)
    mine = attend_in_fp32(call, quantizer, None)[0][0, RECORDED_ROWS]
    return float((mine - found.float()).norm() / mine.norm())
