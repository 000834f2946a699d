"""The Python of an environment, alone on its line."""

from __future__ import annotations

from collections.abc import Iterator

from fp8calib.blocks import Block, Line
from fp8calib.requests.engine_env import EngineEnvRequest
from fp8calib.results.engine_env import EngineEnvResult


def describe(result: EngineEnvResult, request: EngineEnvRequest) -> Iterator[Block]:  # noqa: ARG001
    """Give the path."""
    yield Line(str(result.python))
