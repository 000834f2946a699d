"""Plans: which sequences, in which batches, with which fingerprint and warnings."""

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
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from fp8calib.data.plan import RowEncoder, build_plan
from fp8calib.data.rows import ReadRow, Row
from fp8calib.data.sequences import DataPlan, batches, parse_share
from fp8calib.data.sources import iter_rows
from fp8calib.data.specs import parse_spec
from fp8calib.errors import DataError, UsageError

WORDS = ("<s>", "</s>", "<unk>", "user", "assistant", "system", ":", "a", "b", "c", "d", "e")
"""Word number i has id i: BOS 0, EOS 1, unknown 2, roles 3 to 5, colon 6, a to e 7 to 11."""
PLAIN_TEMPLATE = "{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}"


def make_tokenizer(*, template: str | None = None) -> Any:
    """Build a tokenizer that splits at spaces and adds a BOS; its context is 4 tokens."""
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=WORDS[2]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    names = dict(zip(("bos_token", "eos_token", "unk_token"), WORDS, strict=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=4, **names)
    tokenizer.chat_template = template
    return tokenizer


def refuse_tokenizer() -> Any:
    raise AssertionError("no row needs a tokenizer")


def write_rows(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def write_ids(path: Path, *rows: Sequence[int]) -> str:
    return write_rows(path, *({"input_ids": list(ids)} for ids in rows))


def plan_of(*specs: str, **options: Any) -> DataPlan:
    longest_padded, rows = options.pop("longest_padded", None), options.pop("rows", None)
    tokenizer = options.pop("tokenizer", refuse_tokenizer)
    encoder = RowEncoder(tokenizer, options.pop("vocab_size", 100), longest_padded=longest_padded)
    return build_plan(encoder, rows, **{"sources": specs, "samples": 8, "seq_len": 4, **options})


def lists(plan: DataPlan) -> list[list[int]]:
    return [sequence.tolist() for sequence in plan.sequences]


@pytest.mark.parametrize(("usable", "is_refused"), [(18, False), (17, True)])
def test_a_tenth_of_the_rows_may_be_unusable(usable: int, *, is_refused: bool) -> None:
    rows: list[ReadRow] = [Row(f"row {n}", input_ids=[1, 2, 3, 4]) for n in range(usable)]
    rows += [DataError("row x: odd"), DataError("row y: odd")]
    if is_refused:
        with pytest.raises(DataError, match=f"2 of {usable + 2} rows cannot be used"):
            plan_of(rows=rows, samples=100)
    else:
        assert any("2 of 20 rows" in each for each in plan_of(rows=rows, samples=100).warnings)


def test_a_sequence_as_long_as_the_limit_is_padded_and_a_longer_one_is_not() -> None:
    rows = [Row(f"row {n}", input_ids=[1] * length) for n, length in enumerate((2, 4, 3, 5, 2))]
    plan = plan_of(rows=rows, pack=False, seq_len=8, longest_padded=4)
    assert [batch.lengths for batch in batches(plan, 8)] == [(2, 4, 3), (5,), (2,)]


def test_a_source_of_unusable_rows_is_refused_before_it_ends() -> None:
    read: list[int] = []

    def rows() -> Iterator[ReadRow]:
        for number in count():
            read.append(number)
            yield DataError(f"row {number}: odd", hint="write it again")

    with pytest.raises(DataError, match="100 of 100 rows cannot be used: row 0: odd; row 1: odd"):
        plan_of(rows=rows())
    assert len(read) == 100


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


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "1/0", "-1/4", "1/4/2", "a/b", "", "1 / 2"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not I/N"):
        parse_share(text)


def test_the_fingerprint_is_the_digest_of_flag_length_and_ids(tmp_path: Path) -> None:
    plan = plan_of(write_ids(tmp_path / "x.jsonl", [1, 2, 3, 4, 5, 6]))
    expected = hashlib.sha256(struct.pack("<10q", 1, 4, 4, 1, 2, 3, 4, 2, 5, 6)).hexdigest()
    assert plan.fingerprint == expected
