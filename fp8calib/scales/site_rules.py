"""The rules that were chosen site by site."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fp8calib.geometry.sites import Site
from fp8calib.numerics.rules import AMAX, Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteRules:
    """The rules that were chosen for K and V of each layer."""

    sites: Mapping[Site, Rule] = field(default_factory=dict)
    """Other sites use their amax."""
    by_head: frozenset[Site] = frozenset()
    """The sites with a scale for each head, where a format holds them; others have one."""

    def of(self, site: Site) -> Rule:
        """Give the rule of a site."""
        return self.sites.get(site, AMAX)
