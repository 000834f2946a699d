"""Messages to Python callers name arguments, not the options of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

import fp8calib
from fp8calib.errors import Fp8CalibWarning, UsageError
from fp8calib.jobs.spelling import spell_for_caller, spelled_for_request
from fp8calib.options.option import list_options
from fp8calib.requests import find_request
from tests.cli.program import fail


def spell(command: str, text: str) -> str:
    with spelled_for_request(f"fp8calib.{command}", list_options(find_request(command))):
        return spell_for_caller(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--samples -1: must be 1 or more", "samples=-1: must be 1 or more"),
        ("--samples 4: must be 1 or more", "samples=4: must be 1 or more"),
        ("use --seq-len 4096 or less", "use seq_len=4096 or less"),
        ("leave out --scheme to verify", "leave out scheme= to verify"),
        ("--scheme fp8-static needs statistics", "scheme='fp8-static' needs statistics"),
        ("use --fp8-dtype e4m3fnuz", "use fp8_dtype='e4m3fnuz'"),
        ("add --tasks NAME", "add tasks=NAME"),
        ("use --no-pack, so that", "use pack=False, so that"),
        ("leave out --sampled to start", "leave out sampled=True to start"),
        ("--data x.jsonl: no such file", "data='x.jsonl': no such file"),
        ("no --data given: using", "no data= given: using"),
        ("--data: --rounding nearest runs", "data: --rounding nearest runs"),
        ("see --help", "see help(fp8calib.verify)"),
        ("`fp8calib verify --samples 4` does", "`fp8calib.verify(samples=4)` does"),
        ("use `fp8calib merge`, and", "use `fp8calib.merge`, and"),
        (
            "`fp8calib calibrate ... --shard 1/4 --no-pack --resume`",
            "`fp8calib.calibrate(..., shard='1/4', pack=False, resume=True)`",
        ),
        (
            "write it: `fp8calib verify MODEL --scales 'a b' --json`",
            "write it: `fp8calib.verify(MODEL, scales='a b')`",
        ),
        (
            "`fp8calib extract-kv-scales` converts",
            "`fp8calib.extract_kv_scales` converts",
        ),
        ("`lm-eval validate --tasks` and `fp8calib nonsense`",) * 2,
        ("--c4 and vLLM's --kv-cache-dtype fp8", "--c4 and vLLM's --kv-cache-dtype fp8"),
        ("use --device cpu", "use device='cpu'"),
        ("--limit has no effect without --tasks", "limit= has no effect without tasks="),
        ("use more text, more --samples, or", "use more text, more samples=, or"),
    ],
)
def test_options_become_the_arguments_of_the_function(text: str, expected: str) -> None:
    assert spell("verify", text) == expected
    assert spell_for_caller(text) == text  # outside of a function


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("export", "formats='tgi' without model=, force=True, --scheme"),
        ("quantize", "dialect='tgi' without --model, force=True, scheme="),
        ("show", "--format tgi without --model, --force, --scheme"),
    ],
)
def test_each_function_has_its_own_arguments(command: str, expected: str) -> None:
    assert spell(command, "--format tgi without --model, --force, --scheme") == expected


def test_errors_and_warnings_of_the_functions_name_their_arguments(
    model: Path, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"^samples=0: must be 1 or more"):
        fp8calib.calibrate(model, str(data), samples=0)
    with pytest.raises(UsageError, match=r"^observe: nothing is observed"):
        fp8calib.calibrate(model, str(data), observe=[])
    with pytest.raises(UsageError, match="limit= has no effect without tasks="):
        fp8calib.verify(model, limit=3)
    with pytest.warns(Fp8CalibWarning, match="no data= given"):
        fp8calib.calibrate(model, samples=1, seq_len=16, dtype="float32")
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "config.json").touch()
    with pytest.raises(UsageError) as caught:
        fp8calib.quantize(model, "w8a16", tmp_path / "q")
    assert "force=True" in caught.value.message + caught.value.hint
    assert "--" not in caught.value.message + caught.value.hint


def test_the_command_line_still_names_its_options(model: Path) -> None:
    assert "--limit has no effect without --tasks" in fail(2, "verify", model, "--limit", 3)
