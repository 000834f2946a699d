"""Reduce per-token scores to the numbers of a report, with standard errors, and compare them."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence

import torch

from fp8calib.verification.report import CandidateResult, PairedAnswer, PairedResult, PositionResult
from fp8calib.verification.token_scores import TokenScores, select_lengths, split_sequences

MIN_CLUSTERS = 2
"""With fewer clusters than this the standard error is unknown."""
MARGIN = 0.1
"""Differences of less than this share of the base's divergence do not matter."""
_TWO_SIDED_95 = 1.959964
_POWER_80 = 0.841621
"""Quantiles of the normal distribution: of 95 %, two-sided, and of 80 %."""
_FEW_DEGREES = {1: 12.7062, 2: 4.3027, 3: 3.1824}
"""Quantiles of t for 95 %, where the expansion in `t_quantile` is not exact enough."""


def summarize(
    scores: TokenScores, reference: TokenScores, lengths: Sequence[int]
) -> CandidateResult:
    """Reduce the scores of a candidate; `lengths` are the tokens of each sequence."""
    klds = scores.klds.double()
    ranked = klds.sort().values  # the p-quantile: at least a share p is not larger
    return summarize_logprobs(
        scores.logprobs,
        reference.logprobs,
        lengths,
        agrees=scores.agrees,
        kld=average(klds, lengths),
        kld_median=float(ranked[math.ceil(len(klds) / 2) - 1]),
        kld_p99=float(ranked[math.ceil(0.99 * len(klds)) - 1]),
        kld_max=float(ranked[-1]),
        top1_ties=float(scores.ties.double().mean()),
    )


def summarize_logprobs(
    logprobs: torch.Tensor,
    reference: torch.Tensor,
    lengths: Sequence[int],
    *,
    agrees: torch.Tensor | None,
    kld: tuple[float | None, float | None],
    **more: float,
) -> CandidateResult:
    """Reduce log-probabilities [N], which are all that a server gives.

    `kld` is the mean divergence and its standard error; `more` are other fields.
    """
    losses, tokens = (reference - logprobs).double(), len(logprobs)
    se, clusters = standard_error(losses, lengths)
    ratio = bounded_exp(float(losses.mean()))
    share = None if agrees is None else float(agrees.double().mean())
    return CandidateResult(
        num_tokens=tokens,
        num_sequences=len(lengths),
        clusters=clusters,
        ppl=compute_ppl(logprobs),
        log_ratio=float(losses.mean()),
        log_ratio_se=se,
        ppl_ratio=ratio,
        ppl_ratio_se=None if se is None else min(ratio * se, sys.float_info.max),
        kld_mean=kld[0],
        kld_se=kld[1],
        top1_agreement=share,
        top1_se=None if share is None else math.sqrt(share * (1 - share) / tokens),
        **more,
    )


def compute_ppl(logprobs: torch.Tensor) -> float:
    """Give the perplexity of log-probabilities [N]: exp of the mean negative one."""
    return bounded_exp(-float(logprobs.double().mean()))


def average(values: torch.Tensor, lengths: Sequence[int]) -> tuple[float, float | None]:
    """Give the mean of per-token values [N], and its `standard_error`."""
    exact = values.double()
    return float(exact.mean()), standard_error(exact, lengths)[0]


def standard_error(losses: torch.Tensor, lengths: Sequence[int]) -> tuple[float | None, int]:
    """Give the standard error of the mean of `losses` [N], and the clusters it rests on.

    Sequences are the clusters. The mean is a ratio of two sums over sequences (losses and tokens),
    so its variance is that of the residuals of the sequences' sums (Cochran, Sampling Techniques,
    6.3). A single sequence is cut into about sqrt(tokens) blocks, since neighbouring tokens are not
    independent.

    The error is None if it is unknown: there is only one token, or the losses of all sequences are
    the same and not zero (the same text over and over).
    """
    parts, tokens = list(split_sequences(losses, lengths)), len(losses)
    if len(parts) < MIN_CLUSTERS:
        blocks = min(tokens, max(MIN_CLUSTERS, math.isqrt(tokens)))
        parts = list(torch.tensor_split(losses, blocks))
    clusters = len(parts)
    if clusters < MIN_CLUSTERS:
        return None, clusters
    mean = float(losses.mean())
    residuals = torch.stack([part.sum() - mean * len(part) for part in parts])
    variance = float(residuals.square().sum()) * clusters / (clusters - 1)
    return None if mean and not variance else math.sqrt(variance) / tokens, clusters


def summarize_positions(
    logprobs: torch.Tensor,
    reference: torch.Tensor,
    lengths: Sequence[int],
    klds: torch.Tensor | None = None,
) -> tuple[PositionResult, ...]:
    """Split log-probabilities and divergences [N] by position, in ranges that double: 1, 2-3...

    The divergences of a server are unknown: None.
    """
    losses = (reference - logprobs).double()
    positions = torch.cat([torch.arange(1, length) for length in lengths])
    octaves = positions.double().log2().floor().long()
    results = []
    for octave in range(int(octaves.max()) + 1):
        chosen = octaves == octave
        parts = select_lengths(chosen, lengths)
        kld = (None, None) if klds is None else average(klds[chosen], parts)
        results.append(
            PositionResult(
                first=2**octave,
                last=min(2 ** (octave + 1) - 1, int(positions.max())),
                tokens=int(chosen.sum()),
                kld_mean=kld[0],
                kld_se=kld[1],
                ppl_ratio=bounded_exp(float(losses[chosen].mean())),
            )
        )
    return tuple(results)


def bounded_exp(x: float) -> float:
    """Exponentiate; on overflow give the largest fp64 number."""
    try:
        return math.exp(x)
    except OverflowError:
        return sys.float_info.max


# --- two candidates -------------------------------------------------------------------------------


def compare_paired(
    candidate: str,
    base: str,
    klds: Mapping[str, torch.Tensor],
    lengths: Sequence[int],
    *,
    margin: float | None = None,
) -> PairedResult:
    """Compare `candidate` with `base` by their divergences [N], paired token by token.

    `lengths` are the tokens of each sequence. The confidence interval of 95 % of the mean
    difference decides: beyond 0, better or worse; inside the margin, no difference. The margin is
    a share of the base's divergence if None is given.
    """
    base_klds = klds[base].double()
    differences = klds[candidate].double() - base_klds
    mean, tokens = float(differences.mean()), len(differences)
    margin = MARGIN * float(base_klds.mean()) if margin is None else margin
    se, clusters = standard_error(differences, lengths)
    answer: PairedAnswer = "cannot-tell"
    more = None
    if se is not None:  # it is None for one token, and for the same text over and over
        width = t_quantile(clusters - 1) * se
        if abs(mean) + width <= margin:  # whether 0 is in the interval or not
            answer = "no-difference"
        elif abs(mean) > width:
            answer = "better" if mean < 0 else "worse"
        elif target := max(abs(mean), margin):
            more = math.ceil(tokens * _count_clusters_to_tell(clusters, se / target) / clusters)
    return PairedResult(
        candidate=candidate,
        base=base,
        difference=mean,
        se=se,
        margin=margin,
        answer=answer,
        tokens_to_tell=more,
    )


def _count_clusters_to_tell(clusters: int, relative_se: float) -> int:
    """Count the clusters that are needed to show a difference with a power of 80 %.

    `relative_se` is the standard error from `clusters`, over the difference.
    """
    found = max(
        clusters + 1, math.ceil(clusters * ((_TWO_SIDED_95 + _POWER_80) * relative_se) ** 2)
    )
    while (t_quantile(found - 1) + _POWER_80) * relative_se * math.sqrt(clusters / found) > 1:
        found += 1
    return found


def t_quantile(degrees: int) -> float:
    """Give the two-sided 95 % quantile of Student's t.

    The expansion in 1 / degrees is in Abramowitz and Stegun, 26.7.5; its error is below 0.01 from
    four degrees of freedom on.
    """
    if degrees in _FEW_DEGREES:
        return _FEW_DEGREES[degrees]
    z = _TWO_SIDED_95
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + math.fsum(term / degrees**power for power, term in enumerate(terms, start=1))
