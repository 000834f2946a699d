"""Calibrate many models inside vLLM: `vllm_calibrate.py`, one JSON job a line on stdin.

Runs in vLLM's own environment, which takes long to import: a fork of this process runs the command
line of fp8calib for each. A job has `arguments`, `environment`, and `result`, the file for what is
printed; its last line is the exit code. `record` is the file for the answers of the workers, or
empty. `has_torchvision` puts an empty one in its place. A line on stdout says that a job is done.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from no_torchvision import replace_torchvision
from vllm import LLM
from vllm.model_executor.models import registry
from vllm_weights import prepare_for_forks

sys.path.insert(0, str(Path(__file__).parents[2]))

_TIMEOUT_S = 900


def main() -> None:
    """Answer every job of stdin."""
    registry._run_in_subprocess = lambda inspect: inspect()  # a fork can import the model itself
    prepare_for_forks()
    import fp8calib.plugins.vllm.commands.calibrate  # noqa: F401, PLC0415 -- once for all forks

    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no reply
    for line in sys.stdin:
        job = json.loads(line)
        _answer_in_fork(job)
        print("done", file=replies, flush=True)


def _answer_in_fork(job: dict[str, Any]) -> None:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    signal.alarm(_TIMEOUT_S)
    os.environ.update(job["environment"])
    if job["has_torchvision"]:
        replace_torchvision()
    answers: dict[str, list[Any]] = {}
    if job["record"]:
        _keep_answers(answers)
    with Path(job["result"]).open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    code = 70
    try:
        from fp8calib.cli import main_inner  # noqa: PLC0415

        code = main_inner(job["arguments"])
        if job["record"]:
            from tests.plugins.vllm.recorded import write_golden  # noqa: PLC0415

            write_golden(Path(job["record"]), answers)
    except BaseException as error:  # noqa: BLE001 -- the caller reads it
        traceback.print_exc()
        print(getattr(error, "hint", ""))
    print(f"\nexit code {code}", flush=True)
    os._exit(0)  # vLLM's threads may not end


def _keep_answers(answers: dict[str, list[Any]]) -> None:
    """Keep the last answers of the workers by method."""
    call = LLM.collective_rpc

    def keep(self: LLM, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        answers[method] = call(self, method, *args, **kwargs)
        return answers[method]

    LLM.collective_rpc = keep  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
