"""A command or option of 0.2 that is gone says what replaces it."""

from __future__ import annotations

import pytest
from typer.main import get_command

from fp8calib.cli import removed
from fp8calib.cli.app import app
from tests.cli.program import run


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
