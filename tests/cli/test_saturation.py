"""Shares of the final amax, with numbers computed by hand."""

import pytest
import torch

from fp8calib.calibration.calibration_stats import CalibrationStats, SiteStats
from fp8calib.commands.saturation import compute_saturation
from fp8calib.model.geometry import Role, Site
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


def test_shares_of_k_and_v_are_running_maxima_over_the_final_one() -> None:
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
    # a: 1/8 2/8 4/8; c: 1/4 3/4 3/4
    assert saturation.median_share == (0.1875, 0.5, 0.625)
    assert saturation.least_share == (0.125, 0.25, 0.5)
    assert saturation.slowest_site == "a.k"
    assert saturation.describe() == (
        "half of the text gave 50% of the final amax of K and V in the median, and 25% in the "
        "slowest tensor (a.k)"
    )


def test_shares_of_inputs_count_where_no_cache_was_observed() -> None:
    saturation = compute_saturation(stats_of({Site("b", Role.INPUT): [1.0, 3.0, 2.0, 4.0]}))
    assert saturation is not None
    assert saturation.describe() == (
        "half of the text gave 75% of the final amax of inputs in the median, and 75% in the "
        "slowest tensor (b.input)"
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
