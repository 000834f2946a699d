"""What `check` found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import computed_field

from fp8calib.engines.replay.verdicts import CheckReport, EngineReport
from fp8calib.engines.status import Status
from fp8calib.errors import CANNOT_TELL, VerificationError
from fp8calib.overview import Overview
from fp8calib.results.record import Result


class EngineResult(EngineReport):
    """What one engine does with the scales of every layer and with FP8 weights."""

    engine: str
    version: str
    """The release whose rules were replayed."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ok(self) -> bool:
        """Whether scales and weights are used as the file means, and no scale is suspicious."""
        return super().ok

    @computed_field  # type: ignore[prop-decorator]
    @property
    def status(self) -> Status | None:
        """UNKNOWN where only something that cannot be judged keeps the report from being ok."""
        return super().status

    @property
    def verdict(self) -> str:
        """Whether it is ok in words: `ok`, `not ok` or `unknown`."""
        return "ok" if self.ok else self.status or "not ok"

    @property
    def summary(self) -> str:
        """The verdict, with the number of layers whose KV scales are used."""
        if self.loads_without_kv:
            loads = "ok, loads" if self.ok else self.verdict
            return f"{loads}; the KV cache is not quantized (an FP8 cache would use scale 1.0)"
        used = sum(layer.ok for layer in self.layers)
        served = f"{self.verdict}, {used} of {len(self.layers)} layers served"
        if self.status is not Status.UNKNOWN:
            return served
        return f"{served} if the engine loads it" if used else self.verdict

    @property
    def reason(self) -> str:
        """The first reason for which it is not ok; empty where it is."""
        if self.ok:
            return ""
        faults = (each.why for each in self.verdicts if each.status is not Status.USED)
        weights = [self.weights.why] if self.weights is not None else []
        return next(iter((*weights, *self.unknown, *faults, *self.suspicious)), "")


class CheckResult(Result):
    """One report for each engine that was asked for."""

    first_keys: ClassVar = ("ok",)
    engines: Mapping[str, EngineResult]

    @classmethod
    def of(cls, report: CheckReport) -> CheckResult:
        """Name the engine and the release in each report."""
        return cls(
            engines={
                key: EngineResult(
                    engine=key.partition("==")[0], version=report.versions[key], **dict(found)
                )
                for key, found in report.engines.items()
            }
        )

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ok(self) -> bool:
        """Whether the report of every engine is ok."""
        return bool(self.engines) and all(report.ok for report in self.engines.values())

    @property
    def passed(self) -> bool:
        """The same as `ok`."""
        return self.ok

    @property
    def cannot_judge(self) -> bool:
        """Whether the report is not ok only because of what cannot be judged."""
        faults = [each for each in self.engines.values() if not each.ok]
        return bool(faults) and all(each.status is Status.UNKNOWN for each in faults)

    @property
    def verdict(self) -> str:
        """Whether it is ok in words: `ok`, `not ok` or `unknown`."""
        if self.cannot_judge:
            return Status.UNKNOWN
        return "ok" if self.ok else "not ok"

    @property
    def exit_code(self) -> int:
        """8 unless every engine is ok; 9 if only what cannot be judged keeps them from it."""
        if self.cannot_judge:
            return CANNOT_TELL
        return 0 if self.ok else VerificationError.exit_code

    def overview(self) -> Overview:
        """Give the verdict of each engine, and the problems."""
        problems: list[str] = []
        for name, report in self.engines.items():
            found = [f"weights: {report.weights.why}"] if report.weights else []
            found += [*report.suspicious, *report.unknown, *report.problems]
            problems += [f"{name}: {text}" for text in found]
        return Overview(
            f"CheckResult: {self.verdict}",
            ("engine", "release", "verdict", "layers with their KV scales"),
            [
                [
                    report.engine,
                    report.version,
                    report.verdict,
                    f"{sum(layer.ok for layer in report.layers)} of {len(report.layers)}",
                ]
                for report in self.engines.values()
            ],
            problems,
        )
