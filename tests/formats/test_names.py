"""Names and shapes of scale tensors."""

from __future__ import annotations

import pytest
import torch

from fp8calib.formats.compute import compute_kv_scales
from fp8calib.formats.kv.kv_scales import make_scale_tensors, name_scales
from fp8calib.model.shapes import Role
from fp8calib.numerics.formats import E4M3FN
from tests.formats.handmade import (
    latent_stats,
    make_attention,
    make_geometry,
    make_kv_sites,
    make_stats,
    plain_stats,
    shared_stats,
)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("model.layers.0.self_attn", ["model.layers.0.self_attn.k_scale"]),
        ("gpt_neox.layers.3.attention", ["gpt_neox.layers.3.attention.k_scale"]),
        (
            "transformer.h.0.attn",
            ["transformer.h.0.attn.k_scale", "transformer.h.0.attn.attn.k_scale"],
        ),
        ("h.0.attn", ["h.0.attn.k_scale", "h.0.attn.attn.k_scale"]),
        ("attn", ["attn.k_scale", "attn.attn.k_scale"]),
    ],
)
def test_a_module_called_attn_gets_the_name_vllm_maps_to_as_well(
    module: str, names: list[str]
) -> None:
    assert list(name_scales(make_attention(0, checkpoint_module=module), Role.K)) == names


def test_names_are_spelled_as_the_checkpoint_spells_them_not_as_the_model_does() -> None:
    attention = make_attention(0, checkpoint_module="language_model.layers.0.self_attn")
    geometry = make_geometry([attention])
    table = compute_kv_scales(make_stats(geometry, make_kv_sites(geometry)), E4M3FN)

    assert list(make_scale_tensors(table)) == [
        "language_model.layers.0.self_attn.k_scale",
        "language_model.layers.0.self_attn.v_scale",
    ]


def test_per_tensor_scales_are_fp32_scalars_of_the_shape_asked_for() -> None:
    table = compute_kv_scales(plain_stats(), E4M3FN)
    expected = {
        "model.layers.0.self_attn.k_scale": 0.5,
        "model.layers.0.self_attn.v_scale": 0.75,
        "model.layers.1.self_attn.k_scale": 2.0,
        "model.layers.1.self_attn.v_scale": 0.03125,
    }

    for shape in ((), (1,)):
        tensors = make_scale_tensors(table, scalar_shape=shape)
        assert {name: tensor.item() for name, tensor in tensors.items()} == expected
        assert {tensor.shape for tensor in tensors.values()} == {shape}
        assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


def test_per_head_scales_keep_two_axes_of_one_behind_the_heads() -> None:
    table = compute_kv_scales(plain_stats(), E4M3FN, per_head=True, query=True)
    tensors = make_scale_tensors(table)

    assert tensors["model.layers.0.self_attn.k_scale"].tolist() == [[[0.25]], [[0.5]]]
    assert tensors["model.layers.0.self_attn.v_scale"].tolist() == [[[0.125]], [[0.75]]]
    assert tensors["model.layers.0.self_attn.q_scale"].tolist() == [[[0.5]], [[4]], [[1]], [[2]]]


def test_layers_that_read_another_cache_carry_its_scales() -> None:
    tensors = make_scale_tensors(compute_kv_scales(shared_stats(), E4M3FN))

    assert tensors["model.layers.2.self_attn.k_scale"].item() == 2.0
    assert tensors["model.layers.2.self_attn.v_scale"].item() == 0.03125
    assert tensors["model.layers.3.self_attn.k_scale"].item() == 0.5
    assert tensors["model.layers.3.self_attn.v_scale"].item() == 0.75


@pytest.mark.parametrize("per_head", [False, True])
def test_latent_attention_has_one_scale_under_both_names(per_head: bool) -> None:
    table = compute_kv_scales(latent_stats(), E4M3FN, per_head=per_head)
    tensors = make_scale_tensors(table)

    assert [tensor.item() for tensor in tensors.values()] == [0.5, 0.5]
    assert {tensor.shape for tensor in tensors.values()} == {(1, 1, 1) if per_head else ()}
