"""Requests: dataclasses whose fields are the options of a command and the arguments of a function.

`cli` makes a command of a request, and `as_function` makes a function of Python.
"""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import (
    TYPE_CHECKING,
    Any,
    ParamSpec,
    Protocol,
    TypeVar,
    cast,
    dataclass_transform,
    get_type_hints,
)

from fp8calib.calibration.progress import Progress
from fp8calib.errors import Fp8CalibWarning, UsageError, join_or, suggest

if TYPE_CHECKING:  # imports pydantic
    from fp8calib.commands.result import RunPlan

P = ParamSpec("P")
REQUIRED = inspect.Parameter.empty
"""In place of a default."""
ClassT = TypeVar("ClassT", bound=type)
RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")
ProgressCallback = Callable[[str, int, int | None], None]
"""Called with the name of a stage, the steps done, and all steps (None: unknown)."""


@dataclass(frozen=True, slots=True)
class Option:
    """An option of the command line, which is an argument of the function of Python too."""

    spelling: str
    """As it is typed: `--model MODEL`; without `--` it is positional. The usual flag comes first.
    Empty for an argument that the function alone has."""
    help: str
    """For `--help` and `help()`."""
    metavar: str = ""
    """What the value is, if the spelling does not say it."""
    choices: tuple[str, ...] = ()
    """All values that it can have; they replace `metavar`."""
    least: int | None = None
    """The smallest number."""
    most: int | None = None
    """The largest number."""
    reads: Any = None
    """The type that the command line reads, where the function of Python takes more."""
    collect: Callable[[Any], Any] | None = None
    """Makes the field's value of what the command line read; raises UsageError."""
    check: Callable[[Any], object] | None = None
    """Refuses an unknown name or a missing file, of several values one at a time, before a command
    imports torch, which takes seconds."""
    negates: bool = False
    """Whether the flag makes the field False, as --no-pack does."""
    key: str = ""
    """The key of a recipe that it overrides, such as data.samples."""
    key_default: Any = None
    """The key's default."""

    name: str = ""
    """The field, and so the argument of the function: this and the rest are filled in."""
    annotation: Any = None
    default: Any = REQUIRED

    @property
    def flags(self) -> tuple[str, ...]:
        """Its spellings on the command line; empty for a positional argument."""
        return tuple(word for word in self.spelling.split() if word.startswith("--"))

    @property
    def value(self) -> str:
        """How `--help` names its value."""
        words = [word for word in self.spelling.split() if not word.startswith("--")]
        return "|".join(self.choices) or self.metavar or " ".join(words)

    @property
    def named(self) -> str:
        """As messages name it, those to callers in Python too."""
        return next(iter(self.flags), self.name)

    @property
    def type(self) -> str:
        """The type of the argument, as it is spelled in code."""
        spelled = re.sub(r"\b[a-z_]\w*\.(?=\w)", "", inspect.formatannotation(self.annotation))
        return spelled.replace("list[", "Sequence[")  # any sequence does for a list

    @property
    def about(self) -> str:
        """The help of the field, whose value False is what the flag of a negated option means."""
        return f"False: {self.help[0].lower()}{self.help[1:]}" if self.negates else self.help

    def read(self, given: Any) -> Any:
        """Make the field's value of what the command line read."""
        if self.negates:
            return False if given else self.default
        return given if given is None or self.collect is None else self.collect(given)

    def check_bounds(self, value: Any) -> None:
        """Refuse an unknown name, and a number outside its bounds; None is not given."""
        wrong = ""
        if value is None:
            return
        if self.least is not None and not value >= self.least:
            wrong = f"must be {self.least} or more"
        elif self.most is not None and not value <= self.most:
            wrong = f"must be {self.most} or less"
        elif self.choices and value not in self.choices:
            wrong = f"must be {join_or(self.choices)}"
        if wrong:
            hint = suggest(str(value), self.choices)
            raise UsageError(f"{self.named} {value}: {wrong}", hint=hint)

    def check_value(self, value: Any) -> None:
        """Refuse the same, and a missing file."""
        self.check_bounds(value)
        if self.check is not None and value is not None:
            for each in value if isinstance(value, list | tuple) else [value]:
                self.check(each)


def option(
    spelling: str | Option, about: str = "", *, default: Any = MISSING, **settings: Any
) -> Any:
    """Make the field of an option, which is given or has these settings; see `Option`."""
    made = spelling if isinstance(spelling, Option) else Option(spelling, about, **settings)
    return field(default=default, metadata={"option": made})


@dataclass_transform(field_specifiers=(option,), frozen_default=True)
def request_class(kind: ClassT) -> ClassT:
    """Make a request of a class whose fields are all an `option`."""
    made: ClassT = dataclass(frozen=True)(kind)  # type: ignore[assignment]
    return made


def list_options(kind: type) -> list[Option]:
    """List the options of a request, as its signature does: positional arguments first."""
    hints = get_type_hints(kind)
    return [
        replace(
            each.metadata["option"],
            name=each.name,
            annotation=hints[each.name],
            default=REQUIRED if each.default is MISSING else each.default,
        )
        for each in sorted(fields(kind), key=lambda each: each.kw_only is True)
    ]


class Reporter(Progress, Protocol):
    """Gets what a command says while it runs; the progress of a run may be any reporter."""

    def say(self, text: str) -> None:
        """Tell what the command does."""

    def warn(self, text: str) -> None:
        """Tell of something that the user should know about the result, once."""


class PythonReporter:
    """Makes Python warnings of what the user should know, and calls back with the progress."""

    def __init__(self, callback: ProgressCallback | None) -> None:
        self._callback = callback
        self._name = ""
        self._total: int | None = None
        self._done = 0
        self._told: set[str] = set()
        self._caller = sys._getframe(2)  # the user's, above the public function
        self._line = self._caller.f_lineno

    def stage(self, name: str, total: int | None, **_more: Any) -> None:
        """Begin a stage of `total` units."""
        self._name, self._total, self._done = name, total, 0
        self.advance(0)

    def advance(self, steps: int) -> None:
        """Advance by `steps`."""
        self._done += steps
        if self._callback is not None:
            self._callback(self._name, self._done, self._total)

    def say(self, text: str) -> None:
        """Drop it: the function's result has what is worth keeping."""

    def warn(self, text: str) -> None:
        """Issue a warning, as of the line that called the public function."""
        if text in self._told:
            return
        self._told.add(text)
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
    kind: Callable[P, RequestT],
    run: Callable[[RequestT, Reporter], ResultT | RunPlan | None],
) -> Callable[P, ResultT]:
    """Make the public function of a command.

    Its arguments are the fields of the request, with their types and defaults, for editors too. Its
    documentation is that of the request and of its fields, and the errors that `run` lists.
    Messages name the options of the command line. In one process, and without `dry_run`, which
    gives a RunPlan, `run` always gives a result.
    """
    options = list_options(cast("type", kind))
    signature = inspect.signature(kind)

    def function(*args: P.args, **kwargs: P.kwargs) -> ResultT:
        made = kind(*args, **kwargs)
        for each in options:
            each.check_bounds(getattr(made, each.name))
        reporter = PythonReporter(getattr(made, "progress", None))
        result = run(made, reporter)
        if failure := getattr(result, "failure", ""):  # a command prints it as its error
            reporter.warn(failure)
        return cast("ResultT", result)

    text = (inspect.getdoc(kind) or "").partition("\n\nExample:")[0]
    errors = (inspect.getdoc(run) or "").partition("\n\nRaises:\n")[2]
    lines = [text, "", "Args:", *(f"    {each.name}: {each.about}" for each in options)]
    types = {each.name: each.type for each in options}
    function.__name__ = function.__qualname__ = name
    function.__doc__ = "\n".join([*lines, "", "Raises:", errors] if errors else lines)
    function.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[
            each.replace(annotation=types[each.name]) for each in signature.parameters.values()
        ],
        return_annotation=get_type_hints(run)["return"],
    )
    return function
