"""lm-evaluation-harness on a model under `fp8calib.emulate`, in an environment of its own."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests import zoo
from tests.cli.conftest import save_tokenizer, write_rows
from tests.cli.program import succeed

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-lm-eval" / "bin" / "python"
JOB = Path(__file__).with_name("lm_eval_job.py")


@pytest.mark.parametrize("candidate", ["overlay", "fp8-dynamic"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_harness_scores_and_generates_under_emulation(
    family: str, candidate: str, tmp_path: Path
) -> None:
    zoo.save(family, tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    if candidate == "overlay":
        rows = [{"input_ids": ids.tolist()} for ids in zoo.draw([32] * 8)]
        data = write_rows(tmp_path / "rows.jsonl", rows)
        run = ("calibrate", tmp_path / "model", "--data", data, "--rule", "percentile:60")
        succeed(*run, "--seq-len", 32, "--dtype", "float32", "--out", tmp_path / "out")
        candidate = str(tmp_path / "out" / "kv-overlay")
    command = [PYTHON, JOB, tmp_path / "model", candidate, tmp_path / "found.json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([str(part) for part in command], check=True, env=environment)
    found = json.loads((tmp_path / "found.json").read_text())
    expected = found["by hand"]
    assert found["emulated"]["scores"] == pytest.approx(expected["scores"], abs=1e-4)
    assert found["emulated"]["text"].split() == expected["text"].split()
    assert found["plain"] == found["after"]
    assert found["plain"]["scores"] != pytest.approx(found["emulated"]["scores"], abs=1e-3)
