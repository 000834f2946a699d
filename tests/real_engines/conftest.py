"""Real engines, in environments that `scripts/test-engines` makes; `scripts/test` skips them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import transformers

from tests.real_engines.exports import Exports
from tests.real_engines.vllm_job import VllmServer

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
