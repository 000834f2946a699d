"""VerifyReport: how good it is, as one JSON object.

Shares are 0..1, KL divergences in nats, SQNR in dB. A number that cannot be had is null, never NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from fp8calib.fp8.schemes import Granularity

SCALE_ONE = "scale-1.0"
"""The candidate that is always there: the KV cache in FP8 without scales."""


class Verdict(StrEnum):
    """What a gate says of a candidate."""

    PASS = "pass"  # noqa: S105 -- of a gate
    WARN = "warn"
    FAIL = "fail"
    NO_DIFFERENCE = "no-difference"


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ReferenceResult(_Model):
    """The unquantized model on the verification text."""

    ppl: float


class PositionResult(_Model):
    """One range of token positions inside their sequences."""

    first: int
    last: int
    """Both inclusive, counted from 0; a token's position is that of the token predicted."""
    tokens: int
    kld_mean: float
    ppl_ratio: float


class CandidateResult(_Model):
    """One candidate beside the unquantized model."""

    name: str
    description: str
    """What is quantized, in words."""
    ppl: float
    ppl_ratio: float
    ppl_ratio_se: float | None
    """Paired, by sequence; by blocks of tokens where there is one sequence only; None where it
    cannot be known."""
    kld_mean: float
    kld_median: float
    kld_p99: float
    kld_max: float
    top1_agreement: float
    verdict: Verdict
    verdict_why: str
    gate: str
    by_position: tuple[PositionResult, ...]


class LayerResult(_Model):
    """What quantization did to one tensor of one candidate."""

    candidate: str
    site: str
    layer: int
    role: Literal["k", "v", "q", "input", "weight"]
    sqnr_db: float | None
    """None where nothing was lost, or the tensor was all zeros."""
    clipped: float
    flushed: float
    """Share of all elements that became zero and were none."""
    amax: float
    scale: float | None
    """The largest one where there are several; None where they are computed while it runs."""
    smallest_scale: float | None = None
    """None where there is one scale, or `scale` is None."""
    scale_per: Granularity | Literal["head"] = Granularity.TENSOR
    """What shares one scale."""


class DiagnosisResult(_Model):
    """What K or V of one layer would lose under three kinds of scales, on the reference's tensors.

    `scaled` is per tensor by the first candidate that has KV scales, `per_head` its per-head
    scales where they are known.
    """

    site: str
    layer: int
    unscaled_db: float | None
    unscaled_clipped: float
    unscaled_flushed: float
    scaled_db: float | None
    per_head_db: float | None
    calibration_clipped: float | None = None
    """Share that clips at scale 1.0 by the log2 histogram of the statistics; None without any."""


class HistogramResult(_Model):
    """Magnitudes seen in calibration at one site, with the range a scale leaves."""

    site: str
    layer: int
    lower_edges_log2: tuple[float, ...]
    """Lower edge of each bin, as log2 |x|; the bins are 1/8 octave wide."""
    counts: tuple[int, ...]
    scale: float
    largest: float
    """scale * fmt.max: above this, values clip."""
    smallest: float
    """scale * smallest subnormal / 2: below this, values flush to zero."""


class SensitivityResult(_Model):
    """One layer quantized at a time."""

    layer: int
    kld_mean: float
    ppl_ratio: float


class Sensitivity(_Model):
    """Which layers are worth leaving unquantized."""

    candidate: str
    sequences: int
    layers: tuple[SensitivityResult, ...]
    skip_layers: tuple[int, ...]
    flag: str
    """The engine's own flag; empty when no layer stands out."""


class RuleResult(_Model):
    """One scale rule on held-out text; the list is sorted, best first."""

    candidate: str
    rule: str
    ppl_ratio: float
    ppl_ratio_se: float | None
    kld_mean: float


class TaskResult(_Model):
    """One metric of one lm-evaluation-harness task, on the reference and on a candidate."""

    candidate: str
    task: str
    metric: str
    reference: float
    reference_se: float | None
    value: float
    value_se: float | None
    recovery_percent: float | None
    """value / reference; None where less is better, or the reference is not above 0."""
    num_documents: int | None = None


class TaskSetup(_Model):
    """How lm-evaluation-harness was run."""

    harness_version: str
    add_bos_token: bool
    """Whether every text began with the tokenizer's BOS; true wherever it has one."""
    bos_token: str | None
    limit: int | None
    """Documents of each task, at most."""


class VerifyReport(_Model):
    """Everything that was found; `advice` says it in a sentence."""

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
    layers: tuple[LayerResult, ...]
    advice: str
    diagnosis: tuple[DiagnosisResult, ...] = ()
    diagnosis_of: str = ""
    """The candidate whose scales the diagnosis compares with 1.0; empty where none has any."""
    histograms: tuple[HistogramResult, ...] = ()
    sensitivity: Sensitivity | None = None
    rules: tuple[RuleResult, ...] = ()
    tasks: tuple[TaskResult, ...] = ()
    task_setup: TaskSetup | None = None
    memory: Mapping[str, Any] = {}
    """How the model was held in memory (whole or streamed), what was planned, and the peak."""
    warnings: tuple[str, ...] = ()


_SMALLEST_IN_FULL = 0.001


def spell_kld(kld: float) -> str:
    """Spell a divergence with at least two digits that count, however small it is."""
    if not kld or kld >= _SMALLEST_IN_FULL:
        return f"{kld:.4f}"
    return f"{kld:.2e}"


def spell_error(error: float | None) -> str:
    """Spell the standard error of a ratio; what cannot be known is a question mark."""
    return "?" if error is None else f"{error:.4f}"
