"""Commands as functions of Python: the fields of a request are the arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast, get_type_hints

from fp8calib.commands.option import list_options
from fp8calib.commands.run_plan import RunPlan
from fp8calib.jobs.reporter import PythonReporter, Reporter

P = ParamSpec("P")
Request = TypeVar("Request")
Result = TypeVar("Result")


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
            each.check_bounds(given.get(each.name))
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
