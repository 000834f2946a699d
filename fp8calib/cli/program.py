"""The command line: parse, run one command, show the outcome or one clear error."""

from __future__ import annotations

import os
import shlex
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from typer.exceptions import Abort, Exit, TyperException
from typer.main import get_command

from fp8calib.cli.app import app
from fp8calib.cli.console import be_silent, drop_stdout, say, show_error
from fp8calib.cli.option_types import spread_formats
from fp8calib.cli.signals import listen
from fp8calib.errors import Fp8CalibError, UsageError, fit_line
from fp8calib.machine.launch import ProcessRank, find_process_rank

BUG_HINT = "this is a defect of fp8calib: please report it with the lines above"
INTERRUPTED = 130
_HINTS = {
    "usage": "see --help",
    "recipe": "`fp8calib recipes kv` explains every key",
    "model": "compare the folder with where it came from, or download it again",
    "data": "check the file, or pass other data",
    "calibration": "this model or this data cannot be calibrated as it is",
    "export": "choose another --format or --out",
    "verification": "look at the file the message names",
}
"""What to do where an error itself does not say it."""
_STAGES = {
    "calibrate": "calibration",
    "export": "export",
    "merge": "export",
    "extract-kv-scales": "export",
    "quantize": "export",
    "verify": "verification",
    "check": "verification",
}
"""What an interruption kept a command from; the exit code tells it from a failure."""

_FIRST_TELLS_S = 10.0
_RESUMABLE = frozenset({"calibrate", "quantize"})


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program and leave with its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    listen()
    _replace_closed_streams()
    try:
        place = find_process_rank(os.environ)
    except UsageError as error:
        sys.exit(_show(error, arguments))
    if place.size > 1:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # pages of C++ where one has died
    if place.is_first:
        sys.exit(_guarded(arguments, place))
    be_silent()
    with suppress(KeyboardInterrupt):  # the first process has ended, and said why
        sys.exit(_guarded(arguments, place))
    sys.exit(INTERRUPTED)


def _replace_closed_streams() -> None:
    """Give a program that was started without stdout or stderr somewhere to write."""
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 -- open until the program ends
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115


def _wait_for_first(place: ProcessRank) -> None:
    """Let the first process tell of what all have met: its end, and that of all, comes meanwhile.

    What is told of here is what this process alone has met.
    """
    if not place.is_first:
        time.sleep(_FIRST_TELLS_S)
        be_silent(False)
        say(f"rank {place.rank} of {place.size}:")


def main_inner(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; errors are raised, so that tests can see them."""
    command = get_command(app)
    if not arguments:  # the parser would call its own help an error
        say(command.get_help(command.make_context("fp8calib", [], resilient_parsing=True)))
        return UsageError.exit_code
    outcome = command.main(spread_formats(arguments), prog_name="fp8calib", standalone_mode=False)
    if outcome == INTERRUPTED:  # the parser turns Ctrl-C into an exit without a word
        raise KeyboardInterrupt
    return outcome if isinstance(outcome, int) else 0


def _say_how_to_resume(arguments: Sequence[str]) -> str:
    """Give the command line that goes on where this one was interrupted; empty where none does."""
    if not arguments or arguments[0] not in _RESUMABLE or "--dry-run" in arguments:
        return ""
    again = arguments if "--resume" in arguments else [*arguments, "--resume"]
    if find_process_rank(os.environ).size > 1:
        return "go on with: the same command and --resume, started alike or in one process"
    return f"go on with: {shlex.join(['fp8calib', *again])}"


def _show(error: Fp8CalibError, arguments: Sequence[str]) -> int:
    hint = error.hint or _HINTS.get(error.kind, "")
    as_json = "--json" in arguments
    return show_error(error.kind, error.message, hint, as_json=as_json, exit_code=error.exit_code)


def _check_others(arguments: Sequence[str], place: ProcessRank) -> None:
    """Refuse to do several times at once what one process is for."""
    if place.size > 1 and arguments and arguments[0] in _STAGES and arguments[0] != "calibrate":
        raise UsageError(
            f"{arguments[0]}: {place.size} processes were started, and only calibrate shares its "
            "work among several",
            hint="start it without torchrun",
        )


def _guarded(  # noqa: PLR0911 -- one return per kind of error
    arguments: Sequence[str], place: ProcessRank
) -> int:
    as_json = "--json" in arguments
    try:
        _check_others(arguments, place)
        return main_inner(arguments)
    except Fp8CalibError as error:
        _wait_for_first(place)
        return _show(error, arguments)
    except TyperException as error:
        _wait_for_first(place)
        message = error.format_message().strip().replace(": Input should be", ": must be")
        return show_error("usage", fit_line(message), _HINTS["usage"], as_json=as_json, exit_code=2)
    except (KeyboardInterrupt, Abort):
        if not place.is_first:
            return INTERRUPTED
        kind = _STAGES.get(next(iter(arguments), ""), "data")
        hint = _say_how_to_resume(arguments)
        return show_error(kind, "interrupted", hint, as_json=as_json, exit_code=INTERRUPTED)
    except Exit as leaving:
        return leaving.exit_code
    except BrokenPipeError:
        drop_stdout()  # whoever read our output has seen enough
        return 0
    except Exception as error:  # noqa: BLE001 -- the outermost frame: anything left is our bug
        be_silent(False)
        traceback.print_exc()
        message = f"{type(error).__name__}: {error}"
        return show_error("bug", fit_line(message), BUG_HINT, as_json=as_json, exit_code=1)
