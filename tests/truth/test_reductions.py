"""Statistics of random tensors, against loops over tokens and experts."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fp8calib.calibration.batch_view import BatchView
from fp8calib.calibration.calibration_stats import SiteStats
from fp8calib.calibration.hooks import ExpertsCall
from fp8calib.calibration.recorder import Recorder
from fp8calib.calibration.reductions import (
    observe_expert_down,
    observe_expert_input,
    observe_input,
    reduce_tokens,
)
from fp8calib.model.geometry import Role, Site
from fp8calib.numerics.positions import NUM_RANGES, RANGE_STARTS

_SITE = Site("site", Role.INPUT)
_HEADS, _WIDTH, _EXPERTS, _CHOSEN = 2, 4, 5, 2


def record(view: BatchView, site: Site, seen: object) -> SiteStats:
    recorder = Recorder(view.first + view.shape[0])
    recorder.begin_batch(view)
    recorder.record(site, seen)  # type: ignore[arg-type]
    recorder.end_batch()
    return recorder.stats()[site]


def expect(rows: np.ndarray, found: SiteStats) -> None:
    """Compare with loops: `rows` [N, C] are magnitudes, by token."""
    starts = [*RANGE_STARTS, 1 << 60]
    by_place = np.zeros(NUM_RANGES)
    for place, row in enumerate(rows):
        span = next(i for i in range(NUM_RANGES) if starts[i] <= place < starts[i + 1])
        by_place[span] = max(by_place[span], row.max())
    assert found.positions is not None
    assert found.positions.tolist() == pytest.approx(by_place.tolist())
    assert found.amax.tolist() == pytest.approx(rows.max(0).tolist())
    assert found.sequences is not None
    assert found.sequences.tolist() == pytest.approx([rows.max()])


@pytest.mark.parametrize("length", [60, 513, 1100])
def test_heads_inputs_and_experts(length: int) -> None:
    """Beyond 512 and 1,024 tokens there are several ranges of positions."""
    rng = np.random.default_rng(length)
    view = BatchView(shape=(1, length), lengths=(length,), first=0)
    heads = torch.from_numpy(rng.standard_normal((1, _HEADS, length, _WIDTH), np.float32))
    found = record(view, _SITE, reduce_tokens(view, heads, _HEADS, 1))
    expect(heads[0].abs().amax(-1).T.numpy(), found)

    x = torch.from_numpy(rng.standard_normal((1, length, 6), np.float32))
    found = record(view, _SITE, observe_input(view, _SITE, x))
    expect(x[0].abs().numpy(), found)

    index = torch.from_numpy(np.stack([rng.permutation(_EXPERTS)[:_CHOSEN] for _ in range(length)]))
    found = record(view, _SITE, observe_expert_input(view, _SITE, x[0], index, _EXPERTS))
    expect(x[0].abs().numpy(), found)

    module = SimpleNamespace(down_proj=torch.zeros(_EXPERTS, 3, 6))
    call = ExpertsCall(path="experts", module=module, block=3, index=index)
    order = torch.sort(index.flatten()).indices
    routed = torch.from_numpy(rng.standard_normal((length * _CHOSEN, 6), np.float32))
    found = record(view, _SITE, observe_expert_down(view, call, routed[order]))
    by_token = routed.view(length, _CHOSEN, 6).abs().amax(1).numpy()
    expect(by_token, found)


def test_rows_of_padding_do_not_count() -> None:
    rng = np.random.default_rng(0)
    view = BatchView(shape=(2, 7), lengths=(7, 4), first=0)
    x = torch.from_numpy(rng.standard_normal((2, 7, 6), np.float32))
    x[1, 4:] = 100
    kept = torch.cat([x[0], x[1, :4]]).abs()
    index = torch.zeros(14, 1, dtype=torch.int64)
    for seen in (
        observe_input(view, _SITE, x),
        observe_expert_input(view, _SITE, x.flatten(0, 1), index, 1),
    ):
        found = record(view, _SITE, seen)
        assert found.amax.tolist() == pytest.approx(kept.amax(0).tolist())
        assert found.positions is not None
        assert float(found.positions[0]) == pytest.approx(float(kept.max()))
        assert found.sequences is not None
        expected = [float(x[0].abs().max()), float(x[1, :4].abs().max())]
        assert found.sequences.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("lengths", [(600, 600, 600), (600, 9, 513)])
def test_each_sequence_of_a_batch_has_its_own_amax(lengths: tuple[int, ...]) -> None:
    """In a run of six sequences, of which the batch has those from the third on."""
    rng = np.random.default_rng(1)
    view = BatchView(shape=(3, 600), lengths=lengths, first=2)
    x = torch.from_numpy(rng.standard_normal((3, 600, 6), np.float32))
    index = torch.from_numpy(rng.integers(0, _EXPERTS, (3 * 600, 1)))
    order = torch.sort(index.flatten()).indices
    call = ExpertsCall(
        path="e",
        module=SimpleNamespace(down_proj=torch.zeros(_EXPERTS, 3, 6)),
        block=2,
        index=index,
    )
    heads = x.view(3, 600, _HEADS, 3).transpose(1, 2)
    by_sequence = [float(x[i, :length].abs().max()) for i, length in enumerate(lengths)]
    counted = [x[i, :length].abs() for i, length in enumerate(lengths)]
    first = max(float(rows[:512].max()) for rows in counted)
    second = max(float(rows[512:].max()) for rows in counted if len(rows) > 512)
    routed = torch.cat([torch.full((600,), length) for length in lengths])
    is_counted = torch.arange(600).repeat(3) < routed
    for seen in (
        reduce_tokens(view, heads, _HEADS, 1),
        observe_input(view, _SITE, torch.stack([x, x / 2])),
        observe_expert_input(view, _SITE, x.flatten(0, 1), index, _EXPERTS),
        observe_expert_down(view, call, x.flatten(0, 1)[order]),
    ):
        found = record(view, _SITE, seen)
        assert found.sequences is not None
        assert found.positions is not None
        assert found.sequences.tolist() == pytest.approx([0, 0, *by_sequence])
        assert found.positions[:3].tolist() == pytest.approx([first, second, 0])
        assert float(found.amax.max()) == pytest.approx(max(by_sequence))
        assert found.count == sum(lengths)
        if found.expert_counts is not None:
            counts = torch.bincount(index.flatten()[is_counted], minlength=_EXPERTS)
            assert found.expert_counts.tolist() == counts.tolist()


def test_nan_is_found_in_a_run_that_starts_again() -> None:
    """As a streamed run does whose batches did not fit into memory."""
    recorder = Recorder(4)

    def observe(first: int, value: float) -> tuple[Site, int] | None:
        view = BatchView(shape=(2, 3), lengths=(3, 3), first=first)
        x = torch.ones(2, 3, 4)
        x[1, 2, 0] = value
        recorder.begin_batch(view)
        recorder.record(_SITE, observe_input(view, _SITE, x))
        recorder.end_batch()
        return recorder.find_nonfinite()

    assert observe(0, 1.0) is None
    assert observe(2, 1.0) is None
    recorder.forget()
    assert observe(0, float("nan")) == (_SITE, 1)
    assert observe(2, float("inf")) == (_SITE, 3)
