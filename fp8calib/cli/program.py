"""The command line: run one command and show its result, or one error."""

from __future__ import annotations

import os
import shlex
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from typer.exceptions import Abort, Exit, TyperException
from typer.main import get_command

from fp8calib.cli.app import app
from fp8calib.cli.console import be_silent, discard, refuse_stdout, say, show_error
from fp8calib.cli.removed import REMOVED, find_removed
from fp8calib.cli.signals import handle_signals
from fp8calib.commands.command_line import remember_arguments
from fp8calib.errors import RESUMABLE, Fp8CalibError, UsageError, fit_line
from fp8calib.machine import ProcessRank, count_processors, find_process_rank

BUG_HINT = "this is a defect of fp8calib: please report it with the lines above"
INTERRUPTED = 130
_HINTS = {
    "usage": "see --help",
    "recipe": "docs/reference.md explains every key",
    "model": "compare the folder with its source, or download it again",
    "data": "check the file, or pass other data",
    "calibration": "this model cannot be calibrated with this data",
    "export": "use another --format or --out",
    "verification": "check the file that the message names",
    "server": "its log may name the cause",
}
"""The hints of errors that have none of their own."""
_MEASURING = frozenset({"check", "kv-types", "plan", "server", "verify"})
"""Commands that end with a verification."""
_NOT_KEPT = "nothing is kept; fewer --samples or a smaller --seq-len take less time"
_REPEAT = "an option takes one value: write it again for another, as --tp 1 --tp 2"

_PRINTED_BY_PARSER = frozenset({"-h", "--help", "--version", "--show-completion"})

_COMPLETION = "_FP8CALIB_COMPLETE"
"""Set where a shell asks the parser to complete what is typed, which is in other variables."""
_FIRST_PRINTS_S = 10.0
"""How long the other processes leave it to the first one to print an error."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program and exit with its code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Threads of OpenMP that wait in a long loop (300,000 turns), or that a container has no
    # processors for, make a run several times slower. A short one is as fast on an idle machine.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    if (count := count_processors()) < len(os.sched_getaffinity(0)):
        os.environ.setdefault("OMP_NUM_THREADS", str(count))
    handle_signals()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the program was started without it
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 -- stays open
    try:
        process_rank = find_process_rank(os.environ)
    except UsageError as error:
        sys.exit(show_error(*_explain(error), as_json="--json" in arguments))
    if process_rank.size > 1:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else pages of C++ when a peer dies
    if process_rank.is_first:
        sys.exit(_guarded(arguments, process_rank))
    be_silent()
    with suppress(KeyboardInterrupt):  # the first process has ended and printed why
        sys.exit(_guarded(arguments, process_rank))
    sys.exit(INTERRUPTED)


def _wait_for_first(process_rank: ProcessRank) -> None:
    """Let the first process print an error that all of them meet, and end the others meanwhile.

    A process that outlives the wait met the error alone: it prints the error itself.
    """
    if not process_rank.is_first:
        time.sleep(_FIRST_PRINTS_S)
        be_silent(False)
        say(f"rank {process_rank.rank} of {process_rank.size}:")


def main_inner(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; errors are raised."""
    remember_arguments(arguments)
    command = get_command(app)
    if not arguments and _COMPLETION not in os.environ:  # the parser would call it an error
        say(command.get_help(command.make_context("fp8calib", [], resilient_parsing=True)))
        return UsageError.exit_code
    for before, argument in pairwise(["", *arguments]):
        if not argument or (argument.startswith("--") and argument.endswith("=")):
            # as a path it would be the working directory
            name = argument.rstrip("=") or before
            raise UsageError(f"{name} '': the argument is empty", hint="is a variable unset?")
    try:
        outcome = command.main(list(arguments), prog_name="fp8calib", standalone_mode=False)
    except (SystemExit, OSError) as failure:
        if _PRINTED_BY_PARSER.isdisjoint(arguments):
            raise
        if isinstance(failure, OSError) and not isinstance(failure, BrokenPipeError):
            raise refuse_stdout(failure) from failure
        discard(sys.stdout)  # the parser ends with SystemExit where the reader has left
        return 0
    if isinstance(outcome, KeyboardInterrupt):
        raise outcome
    if outcome == INTERRUPTED:  # of a command that cannot be resumed
        raise KeyboardInterrupt
    return outcome if isinstance(outcome, int) else 0


def _resume_hint(arguments: Sequence[str], interruption: BaseException) -> str:
    """Give the command line that resumes an interrupted one, or say that nothing is saved."""
    if RESUMABLE not in getattr(interruption, "__notes__", ()):
        return _NOT_KEPT if "verify" in arguments[:1] else ""
    again = arguments if "--resume" in arguments else [*arguments, "--resume"]
    if find_process_rank(os.environ).size > 1:
        return "resume with: the same command and --resume, in any number of processes"
    return f"resume with: {shlex.join(['fp8calib', *again])}"


def _guarded(arguments: Sequence[str], process_rank: ProcessRank) -> int:
    """Run a command; print its error, and give the exit code."""
    typed = next(iter(arguments), "")
    try:
        return main_inner(arguments)
    except Exit as leaving:
        return leaving.exit_code
    except (KeyboardInterrupt, Abort) as interruption:
        if not process_rank.is_first:
            return INTERRUPTED
        kind = "verification" if typed in _MEASURING else "export"
        if "calibrate" in arguments[:2]:
            kind = "calibration"
        failed = (kind, "interrupted", _resume_hint(arguments, interruption), INTERRUPTED)
    except Fp8CalibError as error:
        _wait_for_first(process_rank)
        failed = _explain(error)
    except TyperException as error:
        _wait_for_first(process_rank)
        message = error.format_message().strip().replace(": Input should be", ": must be")
        hint = _HINTS["usage"]
        if removed := find_removed(arguments):
            message, hint = f"{removed} was removed", REMOVED[removed]
        else:
            hint = _REPEAT if "unexpected extra argument" in message else hint
        failed = ("usage", fit_line(message), hint, UsageError.exit_code)
    except Exception as error:  # noqa: BLE001 -- the outermost frame: it is our bug
        be_silent(False)
        traceback.print_exc()
        message = fit_line(f"{type(error).__name__}: {error}")
        failed = ("bug", message, BUG_HINT, 1)
    return show_error(*failed, as_json="--json" in arguments)


def _explain(error: Fp8CalibError) -> tuple[str, str, str, int]:
    hint = error.hint or _HINTS.get(error.kind, "")
    return error.kind, error.message, hint, error.exit_code
