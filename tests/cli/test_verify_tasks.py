"""`fp8calib verify --tasks`: what is printed, and what is refused before a model is loaded."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cli.conftest import QUICK
from tests.cli.program import Outcome, fail, run, succeed
from tests.verification.harness_tasks import CONTINUATION, MULTIPLE_CHOICE, write_task

needs_harness = pytest.mark.skipif(
    find_spec("lm_eval") is None,
    reason="lm-evaluation-harness is not installed: pip install 'fp8calib[eval]'",
)
ROWS = [
    {
        "question": f"w{i} w{i + 1}",
        "choices": [f"w{i * j % 90}" for j in (3, 5, 7)],
        "answer": i % 3,
    }
    for i in range(8)
]


@pytest.fixture(autouse=True)
def _own_data_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what the harness' data library writes out of the user's folders."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    """Give two task files, as the option takes them."""
    paths = (write_task(tmp_path / "tasks", c, ROWS) for c in (MULTIPLE_CHOICE, CONTINUATION))
    return ",".join(map(str, paths))


@needs_harness
def test_the_report_holds_both_numbers_for_every_candidate(
    model: Path, data: Path, calibrated: tuple[Path, Outcome], tasks: str
) -> None:
    """Stdout is one JSON document, though the harness prints while it bootstraps."""
    scales = calibrated[0] / "stats.safetensors"
    options = ("--data", data, *QUICK, "--scales", scales, "--tasks", tasks, "--limit", 6)
    report = succeed("verify", model, *options, "--json").json
    named = [(row["candidate"], row["task"], row["metric"]) for row in report["tasks"]]
    metrics = [("choose", "acc"), ("choose", "acc_norm"), ("continue", "perplexity")]
    assert named == [(name, *m) for name in (str(scales), "scale-1.0") for m in metrics]
    for row in report["tasks"]:
        assert row["num_documents"] == 6
        assert row["reference_se"] > 0
        assert (row["recovery_percent"] is None) == (row["metric"] == "perplexity")
    setup = report["task_setup"]
    assert (setup["add_bos_token"], setup["bos_token"], setup["limit"]) == (True, "<s>", 6)


@needs_harness
def test_the_table_says_that_texts_begin_with_the_bos(model: Path, data: Path, tasks: str) -> None:
    outcome = succeed("verify", model, "--data", data, *QUICK, "--tasks", tasks, "--limit", 6)
    title, header, first = outcome.out.split("lm-evaluation-harness ")[1].splitlines()[:3]
    assert title.endswith("add_bos_token=True (<s> before every text), --limit 6")
    columns = "candidate task metric docs reference ± se value ± se recovery %"
    assert " ".join(header.split()) == columns
    assert first.split()[:4] == ["scale-1.0", "choose", "acc", "6"]
    assert "requests" not in outcome.err


@needs_harness
def test_a_task_file_that_cannot_be_used_is_found_before_the_model_is_loaded(
    model: Path, data: Path, tmp_path: Path
) -> None:
    path = write_task(tmp_path, {**MULTIPLE_CHOICE, "test_split": "final"}, ROWS)
    options = ("--data", data, *QUICK, "--tasks", path)
    assert "final" in fail(2, "verify", model, *options)
    assert "computing in" not in run("verify", model, *options).err
    assert "no such file" in fail(2, "verify", model, "--tasks", tmp_path / "no.yaml")
    (tmp_path / "rows.jsonl").unlink()
    assert "rows.jsonl" in fail(5, "verify", model, *options)


def test_the_missing_harness_is_named_with_its_extra(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    text = fail(2, "verify", model, "--tasks", "hellaswag")
    assert "pip install 'fp8calib[eval]'" in text


@needs_harness
def test_a_dry_run_names_the_tasks(model: Path, data: Path, tasks: str) -> None:
    options = ("--data", data, *QUICK, "--tasks", tasks, "--dry-run", "--json")
    assert succeed("verify", model, *options).json["plan"]["tasks"] == tasks.split(",")


@needs_harness
def test_a_model_that_has_to_be_streamed_answers_no_tasks(
    model: Path, data: Path, tasks: str
) -> None:
    """Said before anything is counted: no cap would help but one that holds the model."""
    options = ("--data", data, *QUICK, "--tasks", tasks, "--memory", 0.01)
    text = fail(2, "verify", model, *options)
    assert "--tasks" in text
    assert "streamed" in text
