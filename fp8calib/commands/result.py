"""What commands give: the base of all results, and what several have in common."""

from __future__ import annotations

import textwrap
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from fp8calib.commands import SCHEMA_VERSION
from fp8calib.errors import fit_line

_MOST_ROWS = 9
_MOST_NOTES = 6
_MOST_LINES = 2
"""Lines of a note."""
_MOST_WORD = 20
"""Characters that breaking a line between words may lose."""
_MOST_CHARS = 110
_MOST_CELL_CHARS = 48


@dataclass(frozen=True, slots=True)
class Overview:
    """A title, a small table and a few sentences; what does not fit on a screen is cut."""

    title: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = ()

    def to_text(self) -> str:
        """Render it as at most 25 lines."""
        table = [[*self.columns], *self._cut_rows()] if self.rows else []
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in table
        ]
        return "\n".join(
            [
                _cut(self.title),
                *(f"  {line}" for line in lines),
                *(line for note in self._cut_notes() for line in textwrap.wrap(note, _MOST_CHARS)),
            ]
        )

    def to_html(self) -> str:
        """Render it as a paragraph, a table and a list."""
        head = "".join(f"<th>{escape(column)}</th>" for column in self.columns)
        rows = (
            f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
            for row in self._cut_rows()
        )
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        notes = (f"<p>{escape(note)}</p>" for note in self._cut_notes())
        title = f"<p><b>{escape(_cut(self.title))}</b></p>"
        return f"{title}{table if self.rows else ''}{''.join(notes)}"

    def _cut_rows(self) -> list[list[str]]:
        return [[_cut(cell, _MOST_CELL_CHARS) for cell in row] for row in self.rows[:_MOST_ROWS]]

    def _cut_notes(self) -> list[str]:
        """Give the first notes, and count the other rows and notes."""
        rows, notes = len(self.rows) - _MOST_ROWS, len(self.notes) - _MOST_NOTES
        most = _MOST_LINES * _MOST_CHARS - _MOST_WORD
        return [
            *([f"  and {rows} more"] if rows > 0 else []),
            *(_cut(note, most) for note in self.notes[:_MOST_NOTES]),
            *([f"and {notes} more"] if notes > 0 else []),
        ]


_HIDDEN = {*dir(BaseModel), "overview", "of", "first_keys", "left_out"} - {*dir(object)}


class WithOverview:
    """A result whose `repr` is its overview, and whose `dir` has what users need."""

    __slots__ = ()

    @abstractmethod
    def overview(self) -> Overview:
        """Summarize the result for one screen."""

    def __repr__(self) -> str:
        return self.overview().to_text()

    __str__ = __repr__

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__()} - _HIDDEN)

    def _repr_html_(self) -> str:
        return self.overview().to_html()


def _cut(text: str, most: int = _MOST_CHARS) -> str:
    line = fit_line(text)
    return line if len(line) <= most else f"{line[: most - 4]} ..."


class Record(BaseModel):
    """Values that do not change."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        schema = handler(core_schema)
        optional = {name for name, field in cls.model_fields.items() if field.default is None}
        described = handler.resolve_ref_schema(schema)
        if "required" in described:
            described["required"] = [n for n in described["required"] if n not in optional]
        return schema


class Result(WithOverview, Record):
    """What a command gives: `--json` prints it, and the function of Python returns it."""

    first_keys: ClassVar[tuple[str, ...]] = ()
    """What stands at the top of the JSON object: the answer, before what it rests on."""

    left_out: ClassVar[tuple[str, ...]] = ()
    """The keys that the JSON object lacks where they are None."""

    @property
    def passed(self) -> bool:
        """Whether no check and no gate failed."""
        return True

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        return 0

    def to_json(self) -> dict[str, Any]:
        """Make the object that `--json` prints."""
        absent = {name for name in self.left_out if getattr(self, name) is None}
        found = self.model_dump(mode="json", by_alias=True, exclude=absent)
        common = {"schema_version": SCHEMA_VERSION, "passed": self.passed}
        return {**common, **{key: found[key] for key in self.first_keys}, **found}

    @classmethod
    def from_json(cls, document: Mapping[str, object]) -> Self:
        """Read an object that `to_json` made.

        Raises:
            ValidationError: it is no such object.
        """
        computed = {*cls.model_computed_fields, "schema_version", "passed"}
        return cls.model_validate({k: v for k, v in document.items() if k not in computed})


class BeforeAfter(Record):
    """Sizes in bytes: before and after a command, or without and with FP8."""

    before: int
    after: int


class ShardIndex(Record):
    """Which shard of a run, from 1."""

    index: int
    count: int


class LayerScheme(Record):
    """A pattern that gives linears another scheme, and the number of these linears."""

    pattern: str
    scheme: str
    linears: int


class Failure(Record):
    """What failed and where, and what to do."""

    kind: Literal[
        "usage", "recipe", "model", "data", "calibration", "export", "verification", "server", "bug"
    ]
    message: str
    hint: str


class ErrorResult(Result):
    """The error of a command."""

    error: Failure

    @property
    def passed(self) -> bool:
        """Nothing passed."""
        return False

    def overview(self) -> Overview:
        """Give the message and the hint."""
        return Overview(f"error: {self.error.message}", notes=[f"hint: {self.error.hint}"])


@dataclass(frozen=True, slots=True, kw_only=True)
class FileHash:
    """A file, by what is in it."""

    name: str
    size_bytes: int
    sha256: str


class RunHashes(Record):
    """The files of a run with weights, config, tokenizer, text or scales."""

    model: tuple[FileHash, ...]
    """Those of the unquantized model; empty for one in memory."""
    data: tuple[FileHash, ...]
    """The files of text among `--data`."""
    scales: Mapping[str, tuple[FileHash, ...]]
    """By candidate of `verify`, or by the file or folder that `calibrate` wrote."""


class WrittenCheck(Record):
    """What an engine will do with a written checkpoint."""

    path: str
    """Of the checkpoint, relative to the output folder; `.` for the folder itself."""
    engine: str
    """Its name and release."""
    verdict: str
    """`ok`, `not ok` or `unknown`."""
    summary: str
    """The verdict with the layers that are served, or with the reason."""
    command: str
    """The command that serves it; empty where it is not ok."""

    def __str__(self) -> str:
        return f"{self.engine}: {self.command or self.summary}"


def describe_checks(checks: Sequence[WrittenCheck]) -> Iterator[str]:
    """Give a line for each checkpoint and engine, with the command that serves it."""
    for each in checks:
        where = "" if each.path == "." else f"{each.path}, "
        command = f":\n    {each.command}" if each.command else ""
        yield f"{where}{each.engine}: {each.summary}{command}"


def list_top_level(files: Sequence[str]) -> str:
    """List files and folders, each folder once: `kv-overlay/, stats.safetensors`."""
    names = (f"{name.split('/')[0]}/" if "/" in name else name for name in files)
    return ", ".join(dict.fromkeys(names))


def list_checkpoint(files: Sequence[str]) -> str:
    """List the files of a checkpoint, several shards as one entry."""
    shards = [name for name in files if name.endswith(".safetensors")]
    if len(shards) <= 1:
        return list_top_level(files)
    return list_top_level([f"{len(shards)} shards", *(n for n in files if n not in shards)])
