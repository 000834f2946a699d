"""What the parser does: help, version, and its own errors in the program's form."""

import re

import pytest
from typer.main import get_command

from fp8calib import __version__
from fp8calib.cli import main_inner, removed
from fp8calib.cli.app import app
from fp8calib.commands import spell_commands
from fp8calib.commands.options import GATE_NAMES, read_gib, spread_formats
from fp8calib.errors import UsageError
from fp8calib.verification.judge.gates import GATES
from tests.cli.program import run, succeed

COMMANDS = list(spell_commands())


def test_help_names_every_command() -> None:
    out = succeed("--help").out
    assert all(f"\n  {command} " in out for command in COMMANDS)
    assert "..." not in out.partition("Commands:")[2], "a summary is cut"


def test_the_version_is_printed() -> None:
    assert succeed("--version").out == f"fp8calib {__version__}\n"


def test_without_a_command_the_help_is_shown_and_the_exit_code_is_usage() -> None:
    outcome = run()
    assert outcome.code == 2
    assert outcome.err.startswith("Usage: fp8calib")
    assert "error: " not in outcome.err


def test_main_inner_raises_what_main_shows() -> None:
    with pytest.raises(UsageError, match="the argument is empty"):
        main_inner(["check", ""])


@pytest.mark.parametrize(
    ("given", "spread"),
    [
        ("--format rfc", "--format rfc"),
        ("--format rfc tgi", "--format rfc --format tgi"),
        ("--format rfc tgi --out tgi", "--format rfc --format tgi --out tgi"),
        ("export s --format rfc --tp 2 tgi", "export s --format rfc --tp 2 tgi"),
        ("--format rfc --format tgi kv-scales", "--format rfc --format tgi --format kv-scales"),
        ("--format=rfc tgi", "--format=rfc --format tgi"),
        ("--format rfc,tgi vllm-json", "--format rfc,tgi --format vllm-json"),
        ("--format rfc tgi,kv-scales", "--format rfc --format tgi,kv-scales"),
        ("--format a b", "--format a b"),
        ("--out tgi rfc", "--out tgi rfc"),
    ],
)
def test_formats_that_follow_one_option_are_all_its_values(given: str, spread: str) -> None:
    assert spread_formats(given.split()) == spread.split()


@pytest.mark.parametrize(
    ("text", "gib"),
    [
        ("24", 24.0),
        ("0.5", 0.5),
        ("500M", 500 / 1024),
        ("24GiB", 24.0),
        ("1.5g", 1.5),
        ("2T", 2048),
    ],
)
def test_a_size_may_have_a_unit(text: str, gib: float) -> None:
    assert read_gib(text) == gib


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_has_an_example_and_fits_on_a_screen(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = succeed(*command.split(), "--help").out
    lines = shown.splitlines()
    assert f"Example: fp8calib {command}" in " ".join(shown.split())
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80


def test_help_groups_options_by_what_they_are_about() -> None:
    lines = succeed("verify", "--help").out.splitlines()
    titles = [line for line in lines if re.fullmatch(r"\w+:", line)]
    assert titles == ["Arguments:", "Model:", "Text:", "Candidates:", "Output:", "Machine:"]
    (data,) = (number for number, line in enumerate(lines) if line.startswith("  --data"))
    assert lines.index("Text:") < data < lines.index("Candidates:")


def test_help_shows_one_spelling_of_an_option() -> None:
    shown = succeed("extract-kv-scales", "--help").out
    assert "--save-path DIR" in shown
    assert "--out" not in shown


# --- what 0.2 had --------------------------------------------------------------------------------


@pytest.mark.parametrize("key", removed.REMOVED)
def test_what_was_removed_names_its_replacement(key: str) -> None:
    command, _, option = key.rpartition(" ")
    words = [command or "show", option, "x"] if option.startswith("-") else [option]

    outcome = run(*words)

    assert outcome.code == 2
    assert f"{key} was removed hint: {removed.REMOVED[key]}" in " ".join(outcome.err.split())


def test_nothing_that_exists_is_called_removed() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert not set(removed.REMOVED) & set(commands)


def test_an_option_of_one_command_is_not_looked_for_in_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(removed, "REMOVED", {"verify --tasks": "x", "--log": "y"})
    assert removed.find_removed(["calibrate", "m", "--tasks"]) == ""
    assert removed.find_removed(["verify", "m", "--tasks=a"]) == "verify --tasks"
    assert removed.find_removed(["plan", "--log", "wandb"]) == "--log"


# --- names that do not exist ---------------------------------------------------------------------


def test_the_gates_of_the_options_are_those_that_there_are() -> None:
    assert set(GATE_NAMES) == set(GATES)
