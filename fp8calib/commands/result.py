"""What commands give: the base of all results, and what several have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from fp8calib.commands import SCHEMA_VERSION
from fp8calib.overview import Overview, WithOverview


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
