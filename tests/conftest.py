"""Settings of all tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from fp8calib.engines.transformers import report
from fp8calib.model import geometry_from_config
from tests.kit.answers import ask_transformers, build_skeleton


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Run on one thread: with several, models this small take seven times as long."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _no_garbage_of_imports() -> None:
    """Keep the collector from scanning the half a million objects of libraries again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _one_answer_of_transformers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "report_transformers", ask_transformers)
        patch.setattr(geometry_from_config, "_build", build_skeleton)
        yield
