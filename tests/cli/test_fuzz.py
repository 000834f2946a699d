"""Broken scales files of every tool, through every command that reads them.

Some forty cases by default, the same ones every time. `FP8CALIB_FUZZ_SECONDS=600` goes on with
new ones for so long; `FP8CALIB_FUZZ_SEED=N` begins at another one (scripts/fuzz does both).
"""

import itertools
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from fp8calib.calibration.fingerprint import fingerprint_model
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.engines.registry import find_emulated
from fp8calib.errors import (
    CANNOT_TELL,
    DataError,
    ExportError,
    ModelError,
    UsageError,
    VerificationError,
)
from fp8calib.model.load import build_skeleton, open_source
from fp8calib.model.prepared import prepare
from fp8calib.verification.candidates import Target
from fp8calib.verification.open_candidates import open_candidate
from tests.cli import quantized_sources as sources
from tests.cli.program import Outcome, run
from tests.kit.minutes import HAS_MINUTES
from tests.mutations import break_file, break_folder

CASES_BY_DEFAULT = 4 if HAS_MINUTES else 2
SECONDS = float(os.environ.get("FP8CALIB_FUZZ_SECONDS", "0"))
FIRST_SEED = int(os.environ.get("FP8CALIB_FUZZ_SEED", "0"))
REFUSALS = (UsageError, ModelError, DataError, ExportError, VerificationError)
CODES = {CANNOT_TELL, *(error.exit_code for error in REFUSALS)}
"""Of the errors that a file can be answered with; 1 is a bug."""


@dataclass(frozen=True)
class Bench:
    """The good files, and the model they are for."""

    model: Path
    calibrated: Path
    target: Target
    outside: Path
    """Good files in a folder that no command names."""


_opened: list[str] = []
_is_watching = False


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _is_watching and event == "open" and isinstance(arguments[0], str | bytes):
        _opened.append(os.path.realpath(os.fsdecode(arguments[0])))


@contextmanager
def nothing_is_opened_in(folder: Path) -> Iterator[None]:
    """Require that no file under a folder is opened, by whatever path it is reached."""
    global _is_watching  # noqa: PLW0603 -- a hook cannot be taken away again
    _opened.clear()
    _is_watching = True
    try:
        yield
    finally:
        _is_watching = False
    inside = os.path.realpath(folder)
    assert not [path for path in _opened if path.startswith(inside + os.sep)]


@pytest.fixture(scope="module")
def bench(calibrated: tuple[Path, Outcome], model: Path, tmp_path_factory: Any) -> Bench:
    """Put good files outside of what is named, and open the model once."""
    sys.addaudithook(_watch)  # not where the module is imported: it slows every other test
    outside = tmp_path_factory.mktemp("outside")
    shutil.copy(calibrated[0] / "kv_scales.safetensors", outside)
    shutil.copy(calibrated[0] / "kv_cache_scales.tp1.json", outside / "scales.json")
    sources.save_npz(outside / "rank0.npz")
    checkpoint = Checkpoint.open(model)
    target = Target(
        prepared=prepare(build_skeleton(open_source(str(model))), checkpoint),
        fingerprint=fingerprint_model(checkpoint.load_config(), checkpoint),
        numerics=find_emulated("vllm")[1],
    )
    return Bench(model=model, calibrated=calibrated[0], target=target, outside=outside)


def _copy(name: str) -> Callable[[Bench, Path], Path]:
    def make(bench: Bench, folder: Path) -> Path:
        source = bench.calibrated / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        return Path(copy(source, folder / name))

    return make


def _save(name: str, save: Callable[[Path], Path]) -> Callable[[Bench, Path], Path]:
    return lambda _, folder: save(folder / name)


def _save_foreign(folder: Path) -> Path:
    """Write a checkpoint whose model type only its own code knows."""
    path = sources.save_source("compressed-tensors", folder) / "config.json"
    own = {"model_type": "foreign", "auto_map": {}, "num_attention_heads": 4}
    own |= {"num_key_value_heads": 2, "num_hidden_layers": 2}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    return folder


MAKERS: Mapping[str, Callable[[Bench, Path], Path]] = {
    **{
        name: _save(file, partial(sources.save_source, name))
        for name, file in sources.SOURCES.items()
    },
    "per head": _save("llama-FP8", sources.save_per_head),
    "own code": _save("foreign-FP8", _save_foreign),
    "ranks": _save("ranks", sources.save_ranks),
    "npz": _save("rank0.npz", sources.save_npz),
    "bare": _save("bare.safetensors", sources.save_bare),
    **{
        f"our {name}": _copy(name)
        for name in (
            *("kv-overlay", "kv-overlay-head", "tgi", "kv_scales.safetensors"),
            *("kv_cache_scales.tp2.json", "rfc.tp1.json"),
        )
    },
}


def _break(random: Random, path: Path, bench: Bench) -> None:
    if path.is_dir():
        break_folder(random, path, outside=bench.outside)
    else:
        break_file(random, path)


def _list_cases(name: str) -> Iterator[Random]:
    """Give so many generators, or as many as this test's share of the time allows."""
    started = time.monotonic()
    for number in itertools.count():
        if SECONDS:
            is_over = time.monotonic() - started > SECONDS / (len(MAKERS) + 1)
        else:
            is_over = number >= CASES_BY_DEFAULT
        if is_over:
            return
        yield Random(f"{name} {FIRST_SEED + number}")  # noqa: S311 -- to be repeated, not secret


def _numbers(node: object) -> Iterator[float]:
    if isinstance(node, dict):
        for value in node.values():
            yield from _numbers(value)
    elif isinstance(node, float | int) and not isinstance(node, bool) and 0 < node < 1e38:
        yield float(np.float32(node))


def _held_numbers(path: Path) -> set[float]:
    """Collect every number that stands in a file or in those of a folder, by other readers."""
    if path.is_dir():
        files = (file for file in path.iterdir() if file.is_file())
        return {number for file in files for number in _held_numbers(file)}
    try:
        if path.suffix == ".json":
            return set(_numbers(json.loads(path.read_bytes())["kv_cache"]))
        if path.suffix == ".npz":
            with np.load(path) as arrays:
                return {float(np.float32(value.ravel()[0])) for value in arrays.values()}
        tensors = load_file(path)
    except Exception:  # noqa: BLE001 -- what other readers refuse holds nothing
        return set()
    return {
        number for value in tensors.values() for number in value.float().flatten().tolist()[:4096]
    }


def _check_outcome(outcome: Outcome, codes: set[int]) -> None:
    assert outcome.code in codes, outcome.err[-2000:]
    assert "Traceback" not in outcome.err
    document = outcome.json
    if outcome.code == 0 or "error" not in document:
        return
    error = document["error"]
    assert error["message"]
    assert len(error["message"]) < 4100
    assert error["message"].isprintable()
    assert error["hint"].isprintable()


def _extract(bench: Bench, path: Path, folder: Path) -> None:
    out = folder / "out"
    before = sorted(entry.name for entry in folder.iterdir())
    command = ("extract-kv-scales", "--quantized-model", path, "--model", bench.model)
    rest = ("--source-dtype", "e4m3fn") if "npz" in path.name or "bare" in path.name else ()
    outcome = run(*command, "--save-path", out, "--format", "kv-scales", *rest, "--json")

    _check_outcome(outcome, {0, *CODES})
    assert sorted(entry.name for entry in folder.iterdir() if entry.name != "out") == before
    assert out.exists() == (outcome.code == 0)
    if outcome.code == 0:
        values = {v for t in load_file(out / "kv_scales.safetensors").values() for v in [t.item()]}
        assert all(math.isfinite(value) and value > 0 for value in values)
        factor = 0.5 if outcome.json["source_dtype"] == "e4m3fnuz" else 1.0
        assert values <= {number * factor for number in _held_numbers(path)}
        shutil.rmtree(out)


def _verify(bench: Bench, path: Path) -> None:
    try:
        opened = open_candidate(str(path), bench.target)
    except REFUSALS:
        return
    assert opened.table is not None
    held = _held_numbers(path)
    for scale in opened.table.scales.values():
        assert bool((scale.values.isfinite() & (scale.values > 0)).all())
        assert set(scale.values.flatten().tolist()) <= held


@pytest.mark.parametrize("name", MAKERS)
def test_broken_scales_are_read_or_refused(name: str, bench: Bench, tmp_path: Path) -> None:
    good = MAKERS[name](bench, tmp_path)
    for number, random in enumerate(_list_cases(name)):
        folder = tmp_path / f"case-{number}"
        folder.mkdir()
        copy = shutil.copytree if good.is_dir() else shutil.copy
        path = Path(copy(good, folder / good.name))
        _break(random, path, bench)
        with nothing_is_opened_in(bench.outside):
            _extract(bench, path, folder)
            _verify(bench, path)
            for command in (("check", "--model", bench.model), ("check",), ("show",)):
                _check_outcome(run(*command, path, "--json"), {0, *CODES})
        shutil.rmtree(folder)


@pytest.mark.parametrize("command", [("check",), ("check", "--engine", "vllm"), ("show",)])
def test_a_link_to_another_folder_is_not_followed(
    command: tuple[str, ...], bench: Bench, tmp_path: Path
) -> None:
    path = shutil.copytree(bench.model, tmp_path / "model")
    (path / "more.safetensors").symlink_to(bench.outside / "kv_scales.safetensors")
    with nothing_is_opened_in(bench.outside):
        run(*command, path)


@pytest.mark.parametrize("command", ["show", "export"])
def test_broken_statistics_are_read_or_refused(command: str, bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "stats.safetensors"
    rest = ("--format", "kv-scales", "--out", tmp_path / "out") if command == "export" else ()
    for random in _list_cases("stats"):
        shutil.copy(bench.calibrated / "stats.safetensors", path)
        break_file(random, path)
        _check_outcome(run(command, path, *rest, "--json"), {0, *CODES})
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
