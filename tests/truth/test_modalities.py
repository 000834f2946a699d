"""Statistics by modality of random tensors, against loops over tokens and experts."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fp8calib.data.media import MODALITIES
from fp8calib.geometry.sites import Role, Site
from fp8calib.observe.batch_view import BatchView, view_batch
from fp8calib.observe.hooks import ExpertsCall
from fp8calib.observe.recorder import Recorder
from fp8calib.observe.reductions import (
    observe_expert_down,
    observe_expert_input,
    observe_heads,
    observe_input,
)
from fp8calib.stats.positions import NUM_RANGES, range_starts
from fp8calib.stats.statistic import SiteStats

_SITE = Site("site", Role.INPUT)
_HEADS, _WIDTH, _EXPERTS, _CHOSEN = 2, 4, 5, 2


def draw_kinds(length: int, runs: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a modality for each of several runs of tokens."""
    bounds = np.sort(rng.choice(np.arange(1, length), runs - 1, replace=False))
    return np.repeat(rng.integers(0, len(MODALITIES), runs), np.diff([0, *bounds, length]))


def record(view: BatchView, site: Site, seen: object) -> SiteStats:
    recorder = Recorder()
    recorder.begin_batch(view)
    recorder.record(site, seen)  # type: ignore[arg-type]
    recorder.end_batch()
    return recorder.stats()[site]


def expect(rows: np.ndarray, kinds: np.ndarray, found: SiteStats) -> None:
    """Compare with loops: `rows` [N, C] are magnitudes, by token; `kinds` is their modality."""
    starts = [*range_starts(), 1 << 60]
    by_kind, by_place = np.zeros(len(MODALITIES)), np.zeros(NUM_RANGES)
    for place, (row, kind) in enumerate(zip(rows, kinds, strict=True)):
        by_kind[kind] = max(by_kind[kind], row.max())
        span = next(i for i in range(NUM_RANGES) if starts[i] <= place < starts[i + 1])
        by_place[span] = max(by_place[span], row.max())
    assert found.modalities is not None
    assert found.positions is not None
    assert found.modalities.tolist() == pytest.approx(by_kind.tolist())
    assert found.positions.tolist() == pytest.approx(by_place.tolist())
    assert found.amax.tolist() == pytest.approx(rows.max(0).tolist())
    if (kinds == 0).any():
        assert found.text is not None
        assert found.text.tolist() == pytest.approx(rows[kinds == 0].max(0).tolist())


@pytest.mark.parametrize("runs", [1, 2, 5, 40])
@pytest.mark.parametrize("length", [60, 513, 1100])
def test_heads_inputs_and_experts(length: int, runs: int) -> None:
    """Beyond 512 and 1,024 tokens a run of one modality has several ranges of positions."""
    rng = np.random.default_rng(length + runs)
    kinds = draw_kinds(length, runs, rng)
    view = view_batch(
        (1, length), (length,), 0, 0, kinds=torch.from_numpy(kinds).to(torch.int8).unsqueeze(0)
    )
    heads = torch.from_numpy(rng.standard_normal((1, _HEADS, length, _WIDTH), np.float32))
    found = record(view, _SITE, observe_heads(view, Role.K, heads, _HEADS))
    expect(heads[0].abs().amax(-1).T.numpy(), kinds, found)

    x = torch.from_numpy(rng.standard_normal((1, length, 6), np.float32))
    found = record(view, _SITE, observe_input(view, _SITE, x))
    expect(x[0].abs().numpy(), kinds, found)

    index = torch.from_numpy(np.stack([rng.permutation(_EXPERTS)[:_CHOSEN] for _ in range(length)]))
    found = record(view, _SITE, observe_expert_input(view, x[0], index, _EXPERTS))
    expect(x[0].abs().numpy(), kinds, found)

    module = SimpleNamespace(down_proj=torch.zeros(_EXPERTS, 3, 6))
    call = ExpertsCall(path="experts", module=module, block=3, index=index)
    order = torch.sort(index.flatten()).indices
    routed = torch.from_numpy(rng.standard_normal((length * _CHOSEN, 6), np.float32))
    found = record(view, _SITE, observe_expert_down(view, call, routed[order]))
    by_token = routed.view(length, _CHOSEN, 6).abs().amax(1).numpy()
    expect(by_token, kinds, found)


def test_padded_rows_of_text_beside_rows_with_media_count_without_padding() -> None:
    rng = np.random.default_rng(0)
    lengths = (7, 4)
    view = view_batch((2, 7), lengths, 0, 0, kinds=torch.zeros(2, 7, dtype=torch.int8))
    x = torch.from_numpy(rng.standard_normal((2, 7, 6), np.float32))
    x[1, 4:] = 100
    kept = torch.cat([x[0], x[1, :4]]).abs()
    index = torch.zeros(14, 1, dtype=torch.int64)
    for seen in (
        observe_input(view, _SITE, x),
        observe_expert_input(view, x.flatten(0, 1), index, 1),
    ):
        found = record(view, _SITE, seen)
        assert found.text is not None
        assert found.modalities is not None
        assert found.text.tolist() == pytest.approx(kept.amax(0).tolist())
        assert found.modalities.tolist() == pytest.approx([float(kept.max()), 0, 0])
