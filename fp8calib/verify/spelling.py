"""Numbers in words and tables."""

from __future__ import annotations

_SMALLEST_IN_FULL = 0.001


def spell_kld(kld: float) -> str:
    """Spell a divergence with at least two digits that count, however small it is."""
    if not kld or kld >= _SMALLEST_IN_FULL:
        return f"{kld:.4f}"
    return f"{kld:.2e}"


def spell_error(error: float | None) -> str:
    """Spell the standard error of a ratio; what cannot be known is a question mark."""
    return "?" if error is None else f"{error:.4f}"
