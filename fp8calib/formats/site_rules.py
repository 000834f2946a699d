"""The rules of K and V that differ from layer to layer: `scales.rules` of a recipe."""

from __future__ import annotations

from collections.abc import Mapping

from fp8calib.errors import RecipeError
from fp8calib.model.module_paths import matches_pattern
from fp8calib.model.shapes import KV_ROLES, ModelGeometry, Site
from fp8calib.numerics.rules import Rule


def find_site_rules(rules: Mapping[str, Rule], geometry: ModelGeometry) -> dict[Site, Rule]:
    """Give K and V the rule of the first pattern that matches `model.layers.3.self_attn.k`.

    Sites that none matches are left out.

    Raises:
        RecipeError: a pattern matches no K or V, or is not a valid regular expression.
    """
    if not rules:
        return {}
    sites = [attention.site(role) for _, attention in geometry.attentions() for role in KV_ROLES]
    found: dict[Site, Rule] = {}
    for pattern, rule in rules.items():
        try:
            matched = [site for site in sites if matches_pattern(pattern, str(site))]
        except ValueError as error:
            raise RecipeError(f"scales.rules: {pattern!r} is {error}") from error
        if not matched:
            hint = f"they look like {sites[0]}" if sites else ""
            raise RecipeError(f"scales.rules: {pattern!r} matches no K or V", hint=hint)
        found = dict.fromkeys(matched, rule) | found
    return found
