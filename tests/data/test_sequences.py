"""Plans: which sequences, in which batches, with which fingerprint and warnings."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from fp8calib.data.plan import build_plan
from fp8calib.data.rows import ReadRow
from fp8calib.data.sequences import Batch, DataPlan, batches
from fp8calib.data.shares import Share, drop_finished, parse_share, select_batches, sequence_ranges
from fp8calib.data.sources import iter_rows
from fp8calib.data.specs import parse_spec
from fp8calib.errors import DataError, UsageError
from tests.calibration.running import rows_of
from tests.data.tokenizers import PLAIN_TEMPLATE, make_tokenizer


def refuse_tokenizer() -> Any:
    raise AssertionError("no row needs a tokenizer")


def write_rows(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def write_ids(path: Path, *rows: Sequence[int]) -> str:
    return write_rows(path, *({"input_ids": list(ids)} for ids in rows))


def plan_of(*specs: str, **options: Any) -> DataPlan:
    settings = {"tokenizer": refuse_tokenizer, "vocab_size": 100, "samples": 8, "seq_len": 4}
    return build_plan(specs, **{**settings, **options})


def lists(plan: DataPlan) -> list[list[int]]:
    return [sequence.tolist() for sequence in plan.sequences]


def test_text_messages_and_ids_are_packed_in_file_order(tmp_path: Path) -> None:
    loads: list[int] = []

    def load() -> Any:
        loads.append(1)
        return make_tokenizer(template=PLAIN_TEMPLATE)

    spec = write_rows(
        tmp_path / "x.jsonl",
        {"text": "a b"},
        {"messages": [{"role": "user", "content": "c"}]},
        {"input_ids": [11, 1]},
    )
    plan = plan_of(spec, tokenizer=load)
    assert lists(plan) == [[0, 7, 8, 0], [3, 6, 9, 11]]
    assert loads == [1]
    assert {sequence.dtype for sequence in plan.sequences} == {torch.int64}


def test_a_source_that_is_not_read_is_named(tmp_path: Path) -> None:
    a, b = (write_ids(tmp_path / f"{name}.jsonl", *[[1, 1]] * 4) for name in "ab")
    told = [each for each in plan_of(a, b, seq_len=2, samples=4).warnings if "was read" in each]
    assert len(told) == 1
    assert told[0].startswith("no row of b.jsonl was read: other sources gave all 4 sequences")
    for plan in (plan_of(a, b, seq_len=2, samples=5), plan_of(f"{a}@1", b, seq_len=2, samples=4)):
        assert not any("was read" in each for each in plan.warnings)


def test_samples_stop_the_reading_before_a_bad_row(tmp_path: Path) -> None:
    spec = write_ids(tmp_path / "x.jsonl", [1, 2, 3], [4, 5], [999])
    assert lists(plan_of(spec, samples=1)) == [[1, 2, 3, 4]]
    with pytest.raises(DataError, match=r"x\.jsonl:3: input_ids holds 999"):
        plan_of(spec, samples=2)


def test_a_source_of_unusable_rows_is_refused_before_it_ends() -> None:
    read: list[int] = []

    def rows() -> Iterator[ReadRow]:
        for number in count():
            read.append(number)
            yield DataError(f"row {number}: odd", hint="write it again")

    with pytest.raises(DataError, match="100 of 100 rows cannot be used: row 0: odd; row 1: odd"):
        plan_of(rows=rows())
    assert len(read) == 100


def test_the_fingerprint_is_the_digest_of_flag_length_and_ids(tmp_path: Path) -> None:
    plan = plan_of(write_ids(tmp_path / "x.jsonl", [1, 2, 3, 4, 5, 6]))
    expected = hashlib.sha256(struct.pack("<10q", 1, 4, 4, 1, 2, 3, 4, 2, 5, 6)).hexdigest()
    assert plan.fingerprint == expected


def test_the_fingerprint_tells_apart_what_differs_and_nothing_else(tmp_path: Path) -> None:
    one = write_ids(tmp_path / "one.jsonl", [1, 2, 3, 4])
    two = write_ids(tmp_path / "two.jsonl", [1, 2], [3, 4])
    cut = write_ids(tmp_path / "cut.jsonl", [1, 2, 3], [4, 5])
    same = [plan_of(one), plan_of(two), plan_of(one, samples=1, seed=7)]
    other = [
        plan_of(one, seq_len=8),
        plan_of(one, pack=False),
        plan_of(two, pack=False),
        plan_of(cut, pack=False),
        plan_of(one, seq_len=2),
    ]
    assert len({plan.fingerprint for plan in same}) == 1
    assert len({plan.fingerprint for plan in [same[0], *other]}) == 6


def test_few_sequences_and_few_tokens_are_warned_of(tmp_path: Path) -> None:
    plan = plan_of(write_ids(tmp_path / "x.jsonl", [1, 2, 3, 4]), samples=3)
    assert plan.warnings == (
        "all of the text is used: it fills 1 of 3 sequences (of 4 tokens)",
        "only 4 tokens, fewer than 4096: scales may miss large values",
    )


def test_without_specs_the_builtin_text_is_used_and_said_so() -> None:
    options: dict[str, Any] = {"tokenizer": make_tokenizer, "samples": 9999, "seq_len": 64}
    calibrate, verify = plan_of(**options), plan_of(part="verify", **options)
    assert calibrate.sources == verify.sources == ("builtin",)
    assert calibrate.warnings[0] == (
        "no --data given: using the text that ships with Python (builtin)"
    )
    builtin = parse_spec("builtin")
    rows = [{row.text for row in iter_rows(builtin, part=p)} for p in ("calibrate", "verify")]
    assert not rows[0] & rows[1]
    assert calibrate.num_tokens > 3 * verify.num_tokens > 20_000
    assert plan_of("builtin", **options).fingerprint == calibrate.fingerprint
    assert not any("no --data" in text for text in plan_of("builtin", **options).warnings)


@pytest.mark.parametrize(("pack", "hint"), [(True, "use more text"), (False, "--no-pack")])
def test_data_without_any_sequence_is_an_error(tmp_path: Path, pack: bool, hint: str) -> None:
    spec = write_ids(tmp_path / "x.jsonl", [1])
    with pytest.raises(DataError, match=r"x\.jsonl: no sequence of two tokens in 1 row$") as caught:
        plan_of(spec, pack=pack)
    assert hint in caught.value.hint


def make_plan(lengths: Sequence[int], *, packed: bool) -> DataPlan:
    """Make a plan whose sequence i holds the id i + 1 throughout."""
    sequences = tuple(torch.full((length,), i + 1) for i, length in enumerate(lengths))
    return DataPlan(sequences, packed, max(lengths), (), ())


def shape(batch: Batch) -> tuple[int, tuple[int, ...]]:
    return batch.first, batch.lengths


@pytest.mark.parametrize(
    ("lengths", "packed", "batch_size", "expected"),
    [
        ([4] * 8, True, 2, [(i, (4, 4)) for i in (0, 2, 4, 6)]),
        ([4] * 8, True, 9, [(0, (4,) * 8)]),
        ([4], True, 2, [(0, (4,))]),
        ([4] * 9, True, 4, [(0, (4,) * 4), (4, (4,) * 4), (8, (4,))]),
        ([4] * 7 + [2], True, 2, [(0, (4, 4)), (2, (4, 4)), (4, (4, 4)), (6, (4,)), (7, (2,))]),
        ([3, 2, 5, 4, 2], False, 2, [(0, (3, 2)), (2, (5, 4)), (4, (2,))]),
    ],
)
def test_batches_hold_neighbours_of_one_length_where_they_are_packed(
    lengths: list[int], packed: bool, batch_size: int, expected: list[Any]
) -> None:
    plan = make_plan(lengths, packed=packed)
    assert [shape(batch) for batch in batches(plan, batch_size)] == expected


def test_padding_stands_on_the_right_as_zeros_outside_the_mask() -> None:
    padded, even, *_ = batches(make_plan([3, 2, 2, 2, 1, 1, 1, 1], packed=False), 2)
    assert padded.input_ids.tolist() == [[1, 1, 1], [2, 2, 0]]
    assert padded.input_ids.dtype == torch.int64
    assert padded.mask is not None
    assert padded.mask.tolist() == [[True, True, True], [True, True, False]]
    assert padded.mask.dtype == torch.bool
    assert padded.num_tokens == 5
    assert even.input_ids.tolist() == [[3, 3], [4, 4]]
    assert even.mask is None


def describe(plan: DataPlan) -> list[str]:
    assert plan.rows is not None
    return list(plan.rows.describe())


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".txt"])
def test_rows_that_are_not_read_are_counted_too(tmp_path: Path, suffix: str) -> None:
    path, rows = tmp_path / f"x{suffix}", [{"text": "a b c"}] * 4
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif suffix == ".jsonl":
        path.write_text("\n\n".join(map(json.dumps, rows)))
    else:
        path.write_text(json.dumps(rows) if suffix == ".json" else "a b c d e f")
    of = 1 if suffix == ".txt" else 4
    plan = plan_of(str(path), tokenizer=make_tokenizer, samples=1, seq_len=2)
    assert describe(plan)[0].startswith(f"rows: 1 used of {of}, 1 cut at the end; then all")


def test_the_rows_used_are_counted(tmp_path: Path) -> None:
    spec = write_rows(
        tmp_path / "x.jsonl",
        {"messages": [{"role": "user", "content": "a b"}]},
        {"text": "c d e"},
        {"text": "never read"},
    )
    template = PLAIN_TEMPLATE
    plan = plan_of(spec, tokenizer=lambda: make_tokenizer(template=template), samples=2)
    assert lists(plan) == [[0, 3, 6, 7], [8, 0, 9, 10]]
    digest = hashlib.sha256(template.encode()).hexdigest()
    assert plan.rows is not None
    assert plan.rows.chat_template == digest
    assert describe(plan) == [
        "rows: 2 used of 3, 1 cut at the end; then all sequences were full",
        f"chat template: the tokenizer's (sha256 {digest[:12]}), applied to 1 of 2 rows",
    ]


def test_the_template_is_not_applied_to_a_conversation_that_it_rejects(tmp_path: Path) -> None:
    turns = ["a b", "no", *"cdefghijklm"]
    rows = ({"messages": [{"role": "user", "content": each}]} for each in turns)
    spec = write_rows(tmp_path / "x.jsonl", *rows)
    rejecting = "{% if messages[0].content == 'no' %}{{ raise_exception('no') }}{% endif %}"
    tokenizer = make_tokenizer(template=rejecting + PLAIN_TEMPLATE)
    plan = plan_of(spec, tokenizer=lambda: tokenizer, samples=13)
    assert describe(plan)[1].endswith("applied to 12 of 13 rows")


# --- shares of a plan hold every sequence once, in unchanged batches -----------------------------


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
