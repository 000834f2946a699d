"""Real engines, in environments that `scripts/test-engines` makes; no part of `scripts/test`."""

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
    """Give calibrations of models, each made once."""
    transformers.utils.logging.disable_progress_bar()
    return Exports(tmp_path_factory.mktemp("exports"))


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> VllmServer:
    """Give what starts a process of vLLM for every question."""
    return VllmServer(tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Give the model of `scripts/demo`."""
    return Path(__file__).parents[2] / "demo" / "SmolLM2-135M-Instruct"
