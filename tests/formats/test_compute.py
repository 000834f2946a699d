"""Scales by rule: which magnitudes a rule moves, and which it leaves as they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
import torch

from fp8calib.calibration.calibration_stats import CalibrationStats
from fp8calib.errors import ExportError
from fp8calib.formats.compute import compute_kv_scales, compute_linear_scales
from fp8calib.formats.table import ScaleSource, ScaleTable
from fp8calib.model.shapes import Role, Site
from fp8calib.numerics.formats import E4M3FN, E4M3FNUZ, Fp8Format
from fp8calib.numerics.histogram import count_bins
from fp8calib.numerics.rules import AMAX, Fallback, parse_rule
from tests.formats.handmade import (
    latent_stats,
    linear_stats,
    plain_stats,
    shared_stats,
)
from tests.numerics.test_histogram_estimates import UNIT_BIN, make_histogram

RULES = ("amax", "percentile:50", "percentile:99.9", "mse", "headroom:2")
OCTAVE = 8
LIMIT = 64.0
"""What `percentile:50` of BELOW_64 gives: half its values lie in the bin that ends there."""
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


def values_of(table: ScaleTable, layer: int, role: Role) -> list[float]:
    """Give scales times 448: the magnitudes they cover."""
    return (table.scales[kv_site(layer, role)].values * 448).flatten().tolist()


# --- amax --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [E4M3FN, E4M3FNUZ], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("tp", [1, 2])
def test_amax_is_divided_by_the_largest_value_bit_for_bit(fmt: Fp8Format, tp: int) -> None:
    stats = with_histograms(linear_stats(), BELOW_64)
    generator = torch.Generator().manual_seed(3)
    drawn = torch.rand(2, generator=generator) * 7
    stats = change(stats, kv_site(0, Role.K), amax=drawn)
    default = compute_kv_scales(stats, fmt, tp=tp, query=True)
    named = compute_kv_scales(stats, fmt, tp=tp, query=True, rule=AMAX)
    whole = drawn if tp == 2 else drawn.max().reshape(1)
    largest = {"e4m3fn": 448, "e4m3fnuz": 240}[fmt.name]
    assert torch.equal(default.scales[kv_site(0, Role.K)].values, whole / largest)
    for table in (default, named):
        assert table.kept_amax == {}
        for site, scale in table.scales.items():
            assert torch.equal(scale.values, default.scales[site].values)


# --- K, V and q --------------------------------------------------------------------------------


def test_a_percentile_clamps_heads_and_leaves_smaller_ones() -> None:
    # K of layer 0 reaches 112 and 224, V 56 and 336; of layer 1 896 and 28, V 14 and 7.
    stats = with_histograms(plain_stats(), BELOW_64)
    per_head = compute_kv_scales(stats, E4M3FN, per_head=True, rule=parse_rule("percentile:50"))
    assert values_of(per_head, 0, Role.K) == [LIMIT, LIMIT]
    assert values_of(per_head, 0, Role.V) == [56.0, LIMIT]
    assert values_of(per_head, 1, Role.K) == [LIMIT, 28.0]
    assert values_of(per_head, 1, Role.V) == [14.0, 7.0]
    ranks = compute_kv_scales(stats, E4M3FN, tp=2, rule=parse_rule("percentile:50"))
    assert values_of(ranks, 0, Role.V) == [56.0, LIMIT]
    whole = compute_kv_scales(stats, E4M3FN, rule=parse_rule("percentile:50"))
    assert values_of(whole, 0, Role.V) == [LIMIT]
    assert values_of(whole, 1, Role.V) == [14.0]
    assert whole.kept_amax == {}
    assert whole.not_observed() == []


@pytest.mark.parametrize("text", ["mse", "percentile:99"])
def test_q_keeps_its_amax_where_a_rule_needs_a_histogram_and_says_so(text: str) -> None:
    stats = with_histograms(plain_stats(), BELOW_64)
    table = compute_kv_scales(stats, E4M3FN, query=True, rule=parse_rule(text))
    assert table.kept_amax == {
        kv_site(layer, Role.Q): f"{text} needs a histogram, which is missing: amax is used"
        for layer in range(2)
    }
    assert values_of(table, 0, Role.Q) == [4 * 448.0]
    assert compute_kv_scales(stats, E4M3FN, rule=parse_rule(text)).kept_amax == {}


def test_layers_that_share_a_cache_carry_the_scale_the_rule_gave_its_writer() -> None:
    stats = with_histograms(shared_stats(), BELOW_64)
    table = compute_kv_scales(stats, E4M3FN, rule=parse_rule("percentile:50"))
    for reader, writer in ((2, 1), (3, 0)):
        for role in (Role.K, Role.V):
            assert values_of(table, reader, role) == values_of(table, writer, role)
            assert table.scales[kv_site(reader, role)].source is ScaleSource.SHARED
    assert values_of(table, 3, Role.K) == [LIMIT]
    without = compute_kv_scales(shared_stats(), E4M3FN, rule=parse_rule("mse"))
    assert {site.module for site in without.kept_amax} == {
        f"model.layers.{index}.self_attn" for index in range(2)
    }


def test_a_latent_cache_is_one_for_a_rule() -> None:
    # The latent reaches 112, the rotary part 224; 900 of 1000 values of both lie below 64.
    stats = latent_stats()
    low, high = make_histogram({UNIT_BIN: 500}), dict(BELOW_64)
    high[UNIT_BIN + 6 * OCTAVE - 1] = 400
    high[UNIT_BIN + 12 * OCTAVE] = 100
    stats = change(stats, kv_site(0, Role.K), histogram=low)
    stats = change(stats, kv_site(0, Role.V), histogram=make_histogram(high))
    table = compute_kv_scales(stats, E4M3FN, tp=2, rule=parse_rule("percentile:90"))
    assert values_of(table, 0, Role.K) == [LIMIT, LIMIT]
    assert values_of(table, 0, Role.V) == [LIMIT, LIMIT]
    # Of the rotary part alone 90 percent lie higher.
    amax = compute_kv_scales(stats, E4M3FN, tp=2)
    assert values_of(amax, 0, Role.K) == [224.0, 224.0]


def test_a_latent_cache_of_which_half_has_no_histogram_keeps_its_amax() -> None:
    stats = with_histograms(latent_stats(), BELOW_64, roles="k")
    table = compute_kv_scales(stats, E4M3FN, rule=parse_rule("percentile:50"))
    assert values_of(table, 0, Role.K) == [224.0]
    assert set(table.kept_amax) == {kv_site(0, Role.K), kv_site(0, Role.V)}


# --- dead and unseen ---------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_zeros_take_the_fallback_under_every_rule(rule: str) -> None:
    stats = with_histograms(plain_stats(), BELOW_64)
    site = kv_site(0, Role.V)
    dead = {"amax": torch.zeros(2), "histogram": make_histogram({0: 9})}
    stats = change(stats, site, **dead)
    table = compute_kv_scales(stats, E4M3FN, rule=parse_rule(rule))
    assert table.scales[site].source is ScaleSource.ALL_ZERO
    assert table.scales[site].is_substitute
    assert table.scales[site].values.tolist() == [1.0]
    assert table.kept_amax == {}
    with pytest.raises(ExportError, match="amax is zero"):
        compute_kv_scales(stats, E4M3FN, rule=parse_rule(rule), fallback=Fallback.REFUSE)


# --- linears -----------------------------------------------------------------------------------


def test_inputs_are_clamped_rank_by_rank() -> None:
    # The input of o_proj reaches 8 * 448 in the first half of its channels, and 4 * 448 in the
    # other; that of down_proj 1 * 448 and 4 * 448. Half the values lie under 1024.
    stats = with_histograms(linear_stats(), {UNIT_BIN + 10 * OCTAVE - 1: 5, UNIT_BIN + 104: 5})
    table = compute_linear_scales(stats, E4M3FN, tp=2, rule=parse_rule("percentile:50"))
    found = {
        name: (table.scales[Site(f"model.layers.0.{name}", Role.INPUT)].values * 448).tolist()
        for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
    }
    assert found == {
        "self_attn.q_proj": [1024.0, 1024.0],
        "self_attn.o_proj": [1024.0, 1024.0],
        "mlp.gate_proj": [224.0, 224.0],
        "mlp.down_proj": [448.0, 1024.0],
    }
    assert table.kept_amax == {}


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
    table = compute_kv_scales(stats, E4M3FN, per_head=True, rule=parse_rule(rule))
    found = table.scales[kv_site(0, Role.K)].values
    assert bool((found.isfinite() & (found > 0)).all())
