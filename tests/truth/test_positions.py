"""Magnitudes by token position, every architecture, against a plain forward."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import zoo
from tests.doors import (
    NUM_RANGES,
    Role,
    Site,
    make_plan,
    run_calibration,
    short_positions,
    split_positions,
)
from tests.truth import brute_force
from tests.zoo import draw

RANGES = [(0, 4), (4, 8), (8, 16), (16, 32)]
"""What a first range of four positions makes of 20."""
LENGTHS = {1: [20, 20, 20], 3: [20, 3, 9, 17, 5, 20]}
"""By batch size: in batches of 3 the sequences are padded."""


@pytest.fixture
def _short_ranges() -> Iterator[None]:
    with short_positions(4):
        yield


def check(stats: Any, site: Site, sequences: Sequence[np.ndarray]) -> None:
    """Compare a site with what every sequence showed there: [S, anything] each."""
    found = stats.sites[site].positions
    assert found is not None, site
    parts = [[x[first:stop] for x in sequences] for first, stop in RANGES]
    expected = [max((float(np.abs(x).max()) for x in xs if x.size), default=0.0) for xs in parts]
    expected += [0.0] * (NUM_RANGES - len(RANGES))
    np.testing.assert_allclose(found.numpy(), expected, rtol=2e-6, atol=1e-7, err_msg=str(site))


def rows_of(tensors: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Lay [1, H, S, D] out as [S, H, D]."""
    return [x[0].transpose(1, 0, 2) for x in tensors]


@pytest.mark.usefixtures("_short_ranges")
@pytest.mark.parametrize("batch_size", LENGTHS)
@pytest.mark.parametrize("family", sorted(zoo.ZOO))
def test_every_range_holds_the_maximum_of_its_tokens(
    family: str, batch_size: int, tmp_path: Path
) -> None:
    model = zoo.save(family, tmp_path)
    sequences = draw(LENGTHS[batch_size])
    plan = make_plan(sequences, packed=False)
    prepared, stats = run_calibration(tmp_path, plan, batch_size=batch_size, weights=False)
    truth = brute_force.run(model, sequences)
    attentions = list(prepared.geometry.attentions())
    for place, (layer, attention) in enumerate(attentions):
        if attention.producer is None:
            keys, values = zip(*truth.kv[layer.index], strict=True)
            check(stats, attention.site(Role.K), rows_of(keys))
            check(stats, attention.site(Role.V), rows_of(values))
        if attention.site(Role.Q) in stats.sites:
            check(stats, attention.site(Role.Q), rows_of([q[place] for q in truth.queries]))
    modules = dict(model.named_modules())
    for path, routed in truth.routed.items():
        check(
            stats,
            Site(f"{path}.gate_proj", Role.INPUT),
            [hidden.reshape(-1, hidden.shape[-1]).numpy() for hidden, _ in routed],
        )
        found = stats.sites[Site(f"{path}.down_proj", Role.INPUT)].positions
        for number, (first, stop) in enumerate(RANGES):
            part = [
                (hidden.reshape(-1, hidden.shape[-1])[first:stop], index[first:stop])
                for hidden, index in routed
            ]
            down = brute_force.run_experts(modules[path], part).down.values()
            expected = max(float(np.abs(rows).max()) for rows in down)
            assert float(found[number]) == pytest.approx(expected, rel=1e-5)
    inputs = [
        site.module
        for site, seen in stats.sites.items()
        if site.role is Role.INPUT and seen.expert_counts is None
    ]
    assert inputs
    for name in inputs:
        check(stats, Site(name, Role.INPUT), truth.inputs[name])


def test_ranges_double_and_the_last_has_no_end() -> None:
    assert split_positions(1) == [(0, 1)]
    assert split_positions(512) == [(0, 512)]
    assert split_positions(513) == [(0, 512), (512, 513)]
    assert split_positions(3000) == [(0, 512), (512, 1024), (1024, 2048), (2048, 3000)]
    assert split_positions(10**7)[-1] == (2**19, 10**7)
    assert len(split_positions(10**7)) == NUM_RANGES
