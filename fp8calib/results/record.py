"""What all results are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from fp8calib.overview import WithOverview
from fp8calib.results import SCHEMA_VERSION


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
    """Sizes in bytes without and with FP8."""

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
