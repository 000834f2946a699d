"""What each rank owns, typed by hand."""

from __future__ import annotations

import pytest

from fp8calib.errors import UsageError
from fp8calib.model.shapes import Linear, ModelGeometry
from fp8calib.model.tensor_parallel import (
    check_heads,
    check_linears,
    owned_blocks,
    owned_channels,
    owned_rows,
    rank_range,
)
from tests.formats.handmade import expert_stats, linear_stats, make_attention, make_geometry


@pytest.mark.parametrize(
    ("count", "tp", "expected"),
    [
        (8, 1, [(0, 8)]),
        (8, 2, [(0, 4), (4, 8)]),
        (8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (3, 3, [(0, 1), (1, 2), (2, 3)]),
        # fewer heads than ranks: rank r holds head floor(r * heads / ranks)
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (1, 4, [(0, 1)] * 4),
        (2, 8, [(0, 1)] * 4 + [(1, 2)] * 4),
        (4, 8, [(0, 1)] * 2 + [(1, 2)] * 2 + [(2, 3)] * 2 + [(3, 4)] * 2),
    ],
)
def test_ranks_own_contiguous_units(count: int, tp: int, expected: list[tuple[int, int]]) -> None:
    found = [rank_range(count, tp, rank) for rank in range(tp)]
    assert [(units.start, units.stop) for units in found] == expected


@pytest.mark.parametrize(
    ("heads", "kv_heads", "fits"),
    [
        (4, 2, {1, 2, 4}),
        (8, 8, {1, 2, 4, 8}),
        (32, 4, {1, 2, 4, 8, 16, 32}),
        (12, 4, {1, 2, 4, 12}),  # 3 and 6 divide the heads, but no KV heads either way
        (6, 1, {1, 2, 3, 6}),
        (7, 7, {1, 7}),
    ],
)
def test_a_degree_must_fit_heads_and_kv_heads(heads: int, kv_heads: int, fits: set[int]) -> None:
    geometry = make_geometry([make_attention(0, num_heads=heads, num_kv_heads=kv_heads)])
    found = {tp for tp in range(1, 65) if _is_accepted(geometry, tp)}
    assert found == fits


def _is_accepted(geometry: ModelGeometry, tp: int) -> bool:
    try:
        check_heads(geometry, tp)
    except UsageError:
        return False
    return True


@pytest.mark.parametrize("tp", [0, -1])
def test_a_degree_is_positive(tp: int) -> None:
    with pytest.raises(UsageError, match=f"--tp {tp}: "):
        check_heads(make_geometry([]), tp)


def test_a_latent_is_whole_on_every_rank() -> None:
    latent = make_attention(0, kind="latent", num_heads=6, num_kv_heads=4)
    check_heads(make_geometry([latent]), 3)
    with pytest.raises(UsageError, match="neither divides the other"):
        check_heads(make_geometry([make_attention(0, num_heads=6, num_kv_heads=4)]), 3)


def _linear(name: str) -> Linear:
    geometry = linear_stats().geometry
    return next(linear for _, linear in geometry.linears() if linear.module.endswith(name))


def test_column_parallel_weights_are_cut_by_rows() -> None:
    (k,) = (linear := _linear("0.self_attn.k_proj")).parts
    # two heads of two rows: the third and the fourth rank share the second head
    assert [owned_rows(linear, k, 2, rank) for rank in range(2)] == [[0, 1], [2, 3]]
    assert [owned_rows(linear, k, 4, rank) for rank in range(4)] == [[0, 1]] * 2 + [[2, 3]] * 2
    assert [owned_channels(linear, 2, rank) for rank in range(2)] == [range(8)] * 2


def test_row_parallel_weights_are_cut_by_columns() -> None:
    (o,) = (linear := _linear("0.self_attn.o_proj")).parts
    assert [owned_channels(linear, 2, rank) for rank in range(2)] == [range(4), range(4, 8)]
    assert owned_rows(linear, o, 2, 1) == list(range(8))


def test_blocks_of_experts_are_cut_along_the_same_axis() -> None:
    linears = [linear for _, linear in expert_stats().geometry.linears()]
    for linear in linears:  # 8 channels in blocks of 2
        assert [owned_blocks(linear, 2, rank) for rank in range(2)] == [range(2), range(2, 4)]
    check_linears(expert_stats().geometry, 4)
    with pytest.raises(UsageError, match="4 blocks of 2 channels"):
        check_linears(expert_stats().geometry, 8)


def test_a_degree_must_cut_every_weight_evenly() -> None:
    geometry = linear_stats().geometry
    for tp in (1, 2, 4, 8):
        check_linears(geometry, tp)
    with pytest.raises(UsageError, match="--tp 3 does not divide the 8 channels of model"):
        check_linears(geometry, 3)
