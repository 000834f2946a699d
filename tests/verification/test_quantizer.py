"""One tensor through FP8 and back: numpy, and numbers by hand."""

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8calib.numerics.formats import E4M3FN
from fp8calib.numerics.schemes import Granularity
from fp8calib.verification.emulation.fake_quantize import Damage, Quantizer, measure_damage


def draw(*shape: int, seed: int = 5) -> torch.Tensor:
    """Draw normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_numbers_by_hand() -> None:
    """Scale 0.5: 9.2 -> 18.4 -> 18 -> 9; ties go to even; 300 saturates at 448 / 2."""
    quantizer = Quantizer(fmt=E4M3FN, scale=torch.tensor(0.5))
    x = torch.tensor([9.2, -9.2, 8.5, 9.5, 300.0, 0.0005, 0.0004882, -0.0])
    expected = torch.tensor([9.0, -9.0, 8.0, 10.0, 224.0, 2.0**-10, 0.0, -0.0])
    found = quantizer.fake(x).values
    assert found.tolist() == expected.tolist()
    assert found.signbit().tolist() == expected.signbit().tolist()
    down = Quantizer(fmt=E4M3FN, scale=torch.tensor(0.5), rounding="toward-zero")
    assert down.fake(x).values.tolist() == [9.0, -9.0, 8.0, 9.0, 224.0, 0.0, 0.0, -0.0]


def test_dynamic_scales_keep_their_bounds() -> None:
    """Row 0 is below the smallest scale, row 1 above the largest amax: it clips at 100."""
    quantizer = Quantizer(
        fmt=E4M3FN, scale=Granularity.TOKEN, smallest_scale=0.2, largest_amax=100.0
    )
    x = torch.tensor([[1.0, 0.3], [448.0, 50.0], [56.0, 1.0]])
    assert quantizer.scale_for(x).flatten().tolist() == pytest.approx([0.2, 100 / 448, 0.2])
    assert quantizer.fake(x).values[1, 0] == pytest.approx(100.0, rel=1e-6)


# --- damage ------------------------------------------------------------------------------------


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
