"""Rows of fused weights, typed by hand for every layout, and names of logical projections."""

from __future__ import annotations

import pytest

from fp8calib.model.shapes import Linear, Part
from fp8calib.model.topology.layouts import (
    contiguous_qkv,
    gate_up_parts,
    grouped_qkv,
)
from tests.formats.handmade import make_attention, make_geometry

FOUR_TWO = (4, 2, 2)
TWO_TWO = (2, 2, 2)


def rows(parts: tuple[Part, ...]) -> dict[str, list[int]]:
    return {part.name: part.rows(range(part.count)) for part in parts}


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        # all q, then all k, then all v
        (contiguous_qkv(*FOUR_TWO), [[*range(8)], [8, 9, 10, 11], [12, 13, 14, 15]]),
        # the heads of one KV head together
        (grouped_qkv(*FOUR_TWO), [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]),
        (grouped_qkv(*TWO_TWO), [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]),
    ],
)
def test_rows_of_q_k_and_v(parts: tuple[Part, ...], expected: list[list[int]]) -> None:
    names = [f"{role}_proj" for role in "qkv"]
    assert rows(parts) == dict(zip(names, expected, strict=True))


def test_gate_and_up_are_stacked_or_interleaved() -> None:
    assert rows(gate_up_parts(8)) == {"gate_proj": [0, 1, 2, 3], "up_proj": [4, 5, 6, 7]}
    assert rows(gate_up_parts(8, interleaved=True)) == {
        "gate_proj": [0, 2, 4, 6],
        "up_proj": [1, 3, 5, 7],
    }


@pytest.mark.parametrize(
    ("parts", "units", "expected"),
    [
        (contiguous_qkv(*FOUR_TWO), range(2, 4), [[4, 5, 6, 7], [], []]),
        (contiguous_qkv(*FOUR_TWO), range(1, 2), [[2, 3], [10, 11], [14, 15]]),
        (grouped_qkv(*FOUR_TWO), range(1, 2), [[2, 3], [12, 13], [14, 15]]),
        (grouped_qkv(*FOUR_TWO), range(1, 3), [[2, 3, 8, 9], [], []]),
        (gate_up_parts(8, interleaved=True), range(2, 4), [[4, 6], [5, 7]]),
    ],
)
def test_some_units_are_some_rows(
    parts: tuple[Part, ...], units: range, expected: list[list[int]]
) -> None:
    for part, wanted in zip(parts, expected, strict=True):
        if wanted:
            assert part.rows(units) == wanted


def make_linear(*, num_experts: int = 0) -> Linear:
    root = "model.layers.3.mlp"
    module = f"{root}.experts.gate_up_proj" if num_experts else f"{root}.gate_up_proj"
    return Linear(
        module=module,
        section="mlp",
        root=root,
        in_features=8,
        out_features=8,
        shard="column",
        parts=gate_up_parts(8),
        num_experts=num_experts,
        expert_block=4,
        weight_name=f"{module}.weight",
    )


def test_fused_modules_are_named_as_if_they_were_split() -> None:
    linear = make_linear()
    assert [linear.logical(part) for part in linear.parts] == [
        "model.layers.3.mlp.gate_proj",
        "model.layers.3.mlp.up_proj",
    ]
    assert [linear.key(part) for part in linear.parts] == ["gate_proj", "up_proj"]
    assert linear.experts == (None,)


def test_experts_are_named_by_their_number() -> None:
    linear = make_linear(num_experts=2)
    assert linear.experts == (0, 1)
    assert linear.logical(linear.parts[0], 1) == "model.layers.3.mlp.experts.1.gate_proj"
    assert linear.key(linear.parts[1], 0) == "experts.0.up_proj"


def test_cached_numbers_are_counted_once_for_shared_caches() -> None:
    own = make_attention(0, k_head_dim=3, v_head_dim=5)
    shared = make_attention(1, producer=0)
    geometry = make_geometry([own, shared, None])
    assert (own.kv_elements_per_token, shared.kv_elements_per_token) == (2 * (3 + 5), 0)
    assert geometry.kv_elements_per_token == 16
    assert [layer.index for layer, _ in geometry.attentions()] == [0, 1]
    assert not geometry.has_latent_attention
    assert make_geometry([make_attention(0, kind="latent")]).has_latent_attention
