"""The types of the arguments of the public functions, checked at run time."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

from fp8calib.errors import UsageError
from fp8calib.jobs.spelling import spelled_for_signature

P = ParamSpec("P")
R = TypeVar("R")


def _is_str(value: object) -> bool:
    return isinstance(value, str)


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_list(value: object, kind: type, is_item: Callable[[object], bool]) -> bool:
    return (
        isinstance(value, kind) and not isinstance(value, str | bytes) and all(map(is_item, value))  # type: ignore[call-overload]
    )


_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("a string", _is_str),
    "Path": ("a path", lambda value: isinstance(value, os.PathLike)),
    "bool": ("True or False", lambda value: isinstance(value, bool)),
    "int": ("a whole number", _is_int),
    "float": ("a number", lambda value: isinstance(value, Real) and not isinstance(value, bool)),
    "Sequence[int]": ("a list of whole numbers", lambda value: _is_list(value, Sequence, _is_int)),
    "Sequence[str]": ("a list of strings", lambda value: _is_list(value, Sequence, _is_str)),
    "Sequence[str | Path]": (
        "a list of paths",
        lambda value: _is_list(value, Sequence, lambda each: isinstance(each, str | os.PathLike)),
    ),
    "Collection[str]": ("a list of strings", lambda value: _is_list(value, Collection, _is_str)),
    "Mapping[str, str]": (
        "a mapping of strings to strings",
        lambda value: (
            _is_list(value, Mapping, _is_str) and _is_list(list(value.values()), list, _is_str)
        ),
    ),
    "ProgressCallback": ("a function", callable),
    "Callable[[str, int, int | None], None]": ("a function", callable),
    "None": ("None", lambda value: value is None),
}
"""By their annotation. Values of other annotations are checked where they are used."""


_UNION = re.compile(r" \| (?![^\[]*\])")
"""Between the types of a union, but not inside of brackets."""


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Refuse arguments of another type than the annotation, and empty strings, by their names.

    Errors and warnings name the arguments of the function, not the options of a command.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # Python's own error names the function
        with spelled_for_signature(f"fp8calib.{function.__qualname__}", signature.parameters):
            types = {each.name: str(each.annotation) for each in signature.parameters.values()}
            check_arguments(bound.arguments, types)
            return function(*args, **kwargs)

    return call


def check_arguments(given: Mapping[str, object], types: Mapping[str, str]) -> None:
    """Refuse arguments of another type, and empty strings; `types` are spelled as in code.

    Raises:
        UsageError: naming the argument.
    """
    for name, value in given.items():
        _check(name, value, _UNION.split(types[name]))


def _check(name: str, value: object, annotations: Sequence[str]) -> None:
    """Check one value.

    Raises:
        UsageError: naming the argument.
    """
    if isinstance(value, str) and not value:
        raise UsageError(f"{name}: the string is empty", hint="leave it out, or give a value")
    known = [_TYPES[each] for each in annotations if each in _TYPES]
    if len(known) < len(annotations) or any(is_type(value) for _, is_type in known):
        return
    wanted = " or ".join(text for text, _ in known if text != "None")
    raise UsageError(f"{name}: must be {wanted}, found {type(value).__name__}")
