"""Figures of a comparison as text, with their digits: divergences, ratios and shares."""

from __future__ import annotations

import math

_SMALLEST_FIXED_KLD = 0.001


def format_mean_kld(kld: float | None, se: float | None) -> str:
    """Format a mean divergence with its standard error, `?` if that is unknown."""
    return format_kld(kld, se) + (" ± ?" if kld is not None and se is None else "")


def format_kld(kld: float | None, se: float | None = None) -> str:
    """Format a divergence with at least two significant digits; `-` if it is unknown."""
    if kld is None:
        return "-"
    if kld and abs(kld) < _SMALLEST_FIXED_KLD and (not se or se < _SMALLEST_FIXED_KLD / 10):
        return f"{kld:.2e}" + ("" if se is None else f" ± {se:.1e}")
    # With four decimals, or as many as give the standard error one significant digit.
    decimals = min(max(4, -math.floor(math.log10(se))), 9) if se else 4
    return f"{kld:.{decimals}f}" + ("" if se is None else f" ± {se:.{decimals}f}")


def format_db(value: float | None) -> str:
    """Format a ratio in dB; `-` if nothing was lost or the tensor was all zeros."""
    return "-" if value is None else f"{value:.1f}"


def format_ratio(ratio: float, error: float | None) -> str:
    """Format a perplexity ratio with its standard error, `?` if that is unknown."""
    shown = "?" if error is None else f"{error:.4f}"
    return f"{ratio:.3g}" if ratio >= 1e5 else f"{ratio:.4f} ± {shown}"


def format_share(share: float | None) -> str:
    """Format a share; `-` if unknown."""
    return "-" if share is None else f"{share:.2%}"
