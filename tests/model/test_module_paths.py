"""Paths of modules: patterns, and the number of an expert."""

from __future__ import annotations

import pytest

from fp8calib.model.module_paths import (
    list_paths,
    matches_pattern,
    span_experts,
    split_expert,
)

EXPERT = "model.layers.3.mlp.experts.12.gate_proj"


@pytest.mark.parametrize(
    ("pattern", "is_match"),
    [
        ("a.b", True),
        ("a.*", True),
        ("a", False),
        ("*.B", False),
        ("re:a", False),
        (r"re:a\.\w", True),
        ("re:.*b", True),
    ],
)
def test_patterns_match_from_end_to_end(pattern: str, is_match: bool) -> None:
    assert matches_pattern(pattern, "a.b") is is_match


def test_one_of_several_paths_is_enough() -> None:
    assert matches_pattern("re:a.b.weight", "a.b", "a.b.weight")


@pytest.mark.parametrize("expression", ["(", "(" * 5000 + ")" * 5000, "a{99999999999999}"])
def test_an_expression_that_cannot_be_compiled_is_an_error(expression: str) -> None:
    with pytest.raises(ValueError, match="not a regular expression"):
        matches_pattern(f"re:{expression}", "a")


def test_paths_of_the_modules_that_hold_one() -> None:
    assert list(list_paths("a.b.c")) == ["a", "a.b", "a.b.c"]


def test_the_number_of_an_expert() -> None:
    assert split_expert(EXPERT) == ("model.layers.3.mlp.experts", 12, "gate_proj")
    assert span_experts(EXPERT) == "model.layers.3.mlp.experts.*.gate_proj"
    for other in ("model.layers.3.mlp.shared_experts.gate_proj", "mlp.experts.12"):
        assert split_expert(other) is None
        assert span_experts(other) == other
