"""What each rank owns, typed by hand."""

import pytest

from fp8calib.errors import UsageError
from fp8calib.model.tensor_parallel import check_heads, check_linears, owned_blocks
from tests.formats.handmade import expert_stats, make_attention, make_geometry


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
