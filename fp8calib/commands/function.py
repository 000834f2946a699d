"""Commands as functions of Python, and what a command says while it runs."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar, cast, get_type_hints

from fp8calib.calibration.progress import Progress
from fp8calib.commands.option import list_options
from fp8calib.commands.options import ProgressCallback
from fp8calib.commands.run_plan import RunPlan
from fp8calib.errors import Fp8CalibWarning

P = ParamSpec("P")
Request = TypeVar("Request")
Result = TypeVar("Result")


class Reporter(Progress, Protocol):
    """Gets what a command says while it runs; the progress of a run may be any reporter."""

    def say(self, text: str) -> None:
        """Tell what the command does."""

    def warn(self, text: str) -> None:
        """Tell of something that the user should know about the result."""


class CallbackProgress:
    """Reports the progress of a run to a callback; None reports nothing."""

    def __init__(self, callback: ProgressCallback | None) -> None:
        self._callback = callback
        self._name = ""
        self._total: int | None = None
        self._done = 0

    def stage(
        self,
        name: str,
        total: int | None,
        *,
        unit: str = "steps",  # noqa: ARG002
        layers: int = 0,  # noqa: ARG002
        batches: int = 0,  # noqa: ARG002
    ) -> None:
        """Begin a stage of `total` units."""
        self._name, self._total, self._done = name, total, 0
        self.advance(0)

    def advance(self, steps: int) -> None:
        """Advance by `steps`."""
        self._done += steps
        if self._callback is not None:
            self._callback(self._name, self._done, self._total)


class PythonReporter(CallbackProgress):
    """Makes Python warnings of what the user should know, and calls back with the progress."""

    def __init__(self, callback: ProgressCallback | None) -> None:
        super().__init__(callback)
        self._caller = sys._getframe(2)  # the user's, above the public function
        self._line = self._caller.f_lineno

    def say(self, text: str) -> None:
        """Drop it: the function's result has what is worth keeping."""

    def warn(self, text: str) -> None:
        """Issue a warning, as of the line that called the public function."""
        warnings.warn_explicit(
            text,
            Fp8CalibWarning,
            self._caller.f_code.co_filename,
            self._line,
            module=self._caller.f_globals.get("__name__"),
            registry=self._caller.f_globals.setdefault("__warningregistry__", {}),
        )


def as_function(
    name: str,
    request: Callable[P, Request],
    run: Callable[[Request, Reporter], Result | RunPlan | None],
) -> Callable[P, Result]:
    """Make the public function of a command.

    Its arguments are the fields of the request, with their types and defaults, for editors too. Its
    documentation is that of the request and of its fields, and the errors that `run` lists.
    Messages name the options of the command line. In one process, and without `dry_run`, which
    gives a RunPlan, `run` always gives a result.
    """
    kind = cast("type", request)
    declared = list_options(kind)
    signature = inspect.signature(request)
    types = {each.name: each.type for each in declared}
    parameters = [
        each.replace(annotation=types[each.name]) for each in signature.parameters.values()
    ]

    def function(*args: P.args, **kwargs: P.kwargs) -> Result:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{name}() {error}") from None
        for each in declared:
            each.check_choice(given.get(each.name))
        made = request(*args, **kwargs)
        reporter = PythonReporter(getattr(made, "progress", None))
        result = run(made, reporter)
        if failure := getattr(result, "failure", ""):  # a command prints it as its error
            reporter.warn(failure)
        return cast("Result", result)

    function.__name__ = function.__qualname__ = name
    helps = {each.name: each.option.about for each in declared}
    function.__doc__ = _describe(kind, helps, run)
    function.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=parameters, return_annotation=get_type_hints(run)["return"]
    )
    return function


def _describe(request: type, helps: dict[str, str], run: Callable[..., object]) -> str:
    """Write the documentation of a function."""
    text = (inspect.getdoc(request) or "").partition("\n\nExample:")[0]
    errors = (inspect.getdoc(run) or "").partition("\n\nRaises:\n")[2]
    lines = [text, "", "Args:", *(f"    {name}: {about}" for name, about in helps.items())]
    return "\n".join([*lines, "", "Raises:", errors] if errors else lines)
