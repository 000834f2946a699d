"""Answer many questions of `vllm check`: `vllm_run.py`, one JSON job a line on stdin.

Runs in vLLM's own environment, which takes long to import: a fork of this process runs the script
of `vllm check` for each. A job names `model`, `kv_cache_dtype` and `result`, the file for what the
script prints. A line on stdout says that a job is done.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from vllm.model_executor.models import registry
from vllm_weights import TIMEOUT_S, prepare_for_forks

_SCRIPT = Path(__file__).parents[2] / "fp8calib" / "plugins" / "vllm" / "loader_script.py"


def main() -> None:
    """Answer every job of stdin."""
    registry._run_in_subprocess = lambda inspect: inspect()  # a fork can import the model itself
    loader = _import_script()
    prepare_for_forks()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no reply
    for line in sys.stdin:
        _answer_in_fork(loader, json.loads(line))
        print("done", file=replies, flush=True)


def _import_script() -> ModuleType:
    spec = spec_from_file_location("run_loader", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def _answer_in_fork(loader: ModuleType, job: dict[str, str]) -> None:
    child = os.fork()
    if child == 0:
        signal.alarm(TIMEOUT_S)
        with Path(job["result"]).open("w") as file:
            os.dup2(file.fileno(), 1)
        sys.argv = ["loader_script.py", job["model"], job["kv_cache_dtype"], "1"]
        loader.main()
    os.waitpid(child, 0)


if __name__ == "__main__":
    main()
