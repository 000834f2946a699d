"""Run the program under test in this process, and inspect its outputs."""

import hashlib
import io
import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8calib.cli import main

KIND_OF_EXIT_CODE = {
    1: "bug",
    2: "usage",
    3: "recipe",
    4: "model",
    5: "data",
    6: "calibration",
    7: "export",
    8: "verification",
}


@dataclass(frozen=True)
class Outcome:
    """The exit code and output of one run of the program."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The JSON document on stdout, which must hold nothing else."""
        return json.loads(self.out)


def run(*arguments: object) -> Outcome:
    """Run the program as a shell would; options and paths are converted to text."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as leaving:
            code = leaving.code
    outcome = Outcome(code if isinstance(code, int) else -1, out.getvalue(), err.getvalue())
    if "--json" in arguments and outcome.out:
        _check_passed(outcome, judges_freely=arguments[0] in {"verify", "server"})
    return outcome


def _check_passed(outcome: Outcome, *, judges_freely: bool) -> None:
    """Require that `passed` agrees with the exit code; without --gate, a verdict fails nothing."""
    assert outcome.json["schema_version"] == 1
    passed = outcome.json["passed"]
    assert passed is (outcome.code == 0) or (judges_freely and passed is False)


def succeed(*arguments: object) -> Outcome:
    """Run the program and require exit code 0."""
    outcome = run(*arguments)
    assert outcome.code == 0, outcome.err
    return outcome


def fail(code: int, *arguments: object) -> str:
    """Run the program, require one error with this exit code, and return message and hint.

    The error is on stderr, and as JSON on stdout; there is no traceback and no other `error` line.
    """
    outcome = run(*arguments, "--json")
    assert outcome.code == code, f"exit {outcome.code}: {outcome.err}"
    error = outcome.json["error"]
    assert set(error) == {"kind", "message", "hint"}
    assert error["kind"] == KIND_OF_EXIT_CODE[code] or (code, error["kind"]) == (4, "server")
    assert "\n" not in error["message"] + error["hint"]
    assert "Traceback" not in outcome.err
    assert outcome.err.count("error: ") == 1
    assert f"error: {error['message']}\n" in outcome.err
    assert error["hint"], f"no word on what to do: {error['message']}"
    assert f"hint: {error['hint']}\n" in outcome.err
    return f"{error['message']}\n{error['hint']}"


def snapshot(folder: Path) -> dict[str, str]:
    """Map every file of a folder to the hash of its contents, but for cards, which name it."""
    return {str(path.relative_to(folder)): _sum_up(path) for path in sorted(folder.rglob("*"))}


def _sum_up(path: Path) -> str:
    if not path.is_file():
        return "folder"
    is_card = path.name == "README.md"
    return "card" if is_card else hashlib.sha256(path.read_bytes()).hexdigest()
