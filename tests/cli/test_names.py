"""Names that do not exist are refused with a suggestion before torch is imported."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fp8calib.commands.options import GATE_NAMES
from fp8calib.errors import join_or, suggest
from fp8calib.verification.judge.gates import GATES

_PROGRAM = """
import contextlib, io, json, sys
from fp8calib.cli.program import main
for command in json.load(sys.stdin):
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        try:
            main(command.split())
        except SystemExit as leaving:
            code = leaving.code
    print(json.dumps([code, "torch" in sys.modules, told.getvalue()]))
"""
REFUSALS = [
    ("verify x --scheme fp8", "--scheme fp8: unknown scheme", "fp8-static, fp8-dynamic or"),
    ("quantize x --out o --scheme FP8-dynamc", "unknown scheme", "fp8-dynamic?"),
    (
        "quantize x --out o --scheme w8a16 --format autofp8",
        "--format autofp8 cannot express --scheme w8a16",
        "w8a16 can be written as compressed-tensors",
    ),
    (
        "quantize x --out o --scheme w8a16 --layer-scheme a=fp8_block",
        "--layer-scheme fp8_block: unknown scheme",
        "fp8-block?",
    ),
    ("calibrate x --format rfc,kvoverlay", "--format kvoverlay: unknown", "kv-overlay?"),
    ("extract-kv-scales --quantized-model x --model x --save-path o --source-dtype fnuz",
     "--source-dtype fnuz: must be", "e4m3fnuz?"),
    ("check x --engine vllm --engine sglan", "--engine sglan: unknown engine", "sglang?"),
    ("check x --engine vllm==9.x", "--engine vllm==9.x: unknown version", "known versions"),
    ("verify x --gate w8a", "--gate w8a: neither a gate (kv, w8a8) nor a file", "w8a8?"),
]  # fmt: skip
"""Commands, and what their messages and hints say."""


@pytest.fixture(scope="module")
def refusals() -> dict[str, list[object]]:
    """Give the exit code of every command, whether torch was imported by then, and the message."""
    commands = [command for command, _, _ in REFUSALS]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(zip(commands, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize(("command", "message", "hint"), REFUSALS)
def test_a_name_is_refused_before_torch_is_imported(
    refusals: dict[str, list[object]], command: str, message: str, hint: str
) -> None:
    code, has_torch, told = refusals[command]
    assert (code, has_torch) == (2, False)
    error, hinted = str(told).splitlines()
    assert message in error
    assert hint in hinted


def test_the_gates_of_the_options_are_those_that_there_are() -> None:
    assert set(GATE_NAMES) == set(GATES)


def test_suggestions() -> None:
    assert suggest("abc", ["abd", "xyz"]) == "did you mean abd?"
    assert suggest("q", ["abd", "xyz"], what="words") == "known words: abd, xyz"
    assert suggest("", ["abd"]) == ""
    assert [join_or(list(text)) for text in ("", "a", "ab", "abc")] == [
        "",
        "a",
        "a or b",
        "a, b or c",
    ]
