"""Engines whose source was read once, that are neither replayed nor emulated: a text for each."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import TypeAdapter

from fp8calib.engines.facts.release import FOLDER


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlyRead:
    """What the source of an engine says."""

    title: str
    version: str
    """The releases or the commit that was read."""
    kv_scales: str
    weights: str
    source: str

    @property
    def text(self) -> str:
        """Everything in one line."""
        return (
            f"{self.title} {self.version}: KV scales: {self.kv_scales}; FP8 weights: "
            f"{self.weights} ({self.source})"
        )


_WRITTEN = (FOLDER / "only_read.json").read_bytes()
ONLY_READ = TypeAdapter(dict[str, OnlyRead]).validate_json(_WRITTEN)
"""By the name that `--engine` had for it."""
