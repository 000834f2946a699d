"""Gates: thresholds on a candidate's perplexity, and the verdict they give."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fp8calib.errors import UsageError, format_count
from fp8calib.verification.report import CandidateResult, Verdict
from fp8calib.verification.summary import t_quantile
from fp8calib.verification.tables import format_mean_kld, format_ratio

_LEAST_MARGIN = 0.01
_LEAST_SEQUENCES = 8
"""With fewer, standard errors are imprecise themselves: an interval of 95 % has to decide. The
error of a single sequence comes from its parts, and knows nothing of other texts."""


class Gate(BaseModel):
    """Thresholds on the perplexity ratio; between `pass_at` and `fail_above` it is a warning."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)
    name: str
    pass_at: float
    """Pass at a ratio of at most this."""
    fail_above: float
    kld_fail_above: float | None = Field(default=None, ge=0)
    """Fail at a mean KL divergence (nats) above this by more than a standard error, whatever the
    ratio."""

    @property
    def margin(self) -> float:
        """The largest standard error of the logarithm of a ratio with which the gate can tell."""
        return math.log(self.pass_at) or max(math.log(self.fail_above), _LEAST_MARGIN)

    @model_validator(mode="after")
    def _ordered(self) -> Gate:
        if not 1 <= self.pass_at <= self.fail_above:
            msg = "needs 1 <= pass_at <= fail_above"
            raise ValueError(msg)
        return self


GATES = {
    gate.name: gate
    for gate in (
        Gate(name="kv", pass_at=1.01, fail_above=1.05),
        Gate(name="w8a8", pass_at=1.02, fail_above=1.06),
    )
}
_FILE_HINT = (
    "a gate file holds pass_at and fail_above (perplexity ratios such as 1.01 and 1.05), and "
    "optionally kld_fail_above (in nats)"
)


def load_gate(text: str) -> Gate:
    """Find a gate by name, or read one from a YAML or JSON file."""
    if text in GATES:
        return GATES[text]
    path = Path(text)
    if not os.path.isfile(path):  # noqa: PTH113 -- a Path raises where a name is too long
        raise UsageError(
            f"--gate {text}: neither a gate ({', '.join(GATES)}) nor a file", hint=_FILE_HINT
        )
    try:
        content = path.read_text(encoding="utf-8")
        # 1e-06 is a number in JSON, and a text in PyYAML's YAML 1.1
        found = json.loads(content) if path.suffix == ".json" else yaml.safe_load(content)
        if isinstance(found, dict):
            return Gate.model_validate({"name": path.name, **found})
        why = "not a gate: it holds no thresholds"
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        why = f"{where}: {first['msg'].removeprefix('Value error, ')}"
    except Exception as error:  # noqa: BLE001 -- PyYAML lets many of its constructors' errors through
        why = f"not a gate: {type(error).__name__}: {' '.join(str(error).split())}"
    raise UsageError(f"--gate {text}: {why}", hint=_FILE_HINT)


def judge(summary: CandidateResult, gate: Gate, damage: str = "") -> tuple[Verdict, str]:
    """Give the verdict and the reason.

    The ratio may hide damage: the text may not need what is damaged, and losses may cancel out. A
    destroyed tensor, which `damage` describes, is a failure of its own. Without a threshold of the
    gate's own, a mean divergence above log(`fail_above`) is a warning: on text that the model
    writes itself, the divergence is the logarithm of the ratio.
    """
    found = None if gate.kld_fail_above is None else _judge_kld(summary, gate.kld_fail_above)
    verdict, why = found or _judge_ratio(summary, gate)
    if damage and verdict is not Verdict.FAIL:
        return Verdict.FAIL, f"{why}, but {damage}"
    kld, has_passed = summary.kld_mean, verdict in {Verdict.PASS, Verdict.NO_DIFFERENCE}
    # FP8 itself has a divergence, so a stricter gate on the ratio does not lower the limit
    limit = math.log(max(gate.fail_above, GATES["kv"].fail_above))
    if has_passed and gate.kld_fail_above is None and kld is not None and kld > limit:
        shown = format_mean_kld(kld, summary.kld_se)
        return Verdict.WARN, f"{why}, but the mean KLD is {shown}: the model answers differently"
    return verdict, why


def _judge_kld(summary: CandidateResult, fail_above: float) -> tuple[Verdict, str] | None:
    """Judge the divergence by the gate's own threshold; None if it is not above it."""
    if summary.kld_mean is None:
        return Verdict.CANNOT_TELL, "its KLD, for which the gate has a threshold, is unknown"
    kld = f"mean KLD {format_mean_kld(summary.kld_mean, summary.kld_se)}"
    if summary.num_sequences < _LEAST_SEQUENCES and summary.kld_se is not None:
        width = t_quantile(summary.clusters - 1) * summary.kld_se
        if abs(summary.kld_mean - fail_above) < width:
            return Verdict.CANNOT_TELL, f"{kld} {_ask_for_more(summary)}"
    if summary.kld_mean > fail_above and summary.kld_se is None:
        return Verdict.CANNOT_TELL, f"{kld}, whose error is unknown: use more and other text"
    if summary.kld_mean - (summary.kld_se or 0.0) > fail_above:
        return Verdict.FAIL, f"{kld} is above {fail_above:g} by more than one standard error"
    if summary.kld_mean > fail_above:
        return Verdict.WARN, f"{kld} is within one standard error of {fail_above:g}"
    return None


def _judge_ratio(summary: CandidateResult, gate: Gate) -> tuple[Verdict, str]:
    """Judge the logarithm of the ratio; thresholds are widened by one standard error.

    The error of the logarithm stays meaningful where the ratio is large: a ratio of 500 ± 600 is
    500, up to a factor of 3.3 either way. With an error that is unknown, or larger than the gate's
    margin, only a failure is certain. With fewer than eight sequences, the interval of 95 %
    (Student's t) must not cross a threshold. The error is the larger one of that of the losses and
    that which the KLD implies: the losses of a few tokens may be alike by chance.
    """
    ratio, se = summary.log_ratio, summary.log_ratio_se
    # If x is drawn from p, and q is close to p, log p(x) - log q(x) has a variance of twice
    # KL(p || q).
    implied = math.sqrt(2 * max(summary.kld_mean or 0.0, 0.0) / summary.num_tokens)
    if se is None:
        why = f"ratio {summary.ppl_ratio:.4f}, whose error is unknown: use more and other text"
        return Verdict.CANNOT_TELL, why
    pass_at, fail_above = math.log(gate.pass_at), math.log(gate.fail_above)
    limits = (
        (pass_at, Verdict.PASS, f"is at most {gate.pass_at:g}"),
        (pass_at + se, Verdict.PASS, f"is within one standard error of {gate.pass_at:g}"),
        (fail_above, Verdict.WARN, f"is between {gate.pass_at:g} and {gate.fail_above:g}"),
        (fail_above + se, Verdict.WARN, f"is within one standard error of {gate.fail_above:g}"),
        (math.inf, Verdict.FAIL, f"is above {gate.fail_above:g} by more than one standard error"),
    )
    verdict, why = next((verdict, why) for limit, verdict, why in limits if ratio <= limit)
    if abs(ratio) <= se and abs(ratio) + se <= pass_at:
        verdict, why = Verdict.NO_DIFFERENCE, "is within one standard error of 1"
    error = max(se, implied)
    if error > gate.margin and ratio - error <= fail_above:
        verdict = Verdict.CANNOT_TELL
        why = (
            "is too uncertain: the error of its losses, or that which its KLD implies, is "
            f"{error:.3g}, above the gate's margin of {gate.margin:.3g}: use more text"
        )
    elif summary.num_sequences < _LEAST_SEQUENCES:
        width = max(t_quantile(summary.clusters - 1) * se, implied)
        if any(abs(ratio - limit) < width for limit in (pass_at, fail_above)):
            verdict, why = Verdict.CANNOT_TELL, _ask_for_more(summary)
    return verdict, f"ratio {format_ratio(summary.ppl_ratio, summary.ppl_ratio_se)} {why}"


def _ask_for_more(summary: CandidateResult) -> str:
    return (
        f"rests on {format_count(summary.num_sequences, 'sequence')}: use at least "
        f"{_LEAST_SEQUENCES}, by more text or a smaller --seq-len"
    )
