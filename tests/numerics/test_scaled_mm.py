"""Emulated W8A8 against torch's own FP8 matrix product, the difference in units in the last place.

On a CPU torch computes it in fp32 from the codes; where there is a GPU, its tensor cores do.
"""

import pytest
import torch

from fp8calib.numerics.formats import E4M3FN
from fp8calib.numerics.schemes import Granularity
from fp8calib.verification.emulation.fake_quantize import Quantizer

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
ROUNDED_ULPS = {"cpu": 1, "cuda": 2}
"""The two sums differ by their order in fp32, which may move a rounding to bfloat16 by one; tensor
cores keep fewer bits of a sum."""


def to_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def distance_in_ulps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Count the bfloat16 values between two numbers of equal sign."""
    assert torch.equal(a.signbit(), b.signbit())
    return (a.view(torch.int16).int() - b.view(torch.int16).int()).abs()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 300.0])
def test_a_static_product_differs_by_a_rounding_at_most(device: str, magnitude: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 256, generator=generator).to(device) * magnitude
    weight = torch.randn(128, 256, generator=generator).to(device) * 0.05
    scales = [tensor.abs().max() / 448 for tensor in (x, weight)]
    theirs = torch._scaled_mm(
        to_fp8(x, scales[0]),
        to_fp8(weight, scales[1]).t(),
        scale_a=scales[0],
        scale_b=scales[1],
        out_dtype=torch.bfloat16,
    )
    x_fake, weight_fake = (
        Quantizer(fmt=E4M3FN, scale=scale).fake(tensor).values
        for tensor, scale in zip((x, weight), scales, strict=True)
    )
    ours = (x_fake @ weight_fake.t()).bfloat16()
    ulps = distance_in_ulps(ours, theirs)
    # Where a sum all but cancels, its order decides: those are compared with the terms' size.
    is_small = theirs.abs() < 1e-3 * theirs.abs().max()
    assert int(ulps[~is_small].max()) <= ROUNDED_ULPS[device]
    assert float((ulps[~is_small] > 0).float().mean()) < 0.01


@pytest.mark.parametrize("device", DEVICES)
def test_static_codes_are_those_torch_multiplies(device: str) -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).to(device)
    scale = x.abs().max() / 448
    fake = Quantizer(fmt=E4M3FN, scale=scale).fake(x).values
    assert torch.equal(fake, to_fp8(x, scale).float() * scale)


def test_dynamic_scales_cover_a_token() -> None:
    x = torch.tensor([[448.0, 1.0], [4.48, 0.01]])
    scale = Quantizer(fmt=E4M3FN, scale=Granularity.TOKEN).scale_for(x)
    assert torch.equal(scale, torch.tensor([[1.0], [4.48 / 448]]))
