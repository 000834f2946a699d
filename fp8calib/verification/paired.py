"""Compare two candidates by their KL divergences on the same tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from fp8calib.verification.report import PairedAnswer, PairedResult
from fp8calib.verification.summary import standard_error

MARGIN = 0.1
"""Differences of less than this share of the base's divergence do not matter."""
_TWO_SIDED_95 = 1.959964
_POWER_80 = 0.841621
"""Quantiles of the normal distribution: of 95 %, two-sided, and of 80 %."""
_FEW_DEGREES = {1: 12.7062, 2: 4.3027, 3: 3.1824}
"""Quantiles of t for 95 %, where the expansion in `t_quantile` is not exact enough."""


def compare_paired(
    candidate: str,
    base: str,
    klds: Mapping[str, torch.Tensor],
    lengths: Sequence[int],
    *,
    margin: float | None = None,
) -> PairedResult:
    """Compare `candidate` with `base` by their divergences [N], those of each token paired.

    `lengths` are the tokens of each sequence. The confidence interval of 95 % of the mean
    difference decides: beyond 0, better or worse; inside the margin, no difference. The margin is
    a share of the base's divergence if None is given.
    """
    base_klds = klds[base].double()
    differences = klds[candidate].double() - base_klds
    mean, tokens = float(differences.mean()), len(differences)
    margin = MARGIN * float(base_klds.mean()) if margin is None else margin
    se, clusters = standard_error(differences, lengths)
    answer, more = PairedAnswer.CANNOT_TELL, None
    if se is not None:  # it is for one token, and for the same text over and over
        width = t_quantile(clusters - 1) * se
        if abs(mean) + width <= margin:  # whether 0 is in the interval or not
            answer = PairedAnswer.NO_DIFFERENCE
        elif abs(mean) > width:
            answer = PairedAnswer.BETTER if mean < 0 else PairedAnswer.WORSE
        elif target := max(abs(mean), margin):
            more = math.ceil(tokens * _count_clusters_to_tell(clusters, se / target) / clusters)
    return PairedResult(
        candidate=candidate,
        base=base,
        difference=mean,
        se=se,
        margin=margin,
        answer=answer,
        tokens_to_tell=None if more is None else max(more, tokens + 1),
    )


def _count_clusters_to_tell(clusters: int, relative_se: float) -> int:
    """Count the clusters that show a difference in 80 % of all texts.

    `relative_se` is the standard error from `clusters`, over the difference.
    """
    found = max(2, math.ceil(clusters * ((_TWO_SIDED_95 + _POWER_80) * relative_se) ** 2))
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
