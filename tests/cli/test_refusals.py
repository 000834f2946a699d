"""What commands refuse: one message, the right exit code, and nothing is written.

A line of `refusals.tsv` has the exit code (and `early`: before torch is imported), what is changed,
the command, and parts of message and hint. `{name}` is a place of `places.MAKERS`; `{file}` is a
file that is written, `{damaged}` a copy of a place with one change.
"""

import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.conftest import QUICK
from tests.cli.places import Places
from tests.cli.program import fail
from tests.kit.apart import Apart, run_apart
from tests.kit.checkpoints import WEIGHTS, change_config, change_quantization, change_tensors

BYTES = {
    "deep": b"[" * 100_000,
    "digits": b'{"input_ids": [' + b"9" * 5000 + b"]}",
    "nested": b'{"x": ' + b'{"a":' * 700 + b"1" + b"}" * 701,
}


class Row(NamedTuple):
    """A line of the table."""

    code: str
    change: str
    command: str
    says: list[str]


def read_rows() -> list[Row]:
    lines = Path(__file__).with_name("refusals.tsv").read_text().splitlines()
    cells = [line.split("\t") for line in lines if not line.startswith("# ")]
    return [Row(code, change, command, says) for code, change, command, *says in cells]


ROWS = [row for row in read_rows() if not row.code.endswith("early")]
EARLY = [row for row in read_rows() if row.code.endswith("early")]


def fill(text: str, places: Places) -> str:
    """Replace the names in braces that are places, and no others."""
    text = text.replace("{quick}", "--data {data} " + " ".join(map(str, QUICK)))
    text = text.replace("{long}", "x" * 2000).replace("\\n", "\n")
    return re.sub(r"\{([a-z0-9_]+)\}", lambda name: places[name[1]], text)


def write_bytes(path: Path, text: str) -> Path:
    """Write a text with the escapes of Python."""
    raw = text.encode("latin-1").decode("unicode_escape") if "\\" in text else text
    path.write_bytes(BYTES.get(text) or raw.encode("latin-1"))
    return path


def change(described: str, places: Places, folder: Path) -> dict[str, Path]:
    """Make what a line describes: `file NAME TEXT`, or `PLACE VERB ...`, a copy with a change."""
    if not described:
        return {}
    place, verb, *rest = described.split(" ", 2)
    if place == "file":
        beside = folder / "given"
        beside.mkdir()
        if "png" in described or "wav" in described:
            for path in Path(places["media"]).iterdir():
                (beside / path.name).symlink_to(path)
        return {"given": beside, "file": write_bytes(beside / verb, rest[0])}
    damaged = Path(shutil.copytree(places[place], folder / "damaged"))
    name, *values = rest[0].split(" ", 1)
    if verb == "config":
        change_config(damaged, **json.loads(rest[0]))
    elif verb == "quantization":
        change_quantization(damaged, **json.loads(rest[0]))
    elif verb == "drop":
        change_config(damaged, lambda config: config.pop(name))
    elif verb == "remove":
        (damaged / name).unlink()
    elif verb == "rename":
        (damaged / name).rename(damaged / values[0])
    elif verb == "write":
        write_bytes(damaged / name, values[0])
    elif verb == "tensor":
        change_tensors(damaged, {name: change_tensor(damaged, name, values[0])})
    else:  # index
        (damaged / WEIGHTS).rename(damaged / "b.safetensors")
        write_bytes(damaged / f"{WEIGHTS}.index.json", rest[0])
    return {"damaged": damaged}


def change_tensor(folder: Path, name: str, how: str) -> torch.Tensor | None:
    """Leave a tensor out, cut a row off, spoil a number, or make another: dtype, shape, number."""
    if how == "none":
        return None
    if how in {"cut", "nan"}:
        tensor = load_file(folder / WEIGHTS)[name]
        if how == "nan":
            tensor[3, 5] = torch.nan
        return tensor[:-1].contiguous() if how == "cut" else tensor
    dtype, shape, number = how.split()
    made = torch.full([int(size) for size in shape.split(",")], float(number))
    return made.to(getattr(torch, dtype))


def list_files(folder: Path) -> list[str]:
    """List the files of a folder with their times; a pipe among them cannot be read."""
    return sorted(f"{path} {path.lstat().st_mtime_ns}" for path in folder.rglob("*"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.command} {row.change}"[:150])
def test_a_command_is_refused(row: Row, places: Places, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    places = places.beside({"pipe": tmp_path / "pipe.jsonl"})
    places = places.beside(change(row.change, places, tmp_path))
    words = shlex.split(fill(row.command, places))
    before = list_files(tmp_path)

    text = fail(int(row.code), *words)

    assert not [says for says in row.says if fill(says, places) not in text]
    assert "Input should be" not in text
    assert "ignore_mismatched_sizes" not in text
    assert list_files(tmp_path) == before


@pytest.fixture(scope="module")
def early() -> dict[str, Apart]:
    commands = [row.command for row in EARLY]
    return dict(zip(commands, run_apart(*map(str.split, commands)), strict=True))


@pytest.mark.parametrize("row", EARLY, ids=lambda row: row.command)
def test_a_name_is_refused_before_torch_is_imported(early: dict[str, Apart], row: Row) -> None:
    found = early[row.command]
    assert f"{found.code} early" == row.code
    assert "torch" not in found.imported
    error, hinted = found.err.splitlines()
    assert row.says[0] in error
    assert row.says[1] in hinted


def test_a_name_that_is_nearly_that_of_a_folder(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(places["model"], tmp_path / "damaged"))
    near = f"{folder.name[:-1]}_"
    monkeypatch.chdir(tmp_path)
    for name in (near, f"./{near}", str(tmp_path / near)):
        suggested = Path(name).parent / folder.name
        command = fill(f"calibrate {name} {{quick}} --out {{out}}", places).split()
        assert f"did you mean {suggested}? " in fail(4, *command)
    assert f"did you mean {folder}?" in fail(2, "check", tmp_path / near)
    shutil.copytree(folder, tmp_path / "measured" / "overlay")
    assert "did you mean measured/overlay? " in fail(4, "check", "measurd/overlay")
