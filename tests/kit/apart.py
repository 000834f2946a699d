"""Run the program, or other code, in an interpreter of its own."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    **os.environ,
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))),
}
MODEL_LIBRARIES = {"transformers", "datasets", "accelerate"}
SLOW = {"compressed_tensors", "torch", "transformers"}
HEAVY = MODEL_LIBRARIES | SLOW | {"numpy", "safetensors", "pydantic", "typer"}
_PROGRAM = f"""
import contextlib, io, json, sys
from fp8calib.cli.program import main
for command in json.load(sys.stdin):
    code, out, err = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(command)
        except SystemExit as leaving:
            code = leaving.code or 0
    imported = sorted(sys.modules.keys() & {HEAVY})
    print(json.dumps([code, imported, out.getvalue(), err.getvalue()]))
"""


class Apart(NamedTuple):
    """What a command did, and what of `HEAVY` is imported after it."""

    code: int
    imported: list[str]
    out: str
    err: str


def start(*command: object, **variables: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(part) for part in command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**ENVIRONMENT, **{name: str(value) for name, value in variables.items()}},
        # A shell starts what it sends into the background with SIGINT ignored, and so its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )


def run_code(
    code: str, *arguments: object, given: str = "", **variables: object
) -> tuple[str, str]:
    """Run Python code, with `given` on stdin; give what it prints, on stdout and stderr."""
    process = start(sys.executable, "-c", code, *arguments, **variables)
    return process.communicate(given, timeout=120)


def run_apart(*commands: Sequence[object], **variables: object) -> list[Apart]:
    """Run commands of the program one after another, in one interpreter."""
    given = json.dumps([list(map(str, command)) for command in commands])
    out, err = run_code(_PROGRAM, given=given, **variables)
    found = [Apart(*json.loads(line)) for line in out.splitlines()]
    assert len(found) == len(commands), err
    return found
