"""Calibration inside vLLM against our own run of the same model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.inside.recorded import read_golden
from tests.inside.vllm_cases import CASES, GOLDENS, SEQ_LEN, make_rows
from tests.real_engines.vllm_job import Calibrator


@pytest.fixture(scope="module")
def calibrate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Calibrator]:
    """Start the process that calibrates inside vLLM."""
    with Calibrator(tmp_path_factory.mktemp("calibrator") / "log") as calibrator:
        yield calibrator


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the rows of all runs."""
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in make_rows()))
    return path


@pytest.mark.parametrize("name", CASES)
def test_the_workers_answer_as_recorded(
    calibrate: Calibrator, data: Path, tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    answers = GOLDENS / f"{name}.json" if "FP8CALIB_RECORD" in os.environ else tmp_path / "new"
    options = ["--data", data, "--seq-len", SEQ_LEN, "--no-pack", "--dtype", "float32"]
    ranks = ["--tensor-parallel-size", case.tp, "--pipeline-parallel-size", case.pp]

    code, printed = calibrate(
        case.save_model(tmp_path / "model"),
        tmp_path / "out",
        *options,
        *ranks,
        ranks=case.tp * case.pp,
        record=answers,
    )

    assert code == 0, printed
    assert answers.exists(), printed
    fresh, recorded = read_golden(answers), read_golden(GOLDENS / f"{name}.json")
    assert fresh.keys() == recorded.keys()
    assert fresh["fp8calib_describe"] == recorded["fp8calib_describe"]
