"""Settings of all tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Run on one thread: with several, models this small take seven times as long."""
    torch.set_num_threads(1)
