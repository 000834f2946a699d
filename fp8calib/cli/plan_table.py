"""A plan as people read it: what a run would do, with sizes and times spelled out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8calib.cli.console import print_json, print_table
from fp8calib.run.spelling import spell_duration, spell_size


def show_plan(plan: Mapping[str, Any], title: str, *, as_json: bool) -> None:
    """Print a plan (`{"plan": {...}}`); what it does not know is left out of the table."""
    if as_json:
        print_json(plan)
        return
    rows = [[key, _spell(key, value)] for key, value in plan["plan"].items() if value is not None]
    print_table(title, ["what", "value"], rows)


def _spell(key: str, value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {spell_size(size)}" for name, size in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if key.endswith("_bytes") and isinstance(value, int):
        return spell_size(value)
    if key.endswith("_s") and isinstance(value, float):
        return f"about {spell_duration(value)}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
