"""One tensor through FP8 and back: casts of torch and ml_dtypes, numpy, and numbers by hand."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8calib.numerics.formats import E4M3FN, E4M3FNUZ, E5M2, Fp8Format, Rounding
from fp8calib.numerics.schemes import Granularity
from fp8calib.verification.emulation.damage import Damage, measure_damage
from fp8calib.verification.emulation.fake_quantize import (
    Quantizer,
)
from tests.verification.by_hand import cast, cast_blocks, cast_groups, cast_rows, search_down

FORMATS = [
    (E4M3FN, torch.float8_e4m3fn, 448.0, 2.0**-6),
    (E4M3FNUZ, torch.float8_e4m3fnuz, 240.0, 2.0**-7),
    (E5M2, torch.float8_e5m2, 57344.0, 2.0**-14),
]
EVERY_FORMAT = pytest.mark.parametrize(
    ("fmt", "dtype", "largest", "normal"), FORMATS, ids=[fmt.name for fmt, *_ in FORMATS]
)
EVERY_BFLOAT16 = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
NUMBERS = EVERY_BFLOAT16[EVERY_BFLOAT16.isfinite()].float()


def draw(*shape: int, seed: int = 5) -> torch.Tensor:
    """Draw normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@EVERY_FORMAT
@pytest.mark.parametrize("scale", [1.0, 0.0371, 3.0])
def test_every_bfloat16_is_divided_saturated_and_cast_as_torch_does(
    fmt: Fp8Format, dtype: torch.dtype, largest: float, normal: float, scale: float
) -> None:
    del largest, normal
    found = Quantizer(fmt=fmt, scale=torch.tensor(scale)).fake(NUMBERS).values
    assert torch.equal(found, cast(NUMBERS, torch.tensor(scale), dtype))


@EVERY_FORMAT
def test_every_bfloat16_rounds_toward_zero_as_a_search_does(
    fmt: Fp8Format, dtype: torch.dtype, largest: float, normal: float
) -> None:
    del largest, normal
    scale = torch.tensor(0.0371)
    quantizer = Quantizer(fmt=fmt, scale=scale, rounding=Rounding.TOWARD_ZERO)
    found = quantizer.fake(NUMBERS).values
    assert torch.equal(found, search_down(NUMBERS, scale, dtype))


def test_numbers_by_hand() -> None:
    """Scale 0.5: 9.2 -> 18.4 -> 18 -> 9; ties go to even; 300 saturates at 448 / 2."""
    quantizer = Quantizer(fmt=E4M3FN, scale=torch.tensor(0.5))
    x = torch.tensor([9.2, -9.2, 8.5, 9.5, 300.0, 0.0005, 0.0004882, -0.0])
    expected = torch.tensor([9.0, -9.0, 8.0, 10.0, 224.0, 2.0**-10, 0.0, -0.0])
    found = quantizer.fake(x).values
    assert found.tolist() == expected.tolist()
    assert found.signbit().tolist() == expected.signbit().tolist()
    down = Quantizer(fmt=E4M3FN, scale=torch.tensor(0.5), rounding=Rounding.TOWARD_ZERO)
    assert down.fake(x).values.tolist() == [9.0, -9.0, 8.0, 9.0, 224.0, 0.0, 0.0, -0.0]


# --- dynamic scales ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 5, 300), (4, 128), (2, 7, 96)])
def test_dynamic_scales_cover_a_tensor_a_token_or_128_channels(shape: tuple[int, ...]) -> None:
    x = draw(*shape)
    whole = cast(x, x.abs().max() / torch.tensor(448.0))
    expected = {
        Granularity.TENSOR: whole,
        Granularity.TOKEN: cast_rows(x),
        Granularity.GROUP: cast_groups(x),
    }
    for dynamic, values in expected.items():
        assert torch.equal(Quantizer(fmt=E4M3FN, scale=dynamic).fake(x).values, values), dynamic


@pytest.mark.parametrize("shape", [(300, 200), (128, 128), (64, 400), (129, 1)])
def test_blocks_are_128_by_128_and_the_last_ones_are_cut(shape: tuple[int, int]) -> None:
    weight = draw(*shape)
    found = Quantizer(fmt=E4M3FN, scale=Granularity.BLOCK).fake(weight).values
    assert torch.equal(found, cast_blocks(weight))
    stacked = torch.stack([weight, weight * 3])
    found = Quantizer(fmt=E4M3FN, scale=Granularity.BLOCK).fake(stacked).values
    assert torch.equal(found, torch.stack([cast_blocks(weight), cast_blocks(weight * 3)]))


def test_dynamic_scales_keep_their_bounds() -> None:
    """Row 0 is below the smallest scale, row 1 above the largest amax: it clips at 100."""
    quantizer = Quantizer(
        fmt=E4M3FN, scale=Granularity.TOKEN, smallest_scale=0.2, largest_amax=100.0
    )
    x = torch.tensor([[1.0, 0.3], [448.0, 50.0], [56.0, 1.0]])
    assert quantizer.scale_for(x).flatten().tolist() == pytest.approx([0.2, 100 / 448, 0.2])
    assert quantizer.fake(x).values[1, 0] == pytest.approx(100.0, rel=1e-6)


# --- engines' ways of dividing -----------------------------------------------------------------


def test_a_reciprocal_is_rounded_to_fp32_first() -> None:
    scale = torch.arange(1, 4097) / 997
    x = scale * 1.0625  # halfway between two codes
    found = Quantizer(fmt=E4M3FN, scale=scale, by_reciprocal=True).fake(x).values
    quotients = x.numpy() * (np.float32(1) / scale.numpy()), x.numpy() / scale.numpy()
    expected, other = (
        each.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) for each in quotients
    )
    assert np.array_equal(found.numpy(), expected * scale.numpy())
    assert not np.array_equal(expected, other)


def test_dividing_in_the_model_dtype_rounds_scale_and_quotient() -> None:
    scale, x = torch.tensor(0.0371), NUMBERS.to(torch.bfloat16)
    found = Quantizer(fmt=E4M3FN, scale=scale, in_model_dtype=True).fake(x)
    quotient = (x.double() / float(scale.to(torch.bfloat16))).float().to(torch.bfloat16)
    codes = quotient.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(found.values, codes.float() * scale)


# --- damage ------------------------------------------------------------------------------------


@EVERY_FORMAT
def test_damage_is_what_numpy_counts(
    fmt: Fp8Format, dtype: torch.dtype, largest: float, normal: float
) -> None:
    """Of a tensor with values that clip, that vanish, and zeros."""
    x = draw(40, 50) * torch.logspace(-9, 6, 50)
    x[0] = 0.0
    del normal
    scale = torch.tensor(0.0371)
    fake = Quantizer(fmt=fmt, scale=scale).fake(x)
    damage = Damage(*measure_damage(x, fake).tolist())
    exact = x.numpy().astype(np.float64)
    after = cast(x, scale, dtype).numpy().astype(np.float64)
    assert damage.signal == pytest.approx((exact**2).sum(), rel=1e-6)
    assert damage.noise == pytest.approx(((after - exact) ** 2).sum(), rel=1e-6)
    assert damage.clipped == (np.abs(exact) / 0.0371 > largest * (1 + 1e-6)).sum()
    assert damage.flushed == ((after == 0) & (exact != 0)).sum()
    assert damage.num_elements == 2000
    assert damage.amax == pytest.approx(np.abs(exact).max())
    assert damage.flushed > 100
    assert damage.clipped > 100


@pytest.mark.parametrize("is_contiguous", [True, False])
@pytest.mark.parametrize("magnitude", [1e-37, 1e-30, 1e-21, 1e-10, 1.0, 1e10, 1e19, 1e37])
def test_the_noise_ratio_is_right_over_the_whole_range(
    magnitude: float, is_contiguous: bool
) -> None:
    """The squares of most of these magnitudes are not in the range of fp32."""
    x = draw(40, 50) * magnitude
    x = x if is_contiguous else x.T
    scale = torch.tensor(magnitude / 100)
    fake = Quantizer(fmt=E4M3FN, scale=scale).fake(x)
    damage = Damage(*measure_damage(x, fake).tolist())
    exact = x.numpy().astype(np.float64)
    codes = (x.numpy() / scale.numpy()).astype(ml_dtypes.float8_e4m3fn)
    noise = codes.astype(np.float64) * float(scale) - exact
    expected = 10 * np.log10((exact**2).sum() / (noise**2).sum())
    assert 20 < expected < 40
    assert damage.sqnr_db == pytest.approx(expected, abs=1e-4)


def test_the_amax_itself_does_not_count_as_clipped() -> None:
    """Over its own scale, both rounded, it may lie an ulp above 448; what is above it clips."""
    amaxes = (torch.arange(1, 20001) / 997).float()
    scales = amaxes / 448
    fake = Quantizer(fmt=E4M3FN, scale=scales).fake(amaxes)
    assert bool((amaxes / scales > 448).any())
    assert float(measure_damage(amaxes, fake)[2]) == 0
    larger = amaxes * 1.0001
    fake = Quantizer(fmt=E4M3FN, scale=scales).fake(larger)
    assert float(measure_damage(larger, fake)[2]) == 20000


# --- powers of two -----------------------------------------------------------------------------


@EVERY_FORMAT
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    octaves=st.integers(-4, 4),
    rounding=st.sampled_from(list(Rounding)),
    by_reciprocal=st.booleans(),
)
def test_a_power_of_two_on_a_scale_changes_nothing_inside_the_range(
    fmt: Fp8Format,
    dtype: torch.dtype,
    largest: float,
    normal: float,
    seed: int,
    octaves: int,
    rounding: Rounding,
    by_reciprocal: bool,
) -> None:
    """Magnitudes keep 4 octaves from both ends of the normal range."""
    del dtype
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.rand(200, generator=generator)
    low, high = np.log2(normal) + 4, np.log2(largest) - 4
    signs = torch.where(torch.rand(200, generator=generator) < 0.5, -1.0, 1.0)
    scale = torch.rand(1, generator=generator) + 0.01
    x = signs * torch.exp2(low + (high - low) * exponents) * scale
    # The quotient may differ from x by an ulp: still far from both ends.
    settings_ = {"fmt": fmt, "rounding": rounding, "by_reciprocal": by_reciprocal}
    one = Quantizer(scale=scale, **settings_).fake(x).values  # type: ignore[arg-type]
    other = Quantizer(scale=scale * 2.0**octaves, **settings_).fake(x).values  # type: ignore[arg-type]
    assert torch.equal(one, other)
