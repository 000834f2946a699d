"""Settings of all tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.doors import ask_once


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
    with ask_once():
        yield
