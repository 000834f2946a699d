"""Scales by rule: which magnitudes a rule moves, and which it leaves as they are."""

import dataclasses
from collections.abc import Mapping

import pytest
import torch

from fp8calib.calibration.calibration_stats import CalibrationStats
from fp8calib.formats.compute import compute_kv_scales
from fp8calib.model.geometry import Role, Site
from fp8calib.numerics.formats import E4M3FN, E4M3FNUZ, Fp8Format
from fp8calib.numerics.histogram import count_bins
from fp8calib.numerics.rules import AMAX, ScaleRules, parse_rule
from tests.formats.handmade import (
    linear_stats,
    plain_stats,
)
from tests.numerics.test_histogram_estimates import UNIT_BIN, make_histogram

RULES = ("amax", "percentile:50", "percentile:99.9", "mse", "headroom:2")
OCTAVE = 8
BELOW_64 = {UNIT_BIN + 6 * OCTAVE - 1: 500, UNIT_BIN + 12 * OCTAVE: 500}


def with_histograms(
    stats: CalibrationStats, counts: Mapping[int, int], *, roles: str = "k v input"
) -> CalibrationStats:
    """Give the sites of some roles the same histogram."""
    histogram = make_histogram(dict(counts))
    sites = {
        site: dataclasses.replace(seen, histogram=histogram) if site.role in roles.split() else seen
        for site, seen in stats.sites.items()
    }
    return dataclasses.replace(stats, sites=sites)


def change(stats: CalibrationStats, site: Site, **values: object) -> CalibrationStats:
    """Change what was seen at one site."""
    seen = dataclasses.replace(stats.sites[site], **values)
    return dataclasses.replace(stats, sites={**stats.sites, site: seen})


def kv_site(layer: int, role: Role) -> Site:
    return Site(f"model.layers.{layer}.self_attn", role)


# --- amax --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [E4M3FN, E4M3FNUZ], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("tp", [1, 2])
def test_amax_is_divided_by_the_largest_value_bit_for_bit(fmt: Fp8Format, tp: int) -> None:
    stats = with_histograms(linear_stats(), BELOW_64)
    generator = torch.Generator().manual_seed(3)
    drawn = torch.rand(2, generator=generator) * 7
    stats = change(stats, kv_site(0, Role.K), amax=drawn)
    default = compute_kv_scales(stats, fmt, tp=tp, query=True)
    named = compute_kv_scales(stats, fmt, tp=tp, query=True, rules=ScaleRules(rule=AMAX))
    whole = drawn if tp == 2 else drawn.max().reshape(1)
    largest = {"e4m3fn": 448, "e4m3fnuz": 240}[fmt.name]
    assert torch.equal(default.scales[kv_site(0, Role.K)].values, whole / largest)
    for table in (default, named):
        assert table.kept_amax == {}
        for site, scale in table.scales.items():
            assert torch.equal(scale.values, default.scales[site].values)


# --- all rules ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("amax", [1e-45, 2.0**-60, 3e38])
def test_scales_are_finite_and_positive_at_the_ends_of_fp32(rule: str, amax: float) -> None:
    values = torch.tensor([amax, amax / 2])
    stats = change(
        with_histograms(plain_stats(), BELOW_64),
        kv_site(0, Role.K),
        amax=values,
        histogram=count_bins(values),
    )
    table = compute_kv_scales(stats, E4M3FN, per_head=True, rules=ScaleRules(rule=parse_rule(rule)))
    found = table.scales[kv_site(0, Role.K)].values
    assert bool((found.isfinite() & (found > 0)).all())
