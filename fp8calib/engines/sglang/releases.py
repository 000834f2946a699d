"""The releases of SGLang whose rules are known: 0.5.1 to 0.5.23; 0.5.0 has no final release.

What differs is stated where the rule is, by the number of the release that changed it. The
functions that the rules cite were compared between neighbours, each in the wheel of its last patch.
What models do with the names of scales was found by running their loaders on names.
"""

from __future__ import annotations

from dataclasses import dataclass

_FIRST, _NEWEST = 1, 23


@dataclass(frozen=True, slots=True, order=True)
class Release:
    """A release 0.5.N with all its patches."""

    number: int
    """N."""

    @property
    def version(self) -> str:
        """The version."""
        return f"0.5.{self.number}"

    @property
    def title(self) -> str:
        """Its name in messages."""
        return f"SGLang {self.version}"


EXPERTS_NARROWED_SINCE = 17
"""The first release in which a smaller tensor fills a part of an expert's; before, a tensor that is
longer along the axis that ranks split is cut (`fused_moe_triton/layer.py` _load_w13, _load_w2)."""
RELEASES = tuple(Release(number) for number in range(_NEWEST, _FIRST - 1, -1))
"""The newest first."""
NEWEST = RELEASES[0]
