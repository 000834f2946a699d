"""What all results are made of."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from fp8calib.checkpoint.json_files import SCHEMA_VERSION
from fp8calib.overview import WithOverview


class Record(BaseModel):
    """Values that do not change."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Result(WithOverview, Record):
    """What a command gives: `--json` prints it, and the function of Python returns it."""

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
        common = {"schema_version": SCHEMA_VERSION, "passed": self.passed}
        return {**common, **self.model_dump(mode="json", by_alias=True)}


class BeforeAfter(Record):
    """Sizes in bytes without and with FP8."""

    before: int
    after: int
