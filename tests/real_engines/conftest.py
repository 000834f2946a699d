"""Real engines, in environments that `scripts/test-engines` makes; `scripts/test` skips them."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers

from tests.plugins.vllm.vllm_cases import make_rows
from tests.real_engines.exports import Exports
from tests.real_engines.vllm_job import Calibrator, ForkServer, VllmServer

collect_ignore_glob = [] if os.environ.get("FP8CALIB_TEST_ENGINES") else ["test_*"]


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    """Calibrate models, each once."""
    transformers.utils.logging.disable_progress_bar()
    return Exports(tmp_path_factory.mktemp("exports"))


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> VllmServer:
    """Return a function that starts a new process of vLLM for each question."""
    return VllmServer(tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Return the model of `scripts/demo`."""
    return Path(__file__).parents[2] / "demo" / "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def calibrate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Calibrator]:
    """Start the process that calibrates inside vLLM."""
    with ForkServer(tmp_path_factory.mktemp("calibrator") / "log") as server:
        yield server.calibrate


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the rows of all runs."""
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in make_rows()))
    return path
