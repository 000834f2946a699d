"""Shares of the final amax, with numbers computed by hand."""

from __future__ import annotations

import pytest
import torch

from fp8calib.calibration.calibration_stats import CalibrationStats
from fp8calib.calibration.statistic import SiteStats
from fp8calib.commands.saturation import compute_position_saturation, compute_saturation
from fp8calib.model.shapes import Role, Site
from fp8calib.numerics.positions import NUM_RANGES
from tests.formats.handmade import make_geometry, make_stats


def stats_of(progress: dict[Site, list[float] | None]) -> CalibrationStats:
    sites = {
        site: SiteStats(
            count=4,
            amax=torch.tensor([1.0]),
            progress=None if values is None else torch.tensor(values),
        )
        for site, values in progress.items()
    }
    return make_stats(make_geometry([]), sites)


def test_shares_are_running_maxima_over_the_final_one() -> None:
    saturation = compute_saturation(
        stats_of(
            {
                Site("a", Role.K): [1.0, 2.0, 4.0, 8.0],
                Site("b", Role.INPUT): [4.0, 1.0, 1.0, 2.0],
                Site("c", Role.V): [1.0, 3.0, 2.0, 4.0],
            }
        )
    )
    assert saturation is not None
    # a: 1/8 2/8 4/8; b: 1 1 1; c: 1/4 3/4 3/4
    assert saturation.median_share == (0.25, 0.75, 0.75)
    assert saturation.least_share == (0.125, 0.25, 0.5)
    assert saturation.slowest_site == "a.k"
    assert saturation.describe() == (
        "saturation: at 1/4, 1/2, 3/4 of the data the median tensor had reached 25.0%, 75.0%, "
        "75.0% of its final amax, the slowest 12.5%, 25.0%, 50.0% (a.k)"
    )


@pytest.mark.parametrize(
    "progress",
    [
        {},
        {Site("a", Role.WEIGHT): [1.0, 2.0, 3.0, 4.0]},
        {Site("a", Role.K): None},
        {Site("a", Role.K): [0.0, 0.0, 0.0, 0.0]},
    ],
    ids=["no sites", "weights", "nothing kept", "only zeros"],
)
def test_where_nothing_was_run_there_is_none(progress: dict[Site, list[float] | None]) -> None:
    assert compute_saturation(stats_of(progress)) is None


# --- positions ---------------------------------------------------------------------------------


def positions_of(values: dict[Site, list[float] | None]) -> CalibrationStats:
    """Give statistics whose sites saw these magnitudes in the first ranges of positions."""
    sites = {
        site: SiteStats(
            count=4,
            amax=torch.tensor([1.0]),
            positions=None
            if found is None
            else torch.tensor(found + [0.0] * NUM_RANGES)[:NUM_RANGES],
        )
        for site, found in values.items()
    }
    return make_stats(make_geometry([]), sites)


def test_reach_is_the_amax_below_a_position_over_the_final_one() -> None:
    reach = compute_position_saturation(
        positions_of(
            {
                Site("a", Role.K): [2.0, 1.0, 8.0],
                Site("b", Role.INPUT): [4.0, 1.0, 2.0],
                Site("c", Role.V): [3.0, 4.0, 4.0],
                Site("d", Role.INPUT): None,
                Site("w", Role.WEIGHT): None,
            }
        )
    )
    assert reach is not None
    # a: 2/8 2/8; b: 1 1; c: 3/4 1
    assert reach.below == (512, 1024)
    assert reach.median_share == (0.75, 1.0)
    assert reach.least_share == (0.25, 0.25)
    assert reach.slowest_site == "a.k"
    assert reach.describe() == (
        "positions: below 512, 1024 the median tensor had reached 75.0%, 100.0% of its final amax, "
        "the slowest 25.0%, 25.0% (a.k)"
    )


@pytest.mark.parametrize(
    "values",
    [
        {},
        {Site("a", Role.K): None},
        {Site("a", Role.K): [2.0], Site("b", Role.V): [3.0]},
        {Site("a", Role.K): [0.0, 0.0]},
    ],
)
def test_short_sequences_have_nothing_to_compare(values: dict[Site, list[float] | None]) -> None:
    assert compute_position_saturation(positions_of(values)) is None
