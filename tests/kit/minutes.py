"""Tests that take minutes: `scripts/test-engines` runs them, `scripts/test` does not."""

import os
from typing import Any

import pytest

HAS_MINUTES = bool(os.environ.get("FP8CALIB_TEST_ENGINES"))
takes_minutes = pytest.mark.skipif(
    not HAS_MINUTES, reason="takes minutes: scripts/test-engines runs it"
)


def in_minutes(*cases: object) -> list[Any]:
    """Make parameters of cases that take minutes together."""
    return [pytest.param(each, marks=takes_minutes) for each in cases]
