"""Sites are spelled as a path and a role, and read back."""

from __future__ import annotations

import pytest

from fp8calib.model.shapes import Role, Site


@pytest.mark.parametrize("role", list(Role))
def test_a_site_is_read_back_from_its_spelling(role: Role) -> None:
    site = Site("model.layers.7.self_attn", role)
    assert str(site) == f"model.layers.7.self_attn.{role.value}"
    assert Site.parse(str(site)) == site


def test_roles_are_spelled_as_the_contract_says() -> None:
    assert [role.value for role in Role] == ["k", "v", "q", "p", "input", "weight"]


@pytest.mark.parametrize("text", ["model.layers.0.mlp.output", "k_proj", ""])
def test_a_role_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a valid Role"):
        Site.parse(text)


def test_sites_sort_by_module_then_role() -> None:
    sites = [Site("b", Role.K), Site("a", Role.WEIGHT), Site("a", Role.INPUT)]
    assert [str(site) for site in sorted(sites)] == ["a.input", "a.weight", "b.k"]
