"""What each rank owns, typed by hand."""

from __future__ import annotations

import pytest

from fp8calib.errors import UsageError
from fp8calib.model.shapes import ModelGeometry
from fp8calib.model.tensor_parallel import (
    check_heads,
    check_linears,
    owned_blocks,
)
from tests.formats.handmade import expert_stats, linear_stats, make_attention, make_geometry


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
