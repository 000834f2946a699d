"""What all results are made of."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Values that do not change."""

    model_config = ConfigDict(frozen=True, extra="forbid")


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
