"""Hooks of pre-commit, which pass several files: one command of the program for each."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from io import StringIO

from fp8calib.cli.program import main

_COMMANDS = {"recipes": ["recipes"], "scales": ["show"], "receipts": ["receipt", "verify"]}


def run(kind: str, paths: list[str]) -> int:
    """Run the command of a kind of files on each; give the largest exit code.

    What a command prints is shown only where it fails; messages are on stderr.
    """
    worst = 0
    for path in paths:
        printed = StringIO()
        try:
            with redirect_stdout(printed):
                main([*_COMMANDS[kind], path])
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
        if code:
            print(f"{path}: exit code {code}\n{printed.getvalue()}", file=sys.stderr)
        worst = max(worst, code)
    return worst


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
