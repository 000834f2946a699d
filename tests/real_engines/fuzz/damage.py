"""A damage: one change of a valid checkpoint, and the forms that it can be done to."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.real_engines.fuzz.draft import Draft, UnfitError
from tests.real_engines.fuzz.forms import Form

Change = Callable[[Draft], None]
Fits = Callable[[Form], bool]
Select = Callable[[Draft], list[str]]
"""Lists the tensors that a change is about."""
Edit = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One change of a checkpoint."""

    name: str
    change: Change
    fits: Fits
    architectures: tuple[str, ...] = ()
    """The model types with what it changes; empty where any will do."""


def has_kv(form: Form) -> bool:
    """Whether there are KV scales."""
    return form.has_kv


def has_fp8(form: Form) -> bool:
    """Whether there are FP8 weights."""
    return bool(form.scheme)


def has_method(*methods: str, scheme: bool | None = None) -> Fits:
    """Match the forms of these methods; with or without FP8 weights, where `scheme` says so."""
    return lambda form: form.method in methods and scheme in {None, bool(form.scheme)}


def has_scheme(*schemes: str, method: str = "") -> Fits:
    """Match the forms with FP8 weights in these schemes."""
    return lambda form: form.scheme in schemes and method in {"", form.method}


def one_of(select: Select) -> Select:
    """Select one of these tensors, drawn at random."""
    return lambda draft: [draft.random.choice(select(draft))]


def edit(select: Select, new: Edit) -> Change:
    """Make a change of tensors."""

    def change(draft: Draft) -> None:
        for name in select(draft):
            draft.put(name, new(draft[name]))

    return change


def drop(select: Select) -> Change:
    """Make a change that removes tensors."""

    def change(draft: Draft) -> None:
        for name in select(draft):
            draft.pop(name)

    return change


def rename(select: Select, new: Callable[[str], str]) -> Change:
    """Make a change of the names of tensors."""

    def change(draft: Draft) -> None:
        for name in select(draft):
            draft.rename(name, new(name))

    return change


def set_key(key: str, value: object) -> Change:
    """Make a change that sets a key of config.json; a dot leads into an object."""

    def change(draft: Draft) -> None:
        holder, last = _find(draft, key)
        holder[last] = value

    return change


def drop_key(key: str) -> Change:
    """Make a change that removes a key of config.json."""

    def change(draft: Draft) -> None:
        holder, last = _find(draft, key)
        holder.pop(last, None)

    return change


def _find(draft: Draft, key: str) -> tuple[dict[str, Any], str]:
    """Find the object that holds a key, and the key's last part."""
    *path, last = key.split(".")
    found = draft.config
    for part in path:
        found = found.get(part)  # type: ignore[assignment]
        if not isinstance(found, dict):
            raise UnfitError(f"there is no object {part}")
    return found, last


_TABLE = Path(__file__).with_name("config_damages.tsv")


def read_config_damages() -> Iterator[Damage]:
    """Read the changes of single keys of the config; a key without a value is removed."""
    for row in _TABLE.read_text().splitlines()[1:]:
        name, methods, schemes, key, value = row.split("\t")
        change = set_key(key, json.loads(value)) if value else drop_key(key)
        yield Damage(name=name, change=change, fits=_make_fits(methods, schemes))


def _make_fits(methods: str, schemes: str) -> Fits:
    """Match the forms of some methods or all, with or without FP8 weights, or in some schemes."""

    def fits(form: Form) -> bool:
        known = {"": True, "any": bool(form.scheme), "none": not form.scheme}
        has_scheme = known.get(schemes, form.scheme in schemes.split(","))
        return has_scheme and (not methods or form.method in methods.split(","))

    return fits
