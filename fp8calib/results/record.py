"""What all results are made of."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from fp8calib.checkpoint.json_files import SCHEMA_VERSION
from fp8calib.overview import WithOverview


class Record(BaseModel):
    """Values that do not change. A field with the default None is left out where it is None."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_json(self) -> dict[str, Any]:
        """Give what `--json` prints."""
        absent = {name for name in self._list_optional() if getattr(self, name) is None}
        return self.model_dump(mode="json", exclude=absent)

    @classmethod
    def _list_optional(cls) -> set[str]:
        return {name for name, field in cls.model_fields.items() if field.default is None}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        schema = handler(core_schema)
        described, optional = handler.resolve_ref_schema(schema), cls._list_optional()
        if "required" in described:
            described["required"] = [n for n in described["required"] if n not in optional]
        return schema


class Result(WithOverview, Record):
    """What a command gives: `--json` prints it, and the function of Python returns it."""

    first_keys: ClassVar[tuple[str, ...]] = ()
    """What stands at the top of the JSON object: the answer, before what it rests on."""

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
        found = self.model_dump(mode="json", by_alias=True)
        common = {"schema_version": SCHEMA_VERSION, "passed": self.passed}
        return {**common, **{key: found[key] for key in self.first_keys}, **found}


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
