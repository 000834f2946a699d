"""Data specs are resolved to files, hub datasets and the built-in text."""

from pathlib import Path

import pytest

from fp8calib.data.specs import (
    DataSpec,
    HubSource,
    parse_spec,
)
from fp8calib.errors import UsageError


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("builtin", DataSpec(None, "builtin")),
        ("builtin@2", DataSpec(None, "builtin@2", 2.0)),
        ("hub:wikitext", DataSpec(HubSource("wikitext"), "hub:wikitext")),
        ("hub:a/b:cfg", DataSpec(HubSource("a/b", "cfg"), "hub:a/b:cfg")),
        ("hub:a/b:cfg:test", DataSpec(HubSource("a/b", "cfg", "test"), "hub:a/b:cfg:test")),
        ("hub:a/b::extra", DataSpec(HubSource("a/b", None, "extra"), "hub:a/b::extra")),
        ("hub:a@0.25", DataSpec(HubSource("a"), "hub:a@0.25", 0.25)),
        ("hub:a@main", DataSpec(HubSource("a@main"), "hub:a@main")),
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
