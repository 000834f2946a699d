"""The errors a user can meet, each with its kind and exit code."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import ClassVar
from unicodedata import category

RESUMABLE = "a later run can continue with what is saved"
"""The note on a KeyboardInterrupt after which `--resume` continues."""
_MAX_MESSAGE = 4000
_MAX_NAME = 200
_CONTROLS = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode's categories of control characters, marks of direction, surrogates and separators."""


class Fp8CalibError(Exception):
    """An error whose message a user can act on.

    Attributes:
        message: what failed and where (file, tensor, layer, line).
        hint: what the user can do; empty when there is nothing to add.
    """

    kind: ClassVar[str] = "bug"
    exit_code: ClassVar[int] = 1
    candidate: str = ""
    """The candidate of a verification that it is about, where that is known."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        self.message = fit_line(message)
        self.hint = fit_line(hint)
        super().__init__(self.message)


def shorten(name: str) -> str:
    """Truncate a name that was read from a file, and escape what cannot be printed.

    A name in a hostile file may be megabytes long or hold a terminal's control sequences.
    """
    return _escape(name[:_MAX_NAME])[:_MAX_NAME]


def cut_list(items: Collection[object], most: int = 8) -> str:
    """List the first `most` items, shortened and escaped, and count the remaining ones."""
    shown = ", ".join(shorten(str(item)) for item in list(items)[:most])
    more = len(items) - most
    return f"{shown} and {more} more" if more > 0 else shown


def suggest(name: str, known: Collection[str], *, what: str = "") -> str:
    """Make the hint for an unknown name: the most similar known ones and, with `what`, all."""
    plain = {each.lower(): each for each in known}
    like = [each for each in plain if name and each.startswith(f"{name.lower()}-")]
    like = [name.lower()] if name.lower() in plain else like
    like = like or get_close_matches(name.lower(), plain, n=1)
    like = like or [each for each in plain if name and name.lower() in each]
    meant = f"did you mean {join_or([plain[each] for each in like])}?" if like else ""
    return " ".join(filter(None, (meant, f"known {what}: {', '.join(known)}" if what else "")))


def join_or(names: Sequence[str]) -> str:
    """Join alternatives: `a, b or c`."""
    return " or ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def format_count(number: int, noun: str) -> str:
    """Count things by a noun whose plural ends in s: `1 row`, `2 rows`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_ranges(indices: Collection[int]) -> str:
    """Format a sorted list as ranges: `0-6, 8, 9, 12-29`; those after the sixth are counted."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    spelled = ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else list(map(str, run)) for run in runs)
    return cut_list([each for run in spelled for each in run], 6)


def name_ranges(indices: Collection[int], noun: str = "layer") -> str:
    """Name numbered things: `layer 3`, `layers 1, 4-9`."""
    return f"{noun}{'s' if len(indices) > 1 else ''} {format_ranges(sorted(indices))}"


def first_line(error: BaseException) -> str:
    """Give the first line of another library's error, or its type if it has no message.

    If that line only counts faults (pydantic), the lines of the first fault are added. A last
    sentence that goes on in the next line is left out.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if "validation error" in lines[0]:
        return " ".join(line.strip() for line in lines[:3])
    first, sign, last = lines[0].strip().rpartition(". ")
    goes_on = bool(sign) and len(lines) > 1 and lines[1][:1].islower()
    return f"{first}." if goes_on and last[-1:].isalnum() else lines[0].strip()


def escape_controls(text: str) -> str:
    """Escape control characters and marks of direction; newlines and tabs stay."""
    if text.isprintable():
        return text
    return "".join(
        ascii(char)[1:-1] if char not in "\n\t" and category(char) in _CONTROLS else char
        for char in text
    )


def fit_line(text: str) -> str:
    """Escape what cannot be printed on one line, and cut the middle out of a very long message."""
    if len(text) > _MAX_MESSAGE:
        half = _MAX_MESSAGE // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return _escape(text)


def _escape(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


class UsageError(Fp8CalibError):
    """The command line is invalid."""

    kind = "usage"
    exit_code = 2


class RecipeError(Fp8CalibError):
    """A recipe file is invalid, or one of its patterns matches nothing."""

    kind = "recipe"
    exit_code = 3


class ModelError(Fp8CalibError):
    """A model, scales or statistics cannot be read, are not supported, or do not fit together."""

    kind = "model"
    exit_code = 4


class UnusableConfigError(ModelError):
    """The model type of a config.json is known, but no model can be built from it."""


class NotUnderstoodError(ModelError):
    """The model can be built, but its layers have no shape that this tool knows."""


def refusal(path: Path, fault: str, *, hint: str = "") -> ModelError:
    """Make the error that names a file and its fault."""
    return ModelError(f"{path}: {fault}", hint=hint)


class DataError(Fp8CalibError):
    """Calibration data cannot be read, or text cannot be tokenized."""

    kind = "data"
    exit_code = 5


class CalibrationError(Fp8CalibError):
    """The forward pass failed, or gave values from which no scale can be computed."""

    kind = "calibration"
    exit_code = 6


class ExportError(Fp8CalibError):
    """Scales or weights cannot be written in the requested format."""

    kind = "export"
    exit_code = 7


class VerificationError(Fp8CalibError):
    """A file or a model failed a check."""

    kind = "verification"
    exit_code = 8


class ServerError(Fp8CalibError):
    """A server cannot be reached, fails, or gives an answer that cannot be used.

    Its exit code is that of a model that cannot be read: nothing was measured, so no gate failed.
    """

    kind = "server"
    exit_code = 4


CANNOT_TELL = 9
"""The exit code of a gate that cannot decide, because there is too little text."""


class Fp8CalibWarning(UserWarning):
    """What a caller of the Python functions should know about a result."""
