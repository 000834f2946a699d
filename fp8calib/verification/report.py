"""VerifyReport: the result of a verification, as one JSON object.

Shares are 0..1, KL divergences in nats, SQNR in dB. An unknown number is null, never NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal, Self

from pydantic import Field, computed_field

from fp8calib.model.geometry import Frozen
from fp8calib.numerics.schemes import Granularity

SCALE_ONE = "scale-1.0"
"""The candidate of every report: the KV cache in FP8 without scales."""
LEAST_DB = 15.0
"""Half of the SQNR, in dB, that e4m3 has with a scale that fits."""


class Verdict(StrEnum):
    """The verdict of a gate on a candidate."""

    PASS = "pass"  # noqa: S105 -- of a gate
    WARN = "warn"
    FAIL = "fail"
    NO_DIFFERENCE = "no-difference"
    CANNOT_TELL = "cannot-tell"
    """The ratio's standard error is unknown, or larger than the gate's margin."""


PairedAnswer = Literal["better", "worse", "no-difference", "cannot-tell"]
"""What a paired comparison of two candidates tells; no difference: the confidence interval of the
difference lies inside the margin."""
Remedy = Literal["none", "calibrate", "use", "serve", "scale-query", "find-layers", "check"]
"""What helps after a verification: to use the candidate, to serve the model with an FP8 cache
without scales, to write scales of q too, to find the layers that should stay in 16 bits, or to
check the scales of the candidate's weights, which are wrong."""


class ReferenceResult(Frozen):
    """The unquantized model on the verification text."""

    ppl: float


class NoiseResult(Frozen):
    """How far figures are from those of the same model, run again."""

    tokens: int
    kld: float
    """Half of the mean squared change of a token's log-probability, in nats."""


class PairedResult(Frozen):
    """The mean KL divergence of a candidate minus that of another, on the same tokens."""

    candidate: str
    base: str
    difference: float
    """In nats; below 0 the candidate is better."""
    se: float | None
    """Clustered by sequence; None if unknown."""
    margin: float
    """A difference inside ± this counts as none."""
    answer: PairedAnswer
    tokens_to_tell: int | None = None
    """About how many tokens would tell a difference as large as the margin, in four texts of five;
    None if they do already, or if the standard error is unknown."""


class PositionResult(Frozen):
    """One range of token positions inside their sequences."""

    first: int
    last: int
    """Both inclusive, counted from 0; a token's position is that of the token predicted."""
    tokens: int
    kld_mean: float | None
    kld_se: float | None = None
    ppl_ratio: float


class CandidateResult(Frozen):
    """What a candidate loses on a text; what a server does not give is None."""

    name: str = ""
    description: str = ""
    """What is quantized, in words."""
    ppl: float
    ppl_ratio: float
    ppl_ratio_se: float | None
    """Paired by sequence, or by blocks of tokens where there is only one; None if unknown."""
    kld_mean: float | None
    """For a server, which does not give whole distributions: an estimate or None."""
    kld_se: float | None = None
    """Standard error of the mean, clustered by sequence; None if unknown."""
    kld_median: float | None = None
    kld_p99: float | None = None
    kld_max: float | None = None
    top1_agreement: float | None
    """Share of tokens for which both models give the largest logit to the same token (the first, if
    several are equal)."""
    top1_se: float | None = None
    """Standard error of the agreement, as of independent tokens."""
    top1_ties: float | None = None
    """Share of tokens that do not agree, though the reference's token has a logit equal to the
    largest."""
    verdict: Verdict = Verdict.CANNOT_TELL
    verdict_why: str = ""
    gate: str = ""
    by_position: tuple[PositionResult, ...] = ()
    num_tokens: int = Field(default=0, exclude=True)
    """Only for gates, as are the next four."""
    num_sequences: int = Field(default=0, exclude=True)
    clusters: int = Field(default=0, exclude=True)
    """The independent parts of the text that standard errors rest on (`standard_error`)."""
    log_ratio: float = Field(default=0.0, exclude=True)
    """Logarithm of `ppl_ratio`."""
    log_ratio_se: float | None = Field(default=None, exclude=True)


class RefusedCandidate(Frozen):
    """A candidate that cannot be read or emulated, while others are compared."""

    name: str
    why: str
    hint: str = ""
    """What helps; empty if nothing is known."""

    @property
    def reason(self) -> str:
        """Why it is refused, and what helps."""
        return f"{self.why}; {self.hint}" if self.hint else self.why

    def __str__(self) -> str:
        return f"{self.name} is refused: {self.reason.removeprefix(f'{self.name}: ')}"


class LayerResult(Frozen):
    """What quantization did to one tensor of one candidate."""

    candidate: str
    site: str
    layer: int
    role: Literal["k", "v", "q", "p", "input", "weight"]
    sqnr_db: float | None
    """None if nothing was lost, or the tensor was all zeros."""
    clipped: float
    flushed: float
    """Share of all elements that were not zero and became zero."""
    amax: float
    scale: float | None
    """The largest of several; None for scales that are computed at run time."""
    largest: float | None = None
    """The largest magnitude that `scale` represents; None for weights and dynamic scales."""
    smallest_scale: float | None = None
    """None if there is only one scale, or `scale` is None."""
    scale_per: Granularity | Literal["head"] = Granularity.TENSOR
    """The elements that share one scale."""
    loss_db: float | None = Field(default=None, exclude=True)
    """How much lower the SQNR of a head of K, V or q is than with the fitted scale, at most, on the
    unquantized model's tensor (`MeasurementHooks`); None where the scale was not measured beside a
    fitted one: that of an input or a weight. This and the next are only for judging.

    It leaves out what the text explains: values that no scale of the tensor could keep.
    """
    worst_db: float | None = Field(default=None, exclude=True)
    """The SQNR of that head; None if nothing was lost."""
    lost_clipped: float = Field(default=0.0, exclude=True)
    lost_flushed: float = Field(default=0.0, exclude=True)
    """Shares of the values of that head, beyond those of the fitted scale."""
    clips: bool = Field(default=False, exclude=True)
    """Whether any value clips."""


class RuleResult(Frozen):
    """One scale rule on held-out text; the list is sorted, the smallest divergence first."""

    candidate: str
    rule: str
    ppl_ratio: float
    ppl_ratio_se: float | None
    kld_mean: float
    kld_se: float | None = None
    against_best: PairedResult | None = None
    """Its divergence minus that of the first rule of the list; None for that one."""


class KvNeed(Frozen):
    """Whether the KV cache needs scales: three costs, and the sites that scale 1.0 does not fit.

    A power of two on a scale changes nothing in FP8 until a value clips or becomes zero. So where
    scale 1.0 loses nothing against a fitted power of two, no per-tensor scale gains anything but
    another rounding.
    """

    answer: Literal["yes", "no", "cannot-tell"]
    sites: tuple[str, ...]
    """Sites that lose at scale 1.0, the largest loss first."""
    layers: tuple[int, ...]
    """Their layers."""
    fp8_kld: float
    """What FP8 costs with scales that fit, in nats."""
    fp8_kld_se: float | None
    added_by_one: PairedResult | None
    """Scale 1.0 against scales that fit; None if it loses nothing at any site."""
    removed: tuple[PairedResult, ...]
    """Each candidate with KV scales against scale 1.0."""
    why: str = ""
    """The answer in a sentence."""


class Decision(Frozen):
    """What a verification concludes: the headline, the next command and the exit code follow it."""

    headline: str
    """The answer, in some 20 words."""
    details: str = ""
    """The figures that it rests on, and scales that do not fit: a sentence or two a line."""
    remedy: Remedy = "none"
    candidate: str = ""
    """The candidate that the remedy is for."""


class RunProvenance(Frozen):
    """What a report was made from."""

    date: str
    """UTC, in the form of ISO 8601."""
    command: str
    model_hash: str
    data_hash: str
    versions: Mapping[str, str]
    settings: Mapping[str, Any] = Field(default_factory=dict)
    """The options that decide figures, by the name of the Python argument."""
    numerics: Mapping[str, Any] = Field(default_factory=dict)
    """How the engine computes, where that is not the plain rule."""


class VerifyReport(Frozen):
    """All results."""

    model: str
    engine: str
    engine_version: str
    dtype: str
    device: str
    data: tuple[str, ...]
    tokens: int
    """Scored tokens: every one but the first of each sequence."""
    sequences: int
    seq_len: int
    duration_s: float
    reference: ReferenceResult
    candidates: tuple[CandidateResult, ...]
    refused: tuple[RefusedCandidate, ...] = ()
    """What was asked for and is not among `candidates`."""
    layers: tuple[LayerResult, ...]
    decision: Decision
    kv: KvNeed | None = None
    """Whether KV scales are needed; None where no KV cache is compared with scale 1.0."""
    noise: NoiseResult | None = None
    """What another batch size changes in the unquantized model; None if it was not run."""
    comparisons: tuple[PairedResult, ...] = ()
    """Every candidate with each of its kind (KV scales, or FP8 weights) and with itself in each
    other engine."""
    histograms: Mapping[str, Any] = Field(default_factory=dict, exclude=True)
    """Only for the page, as are the next two: charts of what calibration saw, by site."""
    sequence_klds: Mapping[str, tuple[float, ...]] = Field(default_factory=dict, exclude=True)
    """By candidate: the mean divergence of each sequence, in their order."""
    worst_texts: Any = Field(default=None, exclude=True)
    """A `Table` of texts of the candidate that the decision is about."""
    unusable: tuple[str, ...] = Field(default=(), exclude=True)
    """The candidates that the engine cannot load, or whose KV scales it does not use."""
    has_gate: bool = Field(default=False, exclude=True)
    """Whether a gate was asked for, by which the command fails."""
    is_strict: bool = Field(default=False, exclude=True)
    """Whether a warning is a failure."""
    broken: str = Field(default="", exclude=True)
    """Why nothing can be told; empty if it can."""
    rules: tuple[RuleResult, ...] = ()
    memory: Mapping[str, Any] = {}
    """The memory mode (whole or streamed), its plan, and the measured peak."""
    warnings: tuple[str, ...] = ()
    provenance: RunProvenance | None = None

    def list_rows(self, candidate: str) -> list[LayerResult]:
        """List the rows of `layers` on a candidate, the most damaged tensor first."""
        return [row for row in self.layers if row.candidate == candidate]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def advice(self) -> str:
        """The decision in words, the answer first."""
        return "\n".join(filter(None, (self.decision.headline, self.decision.details)))

    def without_idle(self) -> Self:
        """Leave out scale 1.0 beside FP8 weights alone: it looks like one more choice of theirs."""
        others = {row.candidate for row in self.layers} - {SCALE_ONE}
        if not others or others != {r.candidate for r in self.layers if r.role == "weight"}:
            return self
        kept = {
            "candidates": tuple(one for one in self.candidates if one.name != SCALE_ONE),
            "layers": tuple(row for row in self.layers if row.candidate != SCALE_ONE),
            "sequence_klds": {n: each for n, each in self.sequence_klds.items() if n != SCALE_ONE},
            "comparisons": tuple(pair for pair in self.comparisons if pair.base != SCALE_ONE),
        }
        return self.model_copy(update=kept)
