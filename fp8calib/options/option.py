"""What an option is: a field of a request, from which the command line and Python take it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any, get_args, get_type_hints


@dataclass(frozen=True, slots=True)
class Option:
    """What the name, the type and the default of a field do not say.

    It stands in the annotation of the field: `Annotated[bool, Option("--force", help="...")]`.
    """

    flags: str = ""
    """As the command line spells it, other spellings behind it; empty: a positional argument."""
    metavar: str | None = None
    help: str = ""
    """For `--help` and `help()`."""
    least: int | None = None
    """The smallest number."""
    most: int | None = None
    """The largest number."""
    parser: Callable[[str], Any] | None = None
    """Reads a value that is no plain number, text or path; raises UsageError."""
    reads: Any = None
    """The type that the command line reads, where the function of Python takes more."""
    collect: Callable[[Any], Any] | None = None
    """Makes the field's value of what the command line read; raises UsageError."""
    negates: bool = False
    """Whether the flag makes the field False, as --no-pack does."""
    is_layout: bool = False
    """Whether it only chooses what a terminal shows: JSON and the function of Python give all."""
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


@dataclass(frozen=True, slots=True)
class Argument:
    """A field that only the function of Python has: a command line cannot express it."""

    help: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """All that is known of one field of a request."""

    name: str
    """The argument of the function."""
    flags: tuple[str, ...]
    """As the command line spells it; empty for a positional argument, and without an option."""
    metavar: str | None
    annotation: Any
    type: str
    """As it is spelled in code."""
    default: Any
    is_required: bool
    least: int | None
    most: int | None
    help: str
    option: Option | None
    """None where only the function has it."""

    @property
    def is_negated(self) -> bool:
        """Whether the flag makes the field False."""
        return self.option is not None and self.option.negates

    @property
    def key(self) -> str:
        """The key of a recipe that it overrides; empty where there is none."""
        return "" if self.option is None else self.option.key

    @property
    def spelled(self) -> str:
        """As messages name it; Python callers read its name instead."""
        return self.flags[0] if self.flags else self.name

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that the metavar lists."""
        words = (self.metavar or "").split("|")
        return tuple(word for word in words if re.fullmatch(r"[a-z][a-z0-9-]*", word))


def list_options(request: type) -> list[Declared]:
    """List the fields of a request, in the order of their declaration."""
    hints = get_type_hints(request, include_extras=True)
    return [_declare(each, *get_args(hints[each.name])) for each in fields(request)]


def _declare(field: Any, annotation: Any, given: Option | Argument) -> Declared:
    option = given if isinstance(given, Option) else None
    has_factory = field.default_factory is not MISSING
    return Declared(
        name=field.name,
        flags=() if option is None else tuple(option.flags.split()),
        metavar=None if option is None else option.metavar,
        annotation=annotation,
        type=_spell(annotation),
        default=field.default_factory() if has_factory else field.default,
        is_required=field.default is MISSING and not has_factory,
        least=None if option is None else option.least,
        most=None if option is None else option.most,
        help=given.help if option is None else option.about,
        option=option,
    )


def _spell(annotation: object) -> str:
    """Spell a type as it is written in code; any sequence does where a list is asked for."""
    text = re.sub(r"\b[a-z_]\w*\.(?=\w)", "", inspect.formatannotation(annotation))
    return text.replace("list[", "Sequence[")
