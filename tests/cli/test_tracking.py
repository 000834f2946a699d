"""`--log`: what MLflow and Weights & Biases hold afterwards, where they are installed."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fp8calib.jobs import tracking
from tests.cli.program import fail, run, succeed
from tests.docs.pages import ROOT

QUICK = ("--samples", 8, "--seq-len", 16, "--dtype", "float32")


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Put a tracker in place of MLflow, which keeps what it is given."""
    held: list[tuple[Any, ...]] = []

    def keep(*given: Any) -> str:
        held.append(given)
        return "nowhere"

    monkeypatch.setattr(tracking, "find_spec", lambda _: SimpleNamespace())
    monkeypatch.setitem(tracking._TRACKERS, "mlflow", keep)
    return held


def test_verify_logs_its_figures(tracker: list[tuple[Any, ...]], model: Path, data: Path) -> None:
    report = succeed("verify", model, "--data", data, *QUICK, "--log", "mlflow", "--json").json
    ((kind, params, metrics, document),) = tracker
    assert (kind, document) == ("verify", {**report, "next": document["next"]})
    (row,) = report["candidates"]
    for key in ("kld_mean", "kld_se", "ppl_ratio", "ppl_ratio_se", "top1_agreement"):
        assert metrics[f"scale-1.0/{key}"] == pytest.approx(row[key])
    assert metrics["reference/ppl"] == pytest.approx(report["reference"]["ppl"])
    assert metrics["tokens"] == report["tokens"]
    assert params["engine"] == "vllm"
    assert params["model_hash"] == report["provenance"]["model_hash"]


def test_plan_logs_the_frontier(
    tracker: list[tuple[Any, ...]], model: Path, data: Path, tmp_path: Path
) -> None:
    sizes = ("--max-bytes", 0.8, "--out", tmp_path / "plan", "--log", "mlflow", "--json")
    report = run("plan", model, "--data", data, *QUICK, *sizes).json
    ((kind, params, metrics, _),) = tracker
    assert kind == "plan"
    for point in report["frontier"]:
        name = point["name"].replace(",", "")
        assert metrics[f"{name}/size_bytes"] == point["size_bytes"]
        assert metrics[f"{name}/kld_mean"] == pytest.approx(point["kld_mean"])
    assert params["budget"] == report["budget"]


def test_a_tracker_that_fails_does_not_lose_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, model: Path, data: Path, tmp_path: Path
) -> None:
    def fail_to_log(*_: Any) -> str:
        raise RuntimeError("no such server")

    monkeypatch.setattr(tracking, "find_spec", lambda _: SimpleNamespace())
    monkeypatch.setitem(tracking._TRACKERS, "wandb", fail_to_log)
    page = ("--report", tmp_path / "page.html")
    outcome = run("verify", model, "--data", data, *QUICK, *page, "--log", "wandb")
    assert outcome.code == 7
    assert "--log wandb: RuntimeError: no such server" in outcome.err
    assert "scale-1.0" in outcome.out
    assert (tmp_path / "page.html").is_file()


def test_a_tracker_that_is_missing_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    monkeypatch.setattr(tracking, "find_spec", lambda _: None)
    message = fail(2, "verify", model, "--log", "wandb")
    assert "wandb is not installed" in message
    assert "pip install 'fp8calib[wandb]'" in message
    assert "must be mlflow or wandb" in fail(2, "verify", model, "--log", "notes")


def spawn(tmp_path: Path, *command: object) -> None:
    words = [sys.executable, "-m", "fp8calib", *map(str, command)]
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "logged to " in done.stderr


@pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed")
def test_mlflow_holds_the_run(model: Path, data: Path, tmp_path: Path) -> None:
    dump = ("--dump", tmp_path / "dump.safetensors", "--log", "mlflow")
    spawn(tmp_path, "verify", model, "--data", data, *QUICK, *dump)
    with sqlite3.connect(tmp_path / "mlflow.db") as base:
        names = {name for (name,) in base.execute("select key from latest_metrics")}
        params = dict(base.execute("select key, value from params"))
        (experiment,) = base.execute("select name from experiments where experiment_id > 0")
    assert {"scale-1.0/kld_mean", "scale-1.0/kld_se", "reference/ppl", "tokens"} <= names
    assert params["engine"] == "vllm"
    assert experiment == ("fp8calib",)
    (file,) = (tmp_path / "mlruns").rglob("verify.json")
    assert json.loads(file.read_text())["schema_version"] == 1


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_holds_the_run_offline(model: Path, data: Path, tmp_path: Path) -> None:
    spawn(tmp_path, "verify", model, "--data", data, *QUICK, "--log", "wandb")
    (run_file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    written = run_file.read_bytes()
    assert b"scale-1.0/kld_mean" in written
    assert b"model_hash" in written
