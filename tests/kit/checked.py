"""What a command says of the checkpoints that it wrote."""

from collections.abc import Mapping
from typing import Any


def list_commands(report: Mapping[str, Any], path: str = ".") -> dict[str, str]:
    """Give the command that serves a written checkpoint, by engine; of those that serve it."""
    found = (each for each in report["checked"] if each["path"] == path and each["command"])
    return {each["engine"].split()[0]: each["command"] for each in found}


def list_verdicts(report: Mapping[str, Any]) -> dict[str, str]:
    found = (each for each in report["checked"] if each["path"] == ".")
    return {each["engine"].split()[0]: each["summary"] for each in found}
