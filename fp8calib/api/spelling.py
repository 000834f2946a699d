"""Messages name options as the command line spells them; Python callers read their arguments."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from fp8calib.dialects.fp8.registry import list_written
from fp8calib.dialects.registry import list_format_names
from fp8calib.engines.registry import list_replayed
from fp8calib.errors import Fp8CalibError, names_options
from fp8calib.fp8.formats import FP8_FORMATS
from fp8calib.fp8.schemes import GPTQ, NEAREST, SCHEMES
from fp8calib.model.dtype import DTYPES
from fp8calib.scales.rules import Fallback

_WORDS = {"auto", "cpu", "yes", "no", "kv", "w8a8", GPTQ, NEAREST, *SCHEMES, *DTYPES, *Fallback}
_WORDS |= {*FP8_FORMATS, *list_format_names(), *list_replayed()}
_WORDS |= {dialect.name for dialect in list_written()}
"""Values of options, which a message may put between an option and a verb."""
_OTHER_NAMES = {"format": ("formats", "dialect")}
"""Options whose argument is called otherwise in some function, besides by a plural."""
_OPTION = re.compile(
    r"--(?P<name>[a-z][a-z0-9-]*[a-z0-9])"
    r"(?: (?P<value>[0-9][0-9.]*(?![\w.])|[A-Z][A-Z_,.=/<>|-]*(?![\w])|\S+(?=: )"
    rf"|(?:{'|'.join(sorted(map(re.escape, _WORDS), key=len, reverse=True))})(?![\w-])))?"
)
_COMMAND = re.compile(r"(`[^`]*`)")
"""What is between backticks is a command line, and stays one."""


@dataclass(frozen=True, slots=True)
class _Spelling:
    """How the arguments of a function are spelled."""

    function: str
    parameters: dict[str, inspect.Parameter]

    def spell(self, text: str) -> str:
        """Replace the options in a message by the arguments of the function that has them."""
        parts = _COMMAND.split(text)
        return "".join(
            part if part.startswith("`") else _OPTION.sub(self._spell_option, part)
            for part in parts
        )

    def _spell_option(self, found: re.Match[str]) -> str:
        option, value = found["name"], found["value"]
        if option == "help":
            return f"help({self.function})"
        name, is_negated = self._find(option)
        if name is None:
            return found[0]
        if "bool" in str(self.parameters[name].annotation):
            return f"{name}={not is_negated}{f' {value}' if value else ''}"
        if value is None:
            is_subject = found.string.startswith(":", found.end())
            return name if is_subject else f"{name}="
        is_literal = value[0].isdigit() or value.isupper() or value[0] in "'\""
        if found.start() and not is_literal and value not in _WORDS:
            return f"{name}= {value}"  # a word of the sentence
        return f"{name}={value if is_literal else repr(value)}"

    def _find(self, option: str) -> tuple[str | None, bool]:
        """Find the argument of an option, and whether the option is its negation."""
        plain = option.replace("-", "_")
        for name in (plain, f"{plain}s", *_OTHER_NAMES.get(option, ())):
            if name in self.parameters:
                return name, False
        negated = plain.removeprefix("no_")
        return (negated, True) if negated in self.parameters else (None, False)


_current: ContextVar[_Spelling | None] = ContextVar("spelling", default=None)


@contextmanager
def spelled_for(function: Callable[..., Any], signature: inspect.Signature) -> Iterator[None]:
    """Spell errors and warnings for the caller of a public function, not for another of ours."""
    if names_options.get() or _current.get() is not None:
        yield
        return
    name = f"fp8calib.{function.__qualname__}"
    spelling = _Spelling(name, dict(signature.parameters))
    token = _current.set(spelling)
    try:
        yield
    except Fp8CalibError as error:
        error.message = spelling.spell(error.message)
        error.hint = spelling.spell(error.hint)
        error.args = (error.message,)
        raise
    finally:
        _current.reset(token)


def spell_for_caller(text: str) -> str:
    """Spell a warning for the caller of the public function that runs; else leave it as it is."""
    spelling = _current.get()
    return text if spelling is None else spelling.spell(text)
