"""What `check` says of a file: per engine and layer, what becomes of the k and v scales."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from fp8calib.geometry.model_geometry import ModelGeometry


class Status(StrEnum):
    """What an engine does with a scale."""

    USED = "used"
    """It multiplies by the number the file means."""
    DEFAULTED = "defaulted"
    """It finds no scale, or throws the file away, and uses 1.0."""
    DROPPED = "dropped"
    """It sees the scale, or the file is no form of its own, and does without."""
    MISREAD = "misread"
    """It uses another number than the file means, or one that is no scale."""
    REFUSED = "refused"
    """It does not start."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LoadVerdict(_Frozen):
    """What becomes of one scale."""

    status: Status
    value: float | None = None
    """What the engine multiplies by; None where it does not start, or where it is no number."""
    why: str
    fix: str = ""


class LayerVerdict(_Frozen):
    """What becomes of the scales of one layer."""

    layer: int
    k: LoadVerdict
    v: LoadVerdict

    @property
    def ok(self) -> bool:
        """Whether both scales are used."""
        return self.k.status is Status.USED and self.v.status is Status.USED


class EngineReport(_Frozen):
    """What one engine does with every layer that has a KV cache."""

    layers: tuple[LayerVerdict, ...]
    problems: tuple[str, ...] = ()
    """What the engine swallows or what holds under a condition; it does not count against it."""
    weights: LoadVerdict | None = None
    """What becomes of weights that the engine does not compute with as the file means them."""
    only_on: str = ""
    """The one device where the scales are used as they are meant, though `layers` says misread."""

    @property
    def ok(self) -> bool:
        """Whether every layer gets the scales the file means, and the weights are read right."""
        is_served = bool(self.layers) and all(layer.ok for layer in self.layers)
        return is_served and self.weights is None

    def add_problems(self, *problems: str) -> EngineReport:
        """Give the same report with more problems."""
        return self.model_copy(update={"problems": (*self.problems, *problems)})


class CheckReport(_Frozen):
    """What each engine that was asked for does."""

    engines: Mapping[str, EngineReport]

    @property
    def ok(self) -> bool:
        """Whether every engine gives every layer the scales the file means."""
        return bool(self.engines) and all(report.ok for report in self.engines.values())

    def to_json(self) -> dict[str, object]:
        """Make the object that `check --json` prints."""
        return {
            "ok": self.ok,
            "engines": {
                name: {"ok": report.ok, **report.model_dump(mode="json")}
                for name, report in self.engines.items()
            },
        }


class Refusal(Exception):  # noqa: N818 -- an engine's refusal to start, no error of ours
    """An engine does not start, for a reason, with a mend."""

    def __init__(self, why: str, *, fix: str) -> None:
        super().__init__(why)
        self.why = why
        self.fix = fix


def judge_number(value: float, why: str, *, held: str = "") -> LoadVerdict:
    """Say what an engine's number is worth: finite and above zero, or no scale.

    Args:
        value: what the engine multiplies by.
        why: where it comes from.
        held: another reason why it is not what the file means; empty where it is.
    """
    finite = value if math.isfinite(value) else None
    if finite is None or finite <= 0:
        fault = f"{value:g} is no scale, and the engine takes it as it stands ({why})"
        fix = "calibrate the layer again; a scale is a finite number above zero"
        return LoadVerdict(status=Status.MISREAD, value=finite, why=fault, fix=fix)
    if held:
        fix = "serve it with another engine, or without scales"
        return LoadVerdict(status=Status.MISREAD, value=finite, why=held, fix=fix)
    return LoadVerdict(status=Status.USED, value=finite, why=why)


def report_alike(
    geometry: ModelGeometry, verdict: LoadVerdict, problems: Iterable[str] = ()
) -> EngineReport:
    """Give every layer with a KV cache the same verdict."""
    layers = (
        LayerVerdict(layer=layer.index, k=verdict, v=verdict) for layer, _ in geometry.attentions()
    )
    return EngineReport(layers=tuple(layers), problems=tuple(dict.fromkeys(problems)))


def report_refusal(geometry: ModelGeometry, refusal: Refusal) -> EngineReport:
    """Say of every layer that the engine does not start."""
    verdict = LoadVerdict(status=Status.REFUSED, why=refusal.why, fix=refusal.fix)
    return report_alike(geometry, verdict)
