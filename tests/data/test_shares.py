"""Shares of a plan hold every sequence once, in unchanged batches."""

from __future__ import annotations

import pytest
import torch

from fp8calib.data.sequences import batches
from fp8calib.data.shares import Share, drop_finished, parse_share, select_batches, sequence_ranges
from fp8calib.errors import UsageError
from tests.calibration.running import rows_of

LENGTHS = [5, 9, 3, 8, 8, 2, 7, 4, 6, 5]


def test_shares_are_neighbours_and_take_everything_once() -> None:
    items = list(range(10))
    taken = [list(Share(index=index, count=4).take(items)) for index in (1, 2, 3, 4)]
    assert taken == [[0, 1], [2, 3, 4], [5, 6], [7, 8, 9]]


def test_a_share_has_the_batches_of_the_whole() -> None:
    plan = rows_of(LENGTHS)
    whole = [batch.input_ids.tolist() for batch in batches(plan, 3)]
    shares = [select_batches(plan, 3, Share(index=index, count=3)) for index in (1, 2, 3)]
    assert [batch.input_ids.tolist() for share in shares for batch in share] == whole


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "1/0", "-1/4", "1/4/2", "a/b", "", "1 / 2"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not I/N"):
        parse_share(text)


def test_what_is_done_is_left_out_and_the_rest_cut_as_smaller_batches_are() -> None:
    plan = rows_of(LENGTHS)
    whole = list(batches(plan, 3))
    assert sequence_ranges(whole) == [(0, 3), (3, 6), (6, 9), (9, 10)]
    left = drop_finished(whole, [(0, 1), (3, 6), (7, 8)])
    assert sequence_ranges(left) == [(1, 3), (6, 7), (8, 9), (9, 10)]
    assert left[-1] is whole[-1]
    assert [batch.input_ids.shape[1] for batch in left] == [9, 7, 6, 5]
    for batch in left:
        for row, length in enumerate(batch.lengths):
            assert torch.equal(batch.input_ids[row, :length], plan.sequences[batch.first + row])
