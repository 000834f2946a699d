"""What replaces commands and options of 0.2; this table goes with release 0.5."""

from __future__ import annotations

from collections.abc import Sequence

REMOVED: dict[str, str] = {}
"""By command (`card`), option of all commands (`--log`) or of one (`verify --tasks`)."""


def explain_removed(arguments: Sequence[str]) -> str:
    """Say what replaces the first removed command or option; empty where none is given."""
    command = next(iter(arguments), "")
    for argument in arguments:
        option = argument.partition("=")[0]
        keys = (f"{command} {option}", option) if option.startswith("-") else ()
        for key in (*keys, *([command] if argument is command else [])):
            if key in REMOVED:
                return f"{key} was removed: {REMOVED[key]}"
    return ""
