"""VerifyReport: the result of a verification, as one JSON object.

Shares are 0..1, KL divergences in nats, SQNR in dB. An unknown number is null, never NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from fp8calib.fp8.schemes import Granularity
from fp8calib.verification.server_result import ServerResult

SCALE_ONE = "scale-1.0"
"""The candidate of every report: the KV cache in FP8 without scales."""
SERVER = "server"
"""The candidate that runs behind `--server`."""


class Verdict(StrEnum):
    """The verdict of a gate on a candidate."""

    PASS = "pass"  # noqa: S105 -- of a gate
    WARN = "warn"
    FAIL = "fail"
    NO_DIFFERENCE = "no-difference"
    CANNOT_TELL = "cannot-tell"
    """The ratio's standard error is unknown, or larger than the gate's margin."""


class Remedy(StrEnum):
    """What helps after a verification."""

    NONE = "none"
    CALIBRATE = "calibrate"
    USE = "use"
    """Serve the candidate."""
    SERVE = "serve"
    """Serve the model with an FP8 cache, without scales."""
    SCALE_QUERY = "scale-query"
    """Write scales of q too."""
    FIND_LAYERS = "find-layers"
    """Find the layers that should stay unquantized, or whose KV cache should."""


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
    kld_mean: float | None
    ppl_ratio: float


class CandidateResult(_Model):
    """One candidate beside the unquantized model."""

    name: str
    description: str
    """What is quantized, in words."""
    ppl: float
    ppl_ratio: float
    ppl_ratio_se: float | None
    """Paired by sequence, or by blocks of tokens where there is only one; None if unknown."""
    kld_mean: float | None
    """Of a server, which does not give whole distributions, estimated or None."""
    kld_median: float | None
    kld_p99: float | None
    kld_max: float | None
    top1_agreement: float | None
    """Share of tokens whose largest logit is that of the same token; of equal ones the first."""
    top1_ties: float | None = 0.0
    """Share of tokens where it is not, but the reference's token has an equal logit."""
    verdict: Verdict
    verdict_why: str
    gate: str
    by_position: tuple[PositionResult, ...]


class LayerResult(_Model):
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
    smallest_scale: float | None = None
    """None if there is only one scale, or `scale` is None."""
    scale_per: Granularity | Literal["head"] = Granularity.TENSOR
    """The elements that share one scale."""


class DiagnosisResult(_Model):
    """What K or V of one layer would lose with three kinds of scales, on the reference's tensors.

    `scaled`: the per-tensor scales of the first candidate with KV scales; `per_head`: its per-head
    scales, if known.
    """

    site: str
    layer: int
    unscaled_db: float | None
    unscaled_clipped: float
    unscaled_flushed: float
    scaled_db: float | None
    per_head_db: float | None
    calibration_clipped: float | None = None
    """Share that clips at scale 1.0, by the log2 histogram of the statistics; None without one."""


class HistogramResult(_Model):
    """Magnitudes that calibration observed at one site, with the range of its scale."""

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
    """Leaves these layers unquantized: the engine's flag, or `--ignore` of `fp8calib quantize`.

    Empty without one.
    """


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
    """value / reference; None if less is better, or the reference is not above 0."""
    num_documents: int | None = None


class TaskSetup(_Model):
    """How lm-evaluation-harness was run."""

    harness_version: str
    add_bos_token: bool
    """Whether every text began with the tokenizer's BOS."""
    bos_token: str | None
    limit: int | None
    """Maximum number of documents of each task."""


class RunProvenance(_Model):
    """What a report was made from."""

    date: str
    """UTC, in the form of ISO 8601."""
    command: str
    model_hash: str
    data_hash: str
    versions: Mapping[str, str]


class VerifyReport(_Model):
    """All results; `advice` names the scales that do not fit, and ends with the conclusion."""

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
    conclusion: str = ""
    """The end of the advice: what to do. Empty in older reports."""
    remedy: Remedy = Remedy.NONE
    remedy_for: str = ""
    """The candidate that the remedy is for."""
    diagnosis: tuple[DiagnosisResult, ...] = ()
    diagnosis_of: str = ""
    """The candidate whose scales the diagnosis compares with 1.0; empty without one."""
    histograms: tuple[HistogramResult, ...] = ()
    sensitivity: Sensitivity | None = None
    rules: tuple[RuleResult, ...] = ()
    tasks: tuple[TaskResult, ...] = ()
    task_setup: TaskSetup | None = None
    server: ServerResult | None = None
    memory: Mapping[str, Any] = {}
    """The memory mode (whole or streamed), its plan, and the measured peak."""
    warnings: tuple[str, ...] = ()
    provenance: RunProvenance | None = None

    @property
    def judged(self) -> tuple[Verdict, ...]:
        """The verdicts on the candidates that were asked for; without any, that on scale 1.0."""
        asked = [each.verdict for each in self.candidates if each.name != SCALE_ONE]
        return tuple(asked or (each.verdict for each in self.candidates))

    @property
    def passed(self) -> bool:
        """Whether no verdict in `judged` is `fail` or `cannot-tell`."""
        return not {Verdict.FAIL, Verdict.CANNOT_TELL}.intersection(self.judged)


_SMALLEST_FIXED_KLD = 0.001


def format_kld(kld: float | None) -> str:
    """Format a divergence with at least two significant digits; `-` if it is unknown."""
    if kld is None:
        return "-"
    if not kld or kld >= _SMALLEST_FIXED_KLD:
        return f"{kld:.4f}"
    return f"{kld:.2e}"


def format_error(error: float | None) -> str:
    """Format the standard error of a ratio; `?` if it is unknown."""
    return "?" if error is None else f"{error:.4f}"


def format_db(value: float | None) -> str:
    """Format a ratio in dB; `-` if nothing was lost or the tensor was all zeros."""
    return "-" if value is None else f"{value:.1f}"
