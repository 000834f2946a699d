"""Messages name options as the command line spells them; Python callers read their arguments."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

from fp8calib.engines.registry import list_emulated, list_replayed
from fp8calib.errors import Fp8CalibError, names_options
from fp8calib.options.option import Declared, list_options
from fp8calib.requests import find_request, list_commands


@cache
def _list_words() -> frozenset[str]:
    """List the values of options, which a message may put between an option and a verb."""
    declared = (each for name in list_commands() for each in list_options(find_request(name)))
    return frozenset({*list_replayed(), *list_emulated()}).union(*(each.words for each in declared))


@cache
def _find_options() -> re.Pattern[str]:
    words = sorted(map(re.escape, _list_words()), key=len, reverse=True)
    return re.compile(
        r"--(?P<name>[a-z][a-z0-9-]*[a-z0-9])"
        r"(?: (?P<value>'[^']*'|-?[0-9][0-9.]*(?![\w.])|[A-Z][A-Z_,.=/<>|-]*(?![\w])|\S+(?=: )"
        rf"|(?:{'|'.join(words)})(?:==[\w.]*\w)?(?![\w-])))?"
    )


_COMMAND = re.compile(r"(`[^`]*`)")
"""What is between backticks is a command line: one of ours becomes a call, others stay."""


_OF_AN_ENGINE = re.compile(r"--kv-cache-dtype (?:fp8|auto|says)\b")
"""Where an option is an engine's: `verify` has one of that name, which compares with FP8."""


@dataclass(frozen=True, slots=True)
class _Named:
    """The argument of an option."""

    name: str
    is_flag: bool
    is_negated: bool = False
    """Whether the option makes it False."""
    is_mapping: bool = False
    """Whether it is a mapping, which options spell KEY=VALUE."""


@dataclass(frozen=True, slots=True)
class _Spelling:
    """How the arguments of a function are spelled."""

    function: str
    named: Mapping[str, _Named]
    """Its arguments by options, such as `seq-len`."""

    def spell(self, text: str) -> str:
        """Replace the options in a message by the arguments of the function that has them."""
        parts = _COMMAND.split(text)
        return "".join(
            _spell_command(part)
            if part.startswith("`")
            else _find_options().sub(self._spell_option, part)
            for part in parts
        )

    def _spell_option(self, found: re.Match[str]) -> str:
        option, value = found["name"], found["value"]
        if option == "help":
            return f"help({self.function})"
        argument = self.named.get(option)
        if argument is None or _OF_AN_ENGINE.match(found.string, found.start()):
            return found[0]
        name = argument.name
        if argument.is_flag:
            return f"{name}={not argument.is_negated}{f' {value}' if value else ''}"
        if value is None:
            is_subject = found.string.startswith(":", found.end())
            return name if is_subject else f"{name}="
        if argument.is_mapping and "=" in value:
            key, _, held = value.strip("'").rpartition("=")
            value = f"{{{_spell_value(key)}: {_spell_value(held)}}}"
        is_literal = value.lstrip("-")[:1].isdigit() or value.isupper() or value[0] in "'\"{"
        if found.start() and not is_literal and value.partition("==")[0] not in _list_words():
            return f"{name}= {value}"  # a word of the sentence
        return f"{name}={value if is_literal else repr(value)}"


def _spell_command(quoted: str) -> str:
    """Spell a command line of ours between backticks as the function, called if it has arguments.

    Options that the function lacks, such as --json, are left out.
    """
    program, *words = quoted.strip("`").split(" ", 2)
    command = words[0].replace("-", "_") if words else ""
    if program != "fp8calib" or command not in list_commands():
        return quoted
    declared = list_options(find_request(command))
    arguments = list(_spell_arguments(iter(shlex.split(" ".join(words[1:]))), declared))
    called = f"({', '.join(arguments)})" if arguments else ""
    return f"`fp8calib.{command}{called}`"


def _spell_arguments(words: Iterator[str], declared: Sequence[Declared]) -> Iterator[str]:
    named = {flag: each for each in declared for flag in each.flags}
    for word in words:
        option = named.get(word)
        if option is not None and "bool" in option.type:
            yield f"{option.name}={not option.option.negates}"
        elif option is not None:
            value = next(words, "")
            yield f"{option.name}={_spell_value(value)}"
        elif not word.startswith("--"):
            yield _spell_value(word)


def _spell_value(word: str) -> str:
    """Spell a value as Python does; a placeholder such as MODEL, or `...`, stays."""
    return word if word == "..." or word.isupper() or word.isdigit() else repr(word)


_current: ContextVar[_Spelling | None] = ContextVar("spelling", default=None)


def spell_for_request(function: str, declared: Sequence[Declared], text: str) -> str:
    """Spell a text about a request for the caller of the function that is made of it."""
    return _make_spelling(function, declared).spell(text)


def spelled_for_request(
    function: str, declared: Sequence[Declared]
) -> AbstractContextManager[None]:
    """Spell errors and warnings for the caller of the function that is made of a request."""
    return _spelled(_make_spelling(function, declared))


def _make_spelling(function: str, declared: Sequence[Declared]) -> _Spelling:
    named = {
        flag.removeprefix("--"): _Named(
            each.name, "bool" in each.type, each.option.negates, "Mapping" in each.type
        )
        for each in declared
        for part in each.flags
        for flag in part.split("/")
    }
    return _Spelling(function, named)


def spelled_for_signature(
    function: str, parameters: Mapping[str, inspect.Parameter]
) -> AbstractContextManager[None]:
    """Spell them for the caller of a function that no request describes."""
    named = {
        name.replace("_", "-"): _Named(name, "bool" in str(each.annotation))
        for name, each in parameters.items()
    }
    return _spelled(_Spelling(function, named))


@contextmanager
def _spelled(spelling: _Spelling) -> Iterator[None]:
    """Spell for the function that the user called, not for another of ours below it."""
    if names_options.get() or _current.get() is not None:
        yield
        return
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
