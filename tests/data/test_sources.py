"""Rows of files, the hub and the built-in text, one after another or mixed by weight."""

import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from fp8calib.data.rows import ReadRow, Row, parse_row
from fp8calib.data.sources import iter_rows, mix_rows
from fp8calib.data.specs import DataSpec, parse_spec
from fp8calib.errors import DataError, UsageError


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def read(rows: Iterable[ReadRow]) -> None:
    """Read rows up to the first that cannot be used, and raise its error."""
    for row in rows:
        if isinstance(row, DataError):
            raise row


def write_parquet(path: Path, columns: dict[str, Any]) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return path


def test_parquet_rows_come_in_order_over_batches_and_row_groups(tmp_path: Path) -> None:
    texts = [f"t{index}" for index in range(150)]
    path = write_parquet(tmp_path / "x.parquet", {"id": list(range(150)), "text": texts})
    expected = [Row(f"x.parquet row {i}", text=text) for i, text in enumerate(texts, start=1)]
    assert list(iter_rows(parse_spec(str(path)))) == expected


def test_the_files_of_a_folder_follow_one_another_and_each_must_hold_rows(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", b"b")
    write(tmp_path / "a.jsonl", b'{"text": "a"}')
    rows = iter_rows(parse_spec(str(tmp_path)))
    assert [row.origin for row in rows] == ["a.jsonl:1", "b.txt"]
    write(tmp_path / "c.jsonl", b"")
    with pytest.raises(DataError, match=r"c\.jsonl: no rows"):
        list(iter_rows(parse_spec(str(tmp_path))))


def fake_hub(monkeypatch: pytest.MonkeyPatch, result: Any) -> list[Any]:
    """Put a `datasets` in place whose load_dataset gives or raises `result`; return its calls."""
    calls: list[Any] = []

    def load_dataset(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        if isinstance(result, Exception):
            raise result
        return result

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


def test_a_hub_dataset_is_streamed_with_its_blank_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_hub(monkeypatch, [{"text": ""}, {"text": "a"}])
    rows = list(iter_rows(parse_spec("hub:org/name:cfg:test")))
    assert rows == [Row("hub:org/name row 1", text=""), Row("hub:org/name row 2", text="a")]
    assert calls == [(("org/name", "cfg"), {"split": "test", "streaming": True})]


def test_a_hub_that_fails_is_a_data_error_naming_the_dataset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_hub(monkeypatch, ConnectionError("no route\nmore"))
    with pytest.raises(DataError) as caught:
        list(iter_rows(parse_spec("hub:org/name")))
    assert caught.value.message == (
        "hub:org/name, config default, split train: the dataset cannot be read "
        "(ConnectionError: no route)"
    )
    assert "local file" in caught.value.hint


def rows(name: str, count: int) -> Iterator[Row]:
    return (Row(f"{name}{index}") for index in range(count))


def mix(*sources: tuple[str, int, float | None], seed: int = 0) -> list[str]:
    mixed = mix_rows([(rows(name, count), weight) for name, count, weight in sources], seed=seed)
    return [row.origin for row in mixed]


# random.Random(0).random() starts 0.844, 0.758, 0.421, 0.259, 0.511, 0.405, 0.784, 0.303:
# b when the number is at or above a's share.
@pytest.mark.parametrize(
    ("weight_a", "weight_b", "expected"),
    [
        (1.0, 1.0, "b0 b1 a0 a1 b2 a2 b3 a3"),
        (1.0, None, "b0 b1 a0 a1 b2 a2 b3 a3"),
        (3.0, 1.0, "b0 b1 a0 a1 a2 a3 b2 b3"),
        (1.0, 3.0, "b0 b1 b2 b3 a0 a1 a2 a3"),
        (4.0, 0.4, "a0 a1 a2 a3 b0 b1 b2 b3"),
    ],
)
def test_weighted_sources_are_drawn_by_the_seed_and_used_up(
    weight_a: float, weight_b: float | None, expected: str
) -> None:
    assert " ".join(mix(("a", 4, weight_a), ("b", 4, weight_b))) == expected


def test_the_seed_changes_the_order_between_sources_but_not_inside_them() -> None:
    orders = {tuple(mix(("a", 9, 1.0), ("b", 9, 1.0), seed=seed)) for seed in range(4)}
    assert len(orders) == 4
    for order in orders:
        assert [name for name in order if name[0] == "a"] == [f"a{index}" for index in range(9)]


def test_a_saved_dataset_without_text_or_without_its_files_is_refused(tmp_path: Path) -> None:
    Dataset.from_dict({"id": [1], "label": [0]}).save_to_disk(tmp_path / "d")
    spec = parse_spec(str(tmp_path / "d"))
    with pytest.raises(DataError, match="d row 1: no usable field; the keys are: id, label"):
        read(iter_rows(spec))
    with pytest.raises(DataError, match="the column body is missing; the keys are: id, label"):
        read(iter_rows(spec, text_column="body"))
    for arrow in (tmp_path / "d").glob("*.arrow"):
        arrow.unlink()
    with pytest.raises(DataError, match="d: the dataset cannot be read"):
        list(iter_rows(spec))


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("builtin", DataSpec(None, "builtin")),
        ("builtin@2", DataSpec(None, "builtin@2", 2.0)),
        ("hub:wikitext", DataSpec(("wikitext", None, "train"), "hub:wikitext")),
        ("hub:a/b:cfg", DataSpec(("a/b", "cfg", "train"), "hub:a/b:cfg")),
        ("hub:a/b:cfg:test", DataSpec(("a/b", "cfg", "test"), "hub:a/b:cfg:test")),
        ("hub:a/b::extra", DataSpec(("a/b", None, "extra"), "hub:a/b::extra")),
        ("hub:a@0.25", DataSpec(("a", None, "train"), "hub:a@0.25", 0.25)),
        ("hub:a@main", DataSpec(("a@main", None, "train"), "hub:a@main")),
    ],
)
def test_a_spec_without_path_is_read_as_its_grammar_says(spec: str, expected: DataSpec) -> None:
    assert parse_spec(spec) == expected


def test_a_relative_path_that_looks_like_a_hub_name_is_a_file_when_it_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(tmp_path / "hub:x.jsonl")
    monkeypatch.chdir(tmp_path)
    assert parse_spec("hub:x.jsonl").files == (Path("hub:x.jsonl"),)


def test_a_folder_gives_its_data_files_by_name_and_tells_what_it_left(tmp_path: Path) -> None:
    for name in ("b.txt", "a.jsonl", "C.json", "README.md", ".hidden.txt", "deep/z.txt"):
        touch(tmp_path / name)
    found = parse_spec(str(tmp_path))
    assert [path.name for path in found.files] == ["C.json", "a.jsonl", "b.txt"]
    assert found.ignored == ("README.md", "deep")


def save_split(folder: Path) -> Path:
    """Make the files by which a saved dataset is recognised."""
    for name in ("dataset_info.json", "state.json"):
        touch(folder / name)
    return folder


def test_a_split_of_saved_datasets_is_named_by_its_folder(tmp_path: Path) -> None:
    save_split(tmp_path / "two" / "train")
    touch(tmp_path / "two" / "dataset_dict.json")
    folder = tmp_path / "two" / "train"
    assert parse_spec(f"{folder}@2") == DataSpec(folder, "train@2", 2.0)
    with pytest.raises(UsageError, match="holds saved splits") as caught:
        parse_spec(str(tmp_path / "two"))
    assert caught.value.hint == f"name one of them, such as {folder}"


USER = {"role": "user", "content": "hi"}
REPLY = {"role": "assistant", "content": "hello"}
ADD = {"role": "user", "content": "Add."}
ADD_WITH_INPUT = {"role": "user", "content": "Add.\n\n1 and 2"}
THREE = {"role": "assistant", "content": "3"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"text": "hi"}, Row("x:1", text="hi")),
        ({"text": "hi", "id": 3, "messages": None}, Row("x:1", text="hi")),
        ({"text": "hi", "messages": [USER]}, Row("x:1", messages=(USER,))),
        ({"messages": [USER], "input_ids": [5, 0]}, Row("x:1", input_ids=(5, 0))),
        ({"conversations": [USER]}, Row("x:1", messages=(USER,))),
        ({"input_ids": [5, 6], "attention_mask": [1, 1]}, Row("x:1", input_ids=(5, 6))),
        ({"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0]}, Row("x:1", input_ids=(5, 6))),
        ({"input_ids": [0, 0, 5], "attention_mask": [0, 0, 1]}, Row("x:1", input_ids=(5,))),
        ({"input_ids": [5, 6], "attention_mask": None}, Row("x:1", input_ids=(5, 6))),
        ({"text": "hi", "attention_mask": [0]}, Row("x:1", text="hi")),
        ({"content": "hi", "path": "x.py"}, Row("x:1", text="hi")),
        ({"prompt": "The sky is", "completion": " blue."}, Row("x:1", text="The sky is blue.")),
        ({"prompt": [USER], "completion": [REPLY]}, Row("x:1", messages=(USER, REPLY))),
        (
            {"instruction": "Add.", "input": "1 and 2", "output": "3"},
            Row("x:1", text="Add.\n\n1 and 2\n\n3", messages=(ADD_WITH_INPUT, THREE)),
        ),
        (
            {"instruction": "Add.", "output": "3"},
            Row("x:1", text="Add.\n\n3", messages=(ADD, THREE)),
        ),
        ({"instruction": "Add.", "output": "3", "text": "hi"}, Row("x:1", text="hi")),
    ],
)
def test_the_first_usable_field_is_taken(value: dict[str, Any], expected: Row) -> None:
    assert parse_row(value, "x:1") == expected


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (USER, USER),
        ({**USER, "name": "Ann"}, {**USER, "name": "Ann"}),
        ({"from": "human", "value": "q"}, {"role": "user", "content": "q"}),
        ({"from": "system", "value": ""}, {"role": "system", "content": ""}),
        (
            {"role": "user", "content": [{"type": "text", "text": x} for x in ("a", "b")]},
            {"role": "user", "content": "ab"},
        ),
        (
            {"role": "assistant", "content": None, "tool_calls": [1]},
            {"role": "assistant", "content": "", "tool_calls": [1]},
        ),
    ],
)
def test_a_message_becomes_role_and_text(message: object, expected: object) -> None:
    assert parse_row({"messages": [message]}, "x:1").messages == (expected,)
