"""The tables of formats and engines in docs/ show what the program does.

Every dialect is converted to every other one. FP8CALIB_WRITE_README=1 in the environment writes the
tables again.
"""

import csv
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fp8calib.calibration.calibration_stats import load_stats_file
from fp8calib.commands.recipe import Recipe
from fp8calib.engines.registry import ENGINES, ONLY_READ
from fp8calib.formats.compute import compute_kv_scales
from fp8calib.formats.dialect import Dialect
from fp8calib.formats.fp8.compressed_tensors import COMPRESSED_TENSORS
from fp8calib.formats.fp8.registry import FP8_DIALECTS
from fp8calib.formats.read import read_scales
from fp8calib.formats.registry import find_dialect, list_format_names, list_read
from fp8calib.formats.table import ScaleTable
from fp8calib.model.geometry import Role, Site
from fp8calib.numerics.formats import E4M3FN
from tests.cli import quantized_sources as sources
from tests.cli.conftest import write_rows
from tests.cli.program import run, succeed
from tests.docs.pages import DOCS, ROOT, compare_generated, make_table
from tests.formats.foreign import FOLDER, find_geometry
from tests.kit.minutes import takes_minutes

MODEL = FOLDER / "llama"
ATTENTION = "model.layers.{}.self_attn"
NUM_KV_HEADS = 2
WRITERS: Mapping[str, Dialect] = {name: find_dialect(name) for name in list_format_names()}
ASKED = ("vllm", "sglang", "transformers")
ENGINE_TITLES = {key: ENGINES[key].release for key in ASKED}
STATS = "`stats.safetensors`"
STATS_DESCRIPTION = "the statistics: per channel, per head, per expert; no time, path or host"
REPORT_DESCRIPTION = "coverage, saturation, warnings, serving commands, duration"
RUN = {
    tuple(row[:2]): row[2:]
    for row in csv.reader(
        Path(__file__).with_name("matrix_run.tsv").open(), delimiter="\t", quoting=csv.QUOTE_NONE
    )
}
"""Forms that the engine itself loads: the test under `tests`, and a text in it."""
FOR_NO_ENGINE = ("TensorRT-LLM rank files", "AMMO `.npz`")
"""For an engine that `check` does not know."""

Written = Mapping[str, Path]
"""What the program wrote from the statistics, by format."""


def _save_autofp8(folder: Path) -> Path:
    """Write AutoFP8's format with different scales for k and v."""
    scales = {
        f"{ATTENTION.format(i)}.{role}_scale": torch.tensor(value * (i + 1))
        for i in range(2)
        for role, value in (("k", 0.25), ("v", 0.75))
    }
    return _save_autofp8_of(scales, folder)


def _save_old_autofp8(folder: Path) -> Path:
    """Write the older AutoFP8 format, which no tool writes any more."""
    singles = {f"{ATTENTION.format(i)}.kv_scale": torch.tensor(0.25 * (i + 1)) for i in range(2)}
    return _save_autofp8_of(singles, folder)


def _save_autofp8_of(scales: dict[str, torch.Tensor], folder: Path) -> Path:
    folder.mkdir()
    shutil.copy(FOLDER / "quark-autofp8-kv" / "config.json", folder)
    save_file(scales, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


READERS: Mapping[str, str | Callable[[Path], Path]] = {
    "compressed-tensors": "llmcompressor-fp8-static-kv",
    "compressed-tensors, `attn_head`": "llmcompressor-kv-head",
    "AutoFP8, `k_scale` and `v_scale`": _save_autofp8,
    "AutoFP8, `kv_scale`": _save_old_autofp8,
    "ModelOpt": "modelopt-fp8-kv",
    "ModelOpt, KV cache alone": "modelopt-kv",
    "Quark": "quark-fp8-kv",
    "TensorRT-LLM rank files": sources.save_ranks,
    "AMMO `.npz`": lambda folder: sources.save_npz(folder.with_suffix(".npz")),
}
"""What other tools write: a folder of `tests/foreign`, made by the tool, or a function."""


@dataclass(frozen=True)
class Cell:
    """The scales of one format after conversion to another."""

    losses: tuple[str, ...]
    refusal: str
    notes: tuple[str, ...]

    def __str__(self) -> str:
        """Describe it as the page does."""
        if self.refusal:
            return f"impossible: {self.refusal}"
        return f"lossy: {', '.join(self.losses)}" if self.losses else "works"


def save_reader(name: str, folder: Path, written: Written) -> Path:
    """Return the path of a format, writing it into `folder` if needed."""
    if name in written:
        return written[name]
    source = READERS[name]
    return FOLDER / source if isinstance(source, str) else source(folder)


def write_all(folder: Path, rows: Path) -> tuple[Path, Written]:
    """Calibrate the model in every format; return the paths of statistics and formats."""
    command = ("calibrate", MODEL, "--data", rows, "--seq-len", 32, "--dtype", "float32")
    formats = [part for name in WRITERS for part in ("--format", name)]
    succeed(*command, *formats, "--out", folder / "out")
    out = folder / "out"
    paths = {name: out / dialect.path() for name, dialect in WRITERS.items()}
    return out / "stats.safetensors", paths


def convert(name: str, source: Path, writer: str, out: Path) -> Cell:
    """Convert by the program, read the result, and list what is lost."""
    before = _read(name, source)
    command: tuple[object, ...] = ("export", source, "--model", MODEL, "--out", out)
    if name != STATS:
        command = ("extract-kv-scales", "--quantized-model", source, "--model", MODEL)
        command = (*command, "--save-path", out, *_name_dtype(name))
    outcome = run(*command, "--format", writer, "--json")
    if outcome.code:
        return Cell((), outcome.json["error"]["message"], ())
    report = outcome.json
    dialect = WRITERS[writer]
    is_folder = dialect.needs_model and name != STATS
    after = _read(writer, out if is_folder else out / dialect.path(report.get("tp", 1)))
    return Cell(tuple(_find_losses(before, after)), "", tuple(report.get("notes", ())))


def judge(place: Path) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Ask `check` what every engine does with a format: the status, and the reasons."""
    model = () if place.is_dir() else ("--model", MODEL)
    report = run("check", place, *model, "--engine", ",".join(ASKED), "--json").json
    return {
        engine: _sum_up(found["layers"], found["problems"])
        for engine, found in report["engines"].items()
    }


def _sum_up(layers: list[dict[str, Any]], problems: list[str]) -> tuple[str, tuple[str, ...]]:
    verdicts = [layer[role] for layer in layers for role in ("k", "v")]
    bad = [verdict for verdict in verdicts if verdict["status"] != "used"]
    if bad:
        return bad[0]["status"], (_shorten(bad[0]["why"]),)
    return "works", tuple(map(_shorten, problems))


def _shorten(why: str) -> str:
    """Remove the layer, the file and the fallback from a reason."""
    text = re.sub(r"^\S+ of \S+: ", "", why).removesuffix(", so it uses 1.0")
    return re.sub(r"model\.layers\.\d+\.", "", text).replace("|", "/")


def _name_dtype(name: str) -> tuple[str, ...]:
    return ("--source-dtype", "e4m3fn") if name == "AMMO `.npz`" else ()


def _read(name: str, place: Path) -> ScaleTable:
    if name == STATS:
        return compute_kv_scales(load_stats_file(place), E4M3FN, per_head=True)
    return read_scales(place, find_geometry("llama"))


def _find_losses(before: ScaleTable, after: ScaleTable) -> Iterator[str]:
    """Compare the scales of both formats head by head; they may only become larger."""
    pairs = [(a.site(Role.K), a.site(Role.V)) for _, a in before.geometry.attentions()]
    sites = [site for pair in pairs for site in pair]
    own, new = ({site: _by_head(table, site) for site in sites} for table in (before, after))
    assert all(bool((new[site] >= own[site]).all()) for site in sites)
    if any(_differs(own[site]) and not _differs(new[site]) for site in sites):
        yield "heads" if before.per_head else "ranks"
    if any(own[k].max() != own[v].max() and torch.equal(new[k], new[v]) for k, v in pairs):
        yield "k=v"
    # whatever was given up, no layer's largest scale may move
    largest = [[max(t[k].max(), t[v].max()) for k, v in pairs] for t in (own, new)]
    assert largest[0] == largest[1]


def _by_head(table: ScaleTable, site: Site) -> torch.Tensor:
    """Return the scale of each KV head; every rank holds equally many."""
    values = table.scales[site].values
    return values[0] if table.per_head else values.repeat_interleave(NUM_KV_HEADS // table.tp)


def _differs(values: torch.Tensor) -> bool:
    return bool((values != values[0]).any())


def show_formats() -> str:
    """Make the table of what is written under the output folder."""
    default = Recipe.model_fields["formats"].default
    rows = [
        [f"`{name}`{' (default)' if name in default else ''}", *_describe_output(dialect)]
        for name, dialect in WRITERS.items()
    ]
    always = [
        ["always", "`stats.safetensors`", STATS_DESCRIPTION],
        ["always", "`report.json`", REPORT_DESCRIPTION],
    ]
    return make_table(["format", "under `--out`", "what it is"], [*always, *rows])


def _describe_output(dialect: Dialect) -> tuple[str, str]:
    name = dialect.path_pattern.replace("{tp}", "N") + ("/" if dialect.needs_model else "")
    return f"`{name}`", dialect.description


def show_fp8_dialects() -> str:
    """Make the table of the dialects of FP8 checkpoints."""
    rows = [
        [
            f"`{dialect.name}`{' (default)' if dialect is COMPRESSED_TENSORS else ''}",
            dialect.description,
            ", ".join(dialect.schemes) if dialect.make_config else "only read",
        ]
        for dialect in FP8_DIALECTS.values()
    ]
    return make_table(["`--format`", "what it is", "schemes"], rows)


def show_conversions(cells: Mapping[str, Mapping[str, Cell]]) -> str:
    """Make the table of conversions, with a row for all forms that become the same."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, row in cells.items():
        alike.setdefault(tuple(map(str, row.values())), []).append(_quote(name))
    rows = [["; ".join(names), *row] for row, names in alike.items()]
    return make_table(["from \\ to", *(f"`{name}`" for name in WRITERS)], rows)


def show_only_read() -> str:
    """Make the table of engines whose source was read once."""
    titles = ["engine", "KV scales", "FP8 weights", "source"]
    named = {key: each.values() for key, each in ONLY_READ.items()}
    rows = [
        [f"`{key}`: {title} {version}", *texts] for key, (title, version, *texts) in named.items()
    ]
    return make_table(titles, rows)


def show_engines(verdicts: Mapping[str, Mapping[str, tuple[str, tuple[str, ...]]]]) -> str:
    """Make the table of engines, with reasons and conditions as footnotes."""
    numbers: dict[str, int] = {}
    rows = []
    for name, engines in verdicts.items():
        row = [_quote(name)]
        for engine in ENGINE_TITLES:
            status, said = engines[engine]
            found = [str(numbers.setdefault(text, len(numbers) + 1)) for text in said]
            words = [status, "run"] if (name, engine) in RUN else [status]
            row.append(", ".join(words) + (f" ({', '.join(found)})" if found else ""))
        rows.append(row)
    table = make_table(["format", *ENGINE_TITLES.values()], rows)
    notes = "".join(f"{number}. {text}\n" for text, number in numbers.items())
    return f"{table}\n{notes}"


def _quote(name: str) -> str:
    return f"`{name}`" if name in WRITERS else name


# --- the tables and the pages --------------------------------------------------------------------


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


def compare_page(page: str, name: str, text: str) -> None:
    compare_generated(DOCS / page, text, maker="tests/cli/test_matrix.py", name=name)


def test_every_dialect_that_is_read_is_in_the_table(places: dict[str, Path]) -> None:
    sources = [path for name, path in places.items() if name != STATS]
    read = {read_scales(path, find_geometry("llama")).dialect for path in sources}
    assert read == {dialect.name for dialect in list_read()}


def test_the_page_lists_every_format_that_is_written() -> None:
    compare_page("formats.md", "formats", show_formats())


def test_the_page_lists_every_fp8_dialect() -> None:
    compare_page("quantize.md", "FP8 dialects", show_fp8_dialects())


def test_the_page_lists_the_engines_that_were_only_read() -> None:
    compare_page("reference.md", "engines only read", show_only_read())


@takes_minutes
def test_the_page_says_what_conversions_lose(cells: Cells) -> None:
    compare_page("reference.md", "conversions", show_conversions(cells))


def test_the_page_says_what_engines_do_with_every_form(places: dict[str, Path]) -> None:
    asked = {name: place for name, place in places.items() if name not in (STATS, *FOR_NO_ENGINE)}
    compare_page(
        "formats.md", "engines", show_engines({name: judge(asked[name]) for name in asked})
    )


def test_what_is_called_run_stands_in_the_test_of_that_engine() -> None:
    for form, (file, words) in RUN.items():
        assert words in (ROOT / "tests" / file).read_text(), form


@takes_minutes
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
