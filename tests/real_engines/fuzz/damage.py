"""A damage: one change of a valid checkpoint, and the forms that it can be done to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.real_engines.fuzz.draft import Draft, UnfitError
from tests.real_engines.fuzz.forms import Form

Change = Callable[[Draft], None]
Fits = Callable[[Form], bool]


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


def set_key(key: str, value: object) -> Change:
    """Make a change that sets a key of the quantization_config; a dot leads into an object."""

    def change(draft: Draft) -> None:
        *path, last = key.split(".")
        _find(draft, path)[last] = value

    return change


def drop_key(key: str) -> Change:
    """Make a change that removes a key of the quantization_config."""

    def change(draft: Draft) -> None:
        *path, last = key.split(".")
        _find(draft, path).pop(last, None)

    return change


def _find(draft: Draft, path: list[str]) -> dict[str, Any]:
    found = draft.quantization
    for key in path:
        found = found[key]
    if not isinstance(found, dict):
        raise UnfitError(f"{'.'.join(path)} is no object")
    return found


def remove_config(draft: Draft) -> None:
    """Remove the quantization_config."""
    draft.config.pop("quantization_config", None)
