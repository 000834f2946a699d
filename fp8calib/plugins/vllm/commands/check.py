"""Ask vLLM's own loader what it does with a checkpoint."""

from __future__ import annotations

import sys
from dataclasses import KW_ONLY
from functools import partial
from pathlib import Path

from fp8calib.commands import check as core
from fp8calib.commands import options as shared
from fp8calib.commands.check import CheckRequest, CheckResult
from fp8calib.commands.command_line import slow_imports
from fp8calib.commands.request import Reporter, as_function, option, request_class

describe = core.describe


@request_class
class VllmCheckRequest:
    """Load a checkpoint with vLLM's own loader, without its weights, and compare the replay.

    The exit code is that of `fp8calib check`.

    Example: fp8calib vllm check MODEL-FP8 --python ~/vllm/bin/python
    """

    path: str | Path = option(
        "PATH",
        "A checkpoint folder or hub id.",
        reads=Path,
        check=partial(shared.require_input, hint="name a checkpoint folder"),
    )
    _: KW_ONLY
    python: str | Path | None = option(
        "--python PATH",
        "The Python of an environment with vLLM; default this one.",
        reads=Path,
        default=None,
    )
    tp: int = option("--tp N", "Tensor-parallel degree; default 1.", least=1, default=1)
    trust_remote_code: bool = option(shared.TRUST, default=False)


def run(request: VllmCheckRequest, reporter: Reporter) -> CheckResult:  # noqa: ARG001
    """Load a folder with vLLM's loader, and amend what the replay says by its answer.

    Raises:
        UsageError: there is no such folder, or no vLLM in the environment.
        ModelError: the checkpoint cannot be read.
    """
    with slow_imports():
        from fp8calib.commands.check_run import check_path
        from fp8calib.engines.replay.folder import open_folder
        from fp8calib.engines.replay.verdicts import add_fingerprint
        from fp8calib.model.drafters import find_drafter_class
        from fp8calib.plugins.vllm.loader import (
            amend_by_loader,
            ask_loader,
            fetch_checkpoint,
            find_release,
        )
    python, path = Path(request.python or sys.executable), fetch_checkpoint(request.path)
    replayed = check_path(CheckRequest(path, engine=find_release(python), tp=request.tp))
    if find_drafter_class(open_folder(path).config):  # which vLLM does not load alone
        return CheckResult(engines=replayed)
    (report,) = replayed.values()
    answer = ask_loader(
        *(path, python),
        has_kv=report.asks_for_kv,
        tp=request.tp,
        trusts_code=request.trust_remote_code,
    )
    amended = add_fingerprint(amend_by_loader(report, answer), request.tp)
    return CheckResult(engines={"vllm": amended})


check = as_function("check", VllmCheckRequest, run)
