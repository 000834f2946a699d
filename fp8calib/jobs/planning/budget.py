"""The budget of a plan: checked, in words, as a limit of a search."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

from fp8calib.errors import UsageError
from fp8calib.requests.plan import PlanRequest, read_size
from fp8calib.verification.planning.search import Budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes beside those of the groups, and those of everything in 16 bits."""

    fixed: int
    unquantized: int


def name_budget(request: PlanRequest) -> str:
    """Name the budget in words."""
    if request.max_bytes is not None:
        share = " of the unquantized bytes" if read_size(request.max_bytes) <= 1 else ""
        return f"least KLD with at most {request.max_bytes}{share}"
    if request.max_ratio is not None:
        return f"least bytes with a perplexity ratio of at most {request.max_ratio:g}"
    return f"least bytes with a KLD of at most {request.max_kld:g}"


def check_budget(request: PlanRequest) -> None:
    """Refuse no budget, several, and impossible ones.

    Raises:
        UsageError: naming the options.
    """
    given = {
        "--max-kld": request.max_kld,
        "--max-ratio": request.max_ratio,
        "--max-bytes": request.max_bytes,
    }
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        what = " and ".join(named) or "no budget"
        raise UsageError(
            f"{what}: give one of {', '.join(given)}",
            hint="a loss, for which the least bytes are found, or bytes, for the least loss",
        )
    if request.max_kld is not None and request.max_kld <= 0:
        raise UsageError(f"--max-kld {request.max_kld}: must be above 0")
    if request.max_ratio is not None and request.max_ratio <= 1:
        raise UsageError(f"--max-ratio {request.max_ratio}: must be above 1")


def find_limit(request: PlanRequest, sizes: Sizes) -> float:
    """Give the limit of the budget: bytes, a divergence, or a ratio."""
    if request.max_bytes is not None:
        size = read_size(request.max_bytes)
        return size * sizes.unquantized if size <= 1 else size
    return cast("float", request.max_kld if request.max_ratio is None else request.max_ratio)


def make_budget(request: PlanRequest, sizes: Sizes) -> Budget:
    """Make the limit of the search from that of the request."""
    limit = find_limit(request, sizes)
    if request.max_bytes is not None:
        return Budget(most_bytes=limit - sizes.fixed)
    if request.max_kld is not None:
        return Budget(most_kld=limit)
    return Budget(most_log_ratio=math.log(limit))
