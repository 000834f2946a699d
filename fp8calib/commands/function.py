"""Commands as functions of Python: the fields of a request are the arguments."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any, ParamSpec, Protocol, TypeVar, cast, get_args, get_type_hints

from fp8calib.api.arguments import checked
from fp8calib.api.progress import warn_each

P = ParamSpec("P")
Request = TypeVar("Request")
Result = TypeVar("Result")


class Reporter(Protocol):
    """Gets what a command says while it runs."""

    def say(self, text: str) -> None:
        """Tell what happens now."""

    def warn(self, text: str) -> None:
        """Tell of something that the user should know."""


class _Warnings:
    """Makes Python warnings of what a command warns of, and drops what it says."""

    def say(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        warn_each([text])


def as_function(
    name: str, request: Callable[P, Request], run: Callable[[Request, Reporter], Result]
) -> Callable[P, Result]:
    """Make the public function of a command.

    Its arguments are the fields of the request, with their types and defaults, for editors too. Its
    documentation is that of the request and of its fields.
    """

    def function(*args: P.args, **kwargs: P.kwargs) -> Result:
        return run(request(*args, **kwargs), _Warnings())

    function.__name__ = function.__qualname__ = name
    function.__doc__ = _describe(cast("type", request))
    signature = inspect.signature(request)
    hints = get_type_hints(request)
    function.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[
            each.replace(annotation=_spell(hints[each.name]))
            for each in signature.parameters.values()
        ],
        return_annotation=_spell_result(get_type_hints(run)["return"]),
    )
    return checked(function)


def _spell_result(kind: Any) -> str:
    return " | ".join(each.__name__ for each in get_args(kind) or (kind,))


def _spell(annotation: object) -> str:
    """Spell a type as it is written in code; any sequence does where a list is asked for."""
    text = inspect.formatannotation(annotation)
    return re.sub(r"\b(pathlib|collections\.abc)\.", "", text).replace("list[", "Sequence[")


def _describe(request: type) -> str:
    """Write the documentation of a function."""
    text = (inspect.getdoc(request) or "").partition("\n\nExample:")[0]
    hints = get_type_hints(request, include_extras=True)
    lines = [f"    {each.name}: {get_args(hints[each.name])[1].help}" for each in fields(request)]
    return "\n".join([text, "", "Args:", *lines])
