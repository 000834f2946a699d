"""The 8-bit formats: numbers typed here, derived there, and checked against another library."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8calib.numerics.formats import E4M3FN, E4M3FNUZ, E5M2, FP8_FORMATS, Fp8Format

OTHERS = [
    (E4M3FN, ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn),
    (E4M3FNUZ, ml_dtypes.float8_e4m3fnuz, torch.float8_e4m3fnuz),
    (E5M2, ml_dtypes.float8_e5m2, torch.float8_e5m2),
]


@pytest.mark.parametrize(
    ("fmt", "largest", "smallest"),
    [
        (E4M3FN, 448.0, 0.001953125),
        (E4M3FNUZ, 240.0, 0.0009765625),
        (E5M2, 57344.0, 0.0000152587890625),
    ],
    ids=lambda value: value.name if isinstance(value, Fp8Format) else "",
)
def test_the_ends_of_the_range(fmt: Fp8Format, largest: float, smallest: float) -> None:
    assert fmt.max == largest
    assert fmt.smallest_subnormal == smallest


@pytest.mark.parametrize(("fmt", "dtype", "_torch_dtype"), OTHERS, ids=list(FP8_FORMATS))
def test_other_libraries_have_the_same_ends(
    fmt: Fp8Format, dtype: type, _torch_dtype: torch.dtype
) -> None:
    info = ml_dtypes.finfo(dtype)
    assert fmt.max == float(info.max)
    assert fmt.smallest_subnormal == float(info.smallest_subnormal)
    assert (fmt.exponent_bits, fmt.mantissa_bits) == (info.nexp, info.nmant)


@pytest.mark.parametrize(("fmt", "_dtype", "torch_dtype"), OTHERS, ids=list(FP8_FORMATS))
def test_of_all_256_codes_none_is_beyond_the_ends(
    fmt: Fp8Format, _dtype: type, torch_dtype: torch.dtype
) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch_dtype).float()
    finite = [value for value in codes.tolist() if math.isfinite(value)]
    assert max(finite) == fmt.max
    assert min(finite) == -fmt.max
    assert min(value for value in finite if value > 0) == fmt.smallest_subnormal
    assert np.float32(fmt.max) == fmt.max


def test_formats_are_found_by_name() -> None:
    assert FP8_FORMATS == {"e4m3fn": E4M3FN, "e4m3fnuz": E4M3FNUZ, "e5m2": E5M2}


@pytest.mark.parametrize(("fmt", "dtype", "_torch_dtype"), OTHERS, ids=list(FP8_FORMATS))
def test_what_still_rounds_to_the_largest_value(
    fmt: Fp8Format, dtype: type, _torch_dtype: torch.dtype
) -> None:
    last = np.float32(fmt.overflow)
    assert last == fmt.overflow
    assert float(last.astype(dtype)) == fmt.max
    assert not math.isfinite(float(np.nextafter(last, np.float32(np.inf)).astype(dtype)))
