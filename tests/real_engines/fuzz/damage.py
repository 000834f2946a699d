"""A damage: one change of a valid checkpoint, and the forms that it can be done to.

`damages.tsv` has one a line: `changes.py` defines the changes, and the kinds that they are made to.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.real_engines.fuzz import changes
from tests.real_engines.fuzz.draft import Draft
from tests.real_engines.fuzz.forms import Form

_TABLE = Path(__file__).with_name("damages.tsv")
_WITH_EXPERTS = ("deepseek_v3", "glm4_moe", "qwen3_moe")
"""Model types that store each expert by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One change of a checkpoint."""

    name: str
    change: Callable[[Draft], None]
    fits: Callable[[Form], bool]
    is_of_scales: bool
    """Whether it changes KV scales alone, not the config nor the files."""
    architectures: tuple[str, ...] = ()
    """The model types with what it changes; empty where any will do."""


def read_damages() -> Iterator[Damage]:
    """Read the table."""
    for row in _TABLE.read_text().splitlines()[1:]:
        name, methods, schemes, change, where, value = row.split("\t")
        of_files = ("unlist", "list_missing_file", "record_fnuz")
        yield Damage(
            name=name,
            change=_bind(getattr(changes, change), where, json.loads(value or "null")),
            fits=partial(_fits, methods, schemes),
            is_of_scales=schemes == "kv" and change not in of_files,
            architectures=_WITH_EXPERTS if name.startswith("f-expert") else (),
        )


def _bind(change: changes.Change, where: str, value: object) -> Callable[[Draft], None]:
    return lambda draft: change(draft, where, value)


def _fits(methods: str, schemes: str, form: Form) -> bool:
    """Match the forms of some methods or all, and of some schemes or a kind of them."""
    kinds = {
        "": True,
        "kv": form.has_kv,
        "none": not form.scheme,
        "any": bool(form.scheme),
        "floats": bool(form.scheme) and not form.scheme.startswith("mxfp8"),
    }
    has_scheme = kinds.get(schemes, form.scheme in schemes.split(","))
    return has_scheme and (not methods or form.method in methods.split(","))
