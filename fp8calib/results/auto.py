"""The report of `auto`: its figures, each decision, and what was written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from fp8calib.errors import CANNOT_TELL, VerificationError
from fp8calib.overview import Overview
from fp8calib.results.record import Record, Result
from fp8calib.verification.figures import format_mean_kld
from fp8calib.verification.report import (
    CandidateResult,
    NoiseResult,
    ReferenceResult,
    RunProvenance,
)


class AnsweredQuestion(Record):
    """One question, its answer, and the figures that decided it."""

    question: str
    answer: str
    why: str


class WrittenResult(Record):
    """The checkpoint that was written."""

    name: str
    """Its folder, relative to `out`."""
    scheme: str | None
    """None for an overlay: only the KV cache is FP8."""
    has_kv_scales: bool
    has_query_scales: bool
    unquantized_layers: tuple[int, ...]
    """Of an overlay, those whose KV cache stays in 16 bits."""
    unquantized: tuple[str, ...] = ()
    """Patterns of the linears that stay in 16 bits."""
    layer_schemes: Mapping[str, str] = {}
    """Other schemes, by pattern."""
    serve_options: str = ""
    """The options of the engine that leave these layers of an overlay in 16 bits."""


class Checked(Record):
    """Whether an engine uses what was written, as `check` replays it."""

    version: str
    ok: bool
    why: str
    """Why it cannot load it; empty where it can."""


class Attempt(Record):
    """One combination that was written, read back and judged as a whole."""

    name: str
    """What was combined, in words."""
    verdict: str
    why: str


class Outcome(Record):
    """What was written and how it was judged; nothing passed if `written` is null."""

    written: WrittenResult | None = None
    verified: CandidateResult | None = None
    """The figures of what was written, read back from its files."""
    checked: Mapping[str, Checked] = {}
    serve: str = ""
    """The command that serves it."""
    tried: tuple[Attempt, ...] = ()
    """What was written and did not pass, in order; then the one that did."""
    closest: str = ""
    """Where nothing passes: what came closest."""
    is_unknown: bool = False
    """Nothing passes because there is too little text to tell."""


class AutoResult(Outcome, Result):
    """All results."""

    kind: Literal["auto"] = "auto"
    model: str
    out: str
    gate: str
    engine: str
    engine_version: str
    gpu: str = ""
    """The GPU that serves; empty for any."""
    dtype: str
    device: str
    data: tuple[str, ...] = ()
    seq_len: int
    calibration_tokens: int = 0
    tokens: int
    """Scored tokens of the text that was held out."""
    sequences: int
    reference: ReferenceResult
    noise: NoiseResult | None = None
    """As in the report of `verify`, with `--receipt`."""
    candidates: tuple[CandidateResult, ...]
    """Emulated before anything was written."""
    decisions: tuple[AnsweredQuestion, ...]
    command: str = ""
    provenance: RunProvenance | None = None
    broken: str = ""
    """Why nothing can be told, whatever the text is: the unquantized model knows nothing."""
    warnings: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether something passed, and was written."""
        return self.written is not None

    @property
    def exit_code(self) -> int:
        """8 if nothing passed; 9 if that cannot be told."""
        if self.passed:
            return 0
        return CANNOT_TELL if self.is_unknown else VerificationError.exit_code

    def overview(self) -> Overview:
        """Give the decisions, what was written, and the warnings."""
        found = self.verified
        figures = (
            f"read back: {found.verdict}, KLD {format_mean_kld(found.kld_mean, found.kld_se)}, "
            f"{found.verdict_why}"
            if found
            else f"closest: {self.closest}"
        )
        written = self.written.name if self.written else "nothing is written"
        return Overview(
            f"AutoResult of {self.model} for {self.engine} {self.engine_version}: {written}",
            ("question", "answer", "why"),
            [[each.question, each.answer, each.why] for each in self.decisions],
            [
                figures,
                *([f"serve with: {self.serve}"] if self.serve else []),
                *(f"warning: {text}" for text in self.warnings),
            ],
        )
