"""Hooks of pre-commit, which pass several files: one command of the program for each."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

from fp8calib.cli.program import main
from fp8calib.errors import VerificationError, cut_list

_COMMANDS = {
    "recipes": ["recipes"],
    "scales": ["show", "--json"],
    "receipts": ["receipt", "verify"],
}


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
        told = printed.getvalue()
        if kind == "scales" and not code and (wrong := _list_wrong(json.loads(told))):
            code, told = VerificationError.exit_code, f"no scales: {cut_list(wrong)}"
        if code:
            print(f"{path}: exit code {code}\n{told}", file=sys.stderr)
        worst = max(worst, code)
    return worst


def _list_wrong(shown: Mapping[str, Any]) -> list[str]:
    """List the numbers of a file of scales that are not finite and above zero."""
    return [
        f"{name}: {value}"
        for name, values in shown.get("scales", {}).items()
        for value in (values if isinstance(values, list) else ())
        if not 0 < float(value) < math.inf
    ]


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
