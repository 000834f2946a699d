"""What an option is: a field of a request, from which the command line and Python take it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any, get_args, get_type_hints

from fp8calib.errors import UsageError, join_or, suggest


@dataclass(frozen=True, slots=True)
class Option:
    """What the name, the type and the default of a field do not say.

    It stands in the annotation of the field: `Annotated[bool, Option("--force", help="...")]`.
    """

    flags: str = ""
    """Its spellings on the command line, the usual one first; empty for a positional argument."""
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    """All values that it can have; they replace `metavar`."""
    help: str = ""
    """For `--help` and `help()`."""
    least: int | None = None
    """The smallest number."""
    most: int | None = None
    """The largest number."""
    parser: Callable[[str], Any] | None = None
    """Reads a value that is neither a plain number nor text nor a path; raises UsageError."""
    reads: Any = None
    """The type that the command line reads, where the function of Python takes more."""
    collect: Callable[[Any], Any] | None = None
    """Makes the field's value of what the command line read; raises UsageError."""
    check: Callable[[Any], object] | None = None
    """Refuses an unknown name or a missing file, of several values one at a time, before a command
    imports torch, which takes seconds."""
    negates: bool = False
    """Whether the flag makes the field False, as --no-pack does."""
    is_layout: bool = False
    """Whether it only chooses what a terminal shows: JSON and the function of Python give all."""
    only_in_python: bool = False
    """Whether only the function has it, because a command line cannot express it."""
    about_argument: str = ""
    """The help of the function's argument, where that differs."""
    key: str = ""
    """The key of a recipe that it overrides, such as data.samples."""
    default: Any = None
    """The key's default."""

    @property
    def about(self) -> str:
        """The help of the field, whose value False is what the flag of a negated option means."""
        if self.negates:
            return f"False: {self.help[0].lower()}{self.help[1:]}"
        return self.about_argument or self.help


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A field of a request: an option with the name, the type and the default of the field."""

    name: str
    """The argument of the function."""
    annotation: Any
    type: str
    """As it is spelled in code."""
    default: Any
    is_required: bool
    option: Option

    @property
    def flags(self) -> tuple[str, ...]:
        """Its spellings on the command line; empty for a positional argument."""
        return tuple(self.option.flags.split())

    @property
    def metavar(self) -> str | None:
        """How `--help` names its value."""
        return "|".join(self.option.choices) or self.option.metavar

    @property
    def spelled(self) -> str:
        """As messages name it, those to callers in Python too."""
        return self.flags[0] if self.flags else self.name

    def read(self, given: Any) -> Any:
        """Make the field's value of what the command line read."""
        if self.option.negates:
            return False if given else self.default
        collect = self.option.collect
        return given if given is None or collect is None else collect(given)

    def check_choice(self, value: Any) -> None:
        """Refuse an unknown name, and a number outside its bounds; None is not given.

        Raises:
            UsageError: naming the option.
        """
        least, most, choices = self.option.least, self.option.most, self.option.choices
        wrong = ""
        if value is None:
            return
        if least is not None and not value >= least:
            wrong = f"must be {least} or more"
        elif most is not None and not value <= most:
            wrong = f"must be {most} or less"
        elif choices and value not in choices:
            wrong = f"must be {join_or(choices)}"
        if wrong:
            raise UsageError(f"{self.spelled} {value}: {wrong}", hint=suggest(str(value), choices))

    def check(self, value: Any) -> None:
        """Refuse the same, and a missing file.

        Raises:
            Fp8CalibError: naming the option or the file.
        """
        self.check_choice(value)
        if self.option.check is not None and value is not None:
            for each in value if isinstance(value, list | tuple) else [value]:
                self.option.check(each)


def list_options(request: type) -> list[Declared]:
    """List the fields of a request, as its signature does: positional arguments first."""
    hints = get_type_hints(request, include_extras=True)
    ordered = sorted(fields(request), key=lambda field: field.kw_only is True)
    declared = []
    for field in ordered:
        annotation, option = get_args(hints[field.name])
        spelled = re.sub(r"\b[a-z_]\w*\.(?=\w)", "", inspect.formatannotation(annotation))
        declared.append(
            Declared(
                name=field.name,
                annotation=annotation,
                type=spelled.replace("list[", "Sequence["),  # any sequence does for a list
                default=field.default,
                is_required=field.default is MISSING,
                option=option,
            )
        )
    return declared
