"""Run `fp8calib engine-env`: make an environment with an engine, and print its Python."""

from __future__ import annotations

from fp8calib.api.engine_env import make_engine_env
from fp8calib.cli.console import print_json, print_text, prints_json, say
from fp8calib.requests.engine_env import EngineEnvRequest


def run_engine_env(request: EngineEnvRequest) -> None:
    """Make the environment, or find it, and print the path of its Python."""
    python = make_engine_env(request.engine, request.folder, tell=say)
    if prints_json():
        print_json({"python": str(python)})
    else:
        print_text(str(python))
