"""Data that cannot be used: one message, the right exit code, nothing written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import write_rows

Refused = Callable[..., str]


def test_a_missing_file(refused: Refused, model: Path, tmp_path: Path) -> None:
    assert "no such file or folder" in refused(5, model, "--data", tmp_path / "none.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "a pipe or device" in refused(5, model, "--data", tmp_path / "pipe.jsonl")


@pytest.mark.parametrize("name", ["empty.jsonl", "empty.json", "empty.txt"])
def test_an_empty_file(refused: Refused, model: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert f"{name}: no rows" in refused(5, model, "--data", tmp_path / name)


def test_a_folder_without_data(refused: Refused, model: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert "holds no .jsonl" in refused(5, model, "--data", tmp_path / "folder")


def test_a_malformed_line_is_told_by_its_number(
    refused: Refused, model: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "w1 w2"}\n\n{"text": "w3"\n{"text": "w4"}\n')
    assert "rows.jsonl:3: not JSON" in refused(5, model, "--data", rows)


def test_a_wrong_encoding(refused: Refused, model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b'{"text": "w1 w2"}\n{"text": "caf\xe9"}\n')
    text = refused(5, model, "--data", rows)
    assert "rows.jsonl:2: not UTF-8 at byte 13" in text
    assert "save the file as UTF-8" in text


def test_a_row_without_a_usable_field(refused: Refused, model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": "w1"}, {"prompt": "w1", "answer": "w2"}])
    text = refused(5, model, "--data", rows)
    assert "rows.jsonl:2: no usable field; the keys are: prompt, answer" in text


def test_rows_all_too_short(refused: Refused, model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [5]}] * 3)
    assert "no sequence of two tokens in 3 rows" in refused(5, model, "--data", rows, "--no-pack")
    rows = write_rows(tmp_path / "one.jsonl", [{"input_ids": [5]}])
    assert "no sequence of two tokens in 1 rows" in refused(5, model, "--data", rows)


@pytest.mark.parametrize("token", [-1, 128])
def test_ids_out_of_the_vocabulary(
    refused: Refused, model: Path, tmp_path: Path, token: int
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [5, 6, token]}])
    text = refused(5, model, "--data", rows)
    assert f"rows.jsonl:1: input_ids holds {token} at position 2" in text
    assert "0 to 127" in text


def test_an_unknown_extension(refused: Refused, model: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text\nhello\n")
    assert "the suffix '.csv' is not accepted" in refused(2, model, "--data", tmp_path / "rows.csv")


@pytest.mark.parametrize(
    "spec", ["", "builtin@0", "builtin@-1", "builtin@nan", "hub:", "hub:a:b:c:d"]
)
def test_a_spec_that_makes_no_sense(refused: Refused, model: Path, spec: str) -> None:
    assert f"--data {spec}" in refused(2, model, "--data", spec)


def test_a_hub_dataset_without_a_network(refused: Refused, model: Path) -> None:
    text = refused(5, model, "--data", "hub:no/such")
    assert "hub:no/such, config default, split train: the hub cannot be reached" in text


def test_a_conversation_the_template_has_no_place_for(
    refused: Refused, model: Path, tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": [{"role": "user"}]}])
    assert "rows.jsonl:1: messages" in refused(5, model, "--data", rows)


def test_a_file_that_is_no_parquet(refused: Refused, model: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"not parquet at all")
    text = refused(5, model, "--data", tmp_path / "rows.parquet")
    assert "rows.parquet: not a readable parquet file" in text
