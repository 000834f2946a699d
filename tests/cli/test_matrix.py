"""The tables of formats and engines in docs/ show what the program does.

FP8CALIB_WRITE_README=1 in the environment writes the tables again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from fp8calib.formats.read import read_scales
from fp8calib.formats.registry import list_read
from tests.cli.conftest import write_rows
from tests.cli.matrix import (
    FOR_NO_ENGINE,
    READERS,
    RUN,
    STATS,
    WRITERS,
    Cell,
    convert,
    judge,
    save_reader,
    show_conversions,
    show_engines,
    show_formats,
    show_fp8_dialects,
    show_only_read,
    write_all,
)
from tests.formats.foreign import find_geometry

ROOT = Path(__file__).parents[2]
SAID = {
    "heads": "scales per head became one: the largest of a layer's heads",
    "ranks": "the scales of 2 ranks became 1: each is the largest of the rank's heads",
    "k=v": "k and v of a layer share one scale here, the larger of the two: ",
}
"""The program's note about each loss."""

Cells = Mapping[str, Mapping[str, Cell]]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Give every form that can be read, our own first."""
    folder = tmp_path_factory.mktemp("matrix")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 64, (8, 32), generator=generator).tolist()
    rows = write_rows(folder / "rows.jsonl", [{"input_ids": row} for row in tokens])
    stats, written = write_all(folder, rows)
    forms = [*written, *READERS]
    saved = {name: save_reader(name, folder / f"form{i}", written) for i, name in enumerate(forms)}
    return {STATS: stats, **saved}


@pytest.fixture(scope="module")
def cells(places: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Cells:
    out = tmp_path_factory.mktemp("converted")
    return {
        name: {writer: convert(name, place, writer, out / f"{i}-{writer}") for writer in WRITERS}
        for i, (name, place) in enumerate(places.items())
    }


def _compare_page(page: str, name: str, text: str) -> None:
    path = ROOT / "docs" / page
    shown = path.read_text()
    begin, end = f"<!-- {name}: made by tests/cli/test_matrix.py -->\n", "\n<!-- end -->"
    assert shown.count(begin) == 1
    start = shown.index(begin) + len(begin)
    stop = shown.index(end, start)
    if os.environ.get("FP8CALIB_WRITE_README"):
        path.write_text(shown[:start] + text + shown[stop:])
        return
    assert shown[start:stop] == text, "FP8CALIB_WRITE_README=1 writes it again"


def test_every_dialect_that_is_read_is_in_the_table(places: dict[str, Path]) -> None:
    sources = [path for name, path in places.items() if name != STATS]
    read = {read_scales(path, find_geometry("llama")).table.dialect for path in sources}
    assert read == {dialect.name for dialect in list_read()}


def test_the_page_lists_every_format_that_is_written() -> None:
    _compare_page("formats.md", "formats", show_formats())


def test_the_page_lists_every_fp8_dialect() -> None:
    _compare_page("quantize.md", "FP8 dialects", show_fp8_dialects())


def test_the_page_lists_the_engines_that_were_only_read() -> None:
    _compare_page("reference.md", "engines only read", show_only_read())


def test_the_page_says_what_conversions_lose(cells: Cells) -> None:
    _compare_page("reference.md", "conversions", show_conversions(cells))


def test_the_page_says_what_engines_do_with_every_form(places: dict[str, Path]) -> None:
    asked = {name: place for name, place in places.items() if name not in (STATS, *FOR_NO_ENGINE)}
    _compare_page(
        "formats.md", "engines", show_engines({name: judge(asked[name]) for name in asked})
    )


def test_what_is_called_run_stands_in_the_test_of_that_engine() -> None:
    for form, (file, words) in RUN.items():
        assert words in (ROOT / "tests" / file).read_text(), form


def test_the_program_says_every_loss_and_no_other(cells: Cells) -> None:
    for name, row in cells.items():
        for writer, cell in row.items():
            if name != STATS:
                said = {
                    loss
                    for loss, words in SAID.items()
                    if any(note.startswith(words) for note in cell.notes)
                }
                assert said == set(cell.losses), (name, writer)


def test_a_form_goes_to_itself_without_a_loss(cells: Cells) -> None:
    for name in WRITERS:
        assert str(cells[name][name]) == "works"


def test_k_and_v_are_one_in_three_forms_and_heads_are_kept_in_two(cells: Cells) -> None:
    apart = cells["compressed-tensors"]
    assert {name for name in WRITERS if "k=v" in apart[name].losses} == {"tgi", "vllm-json", "rfc"}
    per_head = cells["kv-overlay-head"]
    kept = {name for name in WRITERS if "heads" not in per_head[name].losses}
    assert kept == {"kv-overlay-head", "lightllm-head"}
