"""What only a process of its own can show: imports, signals, pipes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.conftest import write_rows
from tests.cli.program import snapshot
from tests.kit.apart import ENVIRONMENT, run_apart, run_code, start
from tests.kit.forks import start_fork

PROGRAM = (sys.executable, "-m", "fp8calib")

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and pipes of POSIX")


def test_help_does_not_pay_for_heavy_imports() -> None:
    for each in run_apart(["--help"], ["calibrate", "--help"], ["export", "--help"]):
        assert each.out.startswith("Usage: fp8calib")
        assert set(each.imported) <= {"pydantic", "typer"}


@pytest.mark.parametrize(
    ("given", "turns"), [({}, "2000"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")]
)
def test_threads_that_wait_leave_the_processor_to_others(given: dict[str, str], turns: str) -> None:
    code = (
        "import contextlib, os\nfrom fp8calib.cli import main\n"
        "with contextlib.suppress(SystemExit):\n    main(['--version'])\n"
        "print(os.environ.get('GOMP_SPINCOUNT'))"
    )
    out, err = run_code(code, **given)
    assert out.splitlines()[1:] == [turns], err


def test_an_interrupted_verification_leaves_nothing(model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [5] * 128}] * 2000)
    before = snapshot(tmp_path)
    options = ("--samples", 2000, "--seq-len", 128, "--dump", tmp_path / "out", "--json")
    process = start_fork("fp8calib", "verify", model, "--data", rows, *options)
    assert process.stderr is not None
    talk = next((line for line in process.stderr if "computing in" in line), "")
    assert talk, "ended before it began to compute"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    hint = "nothing is kept; fewer --samples or a smaller --seq-len take less time"
    error = {"kind": "verification", "message": "interrupted", "hint": hint}
    assert json.loads(out) == {"schema_version": 1, "passed": False, "error": error}
    assert "error: interrupted" in err
    assert "Traceback" not in err
    assert snapshot(tmp_path) == before


def test_a_shell_completes_commands_and_options() -> None:
    typed, completed = "fp8calib check --eng", "--engine"
    place = {"COMP_WORDS": typed, "COMP_CWORD": typed.count(" ")}
    process = start(*PROGRAM, _FP8CALIB_COMPLETE="complete_bash", **place)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out.split(), err) == (0, [completed], "")
    zsh = start(*PROGRAM, _FP8CALIB_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS=typed)
    assert f'"{completed}":"' in zsh.communicate(timeout=60)[0]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", [["check", "MODEL"], ["--help"]])
def test_a_full_disk_under_stdout_is_told(model: Path, arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*PROGRAM, *(str(model) if each == "MODEL" else each for each in arguments)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
            check=False,
        )
    assert done.returncode == 7
    told = done.stderr.removeprefix("loading libraries\n")
    assert told.startswith("error: stdout cannot be written: No space left on device\n")
    assert "Traceback" not in done.stderr


def test_a_pipe_shows_life_at_once_and_a_missing_path_needs_no_library(
    model: Path, tmp_path: Path
) -> None:
    none = str(tmp_path / "none")
    commands = [
        ["check", none],
        ["show", none],
        ["export", none, "--format", "kv-scales", "--out", "out"],
        *([name, none] for name in ("calibrate", "verify")),
        ["quantize", none, "--scheme", "w8a16", "--out", "out"],
        ["calibrate", str(model), "--data", f"{none}.jsonl"],
        ["verify", str(model), "--scales", none],
        ["extract-kv-scales", "--quantized-model", none, "--model", none, "--out", "out"],
        ["check", str(model)],
    ]
    *missing, last = run_apart(*commands)
    for each in missing:
        assert each.err.startswith("error: ")
        assert none in each.err
    assert last.err.startswith("loading libraries\n")
    assert "torch" not in last.imported


# --- signals that Python swallows ----------------------------------------------------------------


CHILD = """
import os, signal, sys
from fp8calib.cli.console import ConsoleReporter
from fp8calib.cli.signals import handle_signals

class Deaf:
    def __del__(self):
        os.kill(os.getpid(), int(sys.argv[1]))
        for _ in range(1000):
            pass

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
handle_signals()
with ConsoleReporter() as bar:
    bar.stage("work", 2)
    bar.advance(1)
    Deaf()
    print("continued")
    try:
        bar.advance(1)
    except KeyboardInterrupt:
        print("stopped")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_destructor_is_not_lost(number: signal.Signals) -> None:
    out, err = run_code(CHILD, int(number))
    assert out.split("\n")[:2] == ["continued", "stopped"]
    assert "KeyboardInterrupt" in err  # what Python says of the one it swallowed


def test_an_ignored_sigint_stays_ignored() -> None:
    """As in a job that a shell started in the background."""
    code = (
        "import os, signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from fp8calib.cli.signals import handle_signals; handle_signals()\n"
        "os.kill(os.getpid(), signal.SIGINT); print('alive')"
    )
    assert run_code(code)[0] == "alive\n"


def test_the_exit_frees_what_triton_made() -> None:
    """What stays frozen, nanobind reports as leaks."""
    code = (
        "import atexit, gc, sys; atexit.register(lambda: print(gc.get_freeze_count()))\n"
        "from fp8calib.commands.command_line import remember_arguments, slow_imports\n"
        "remember_arguments(['show'])\n"
        "with slow_imports(): sys.modules['triton'] = sys\n"
        "assert gc.get_freeze_count() > 1000"
    )
    assert run_code(code)[0] == "0\n"
