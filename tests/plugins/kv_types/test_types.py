"""Types of the KV cache in a model, against a cache whose layers store them by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from fp8calib.model.shapes import Role
from fp8calib.plugins.kv_types.types import CACHE_TYPES
from fp8calib.verification.emulation.candidate import Candidate
from tests import zoo
from tests.architectures.families import LATENT, build
from tests.plugins.kv_types import by_hand as types_by_hand
from tests.verification.by_hand import (
    BATCHES,
    PADDED,
    Change,
    HandCache,
    emulate,
    make_table,
    opened,
    plain_forward,
    text_config,
)

STORED = {
    "fp8_per_token_head": types_by_hand.fp8_per_token_head,
    "int8_per_token_head": types_by_hand.int8_per_token_head,
    "nvfp4": types_by_hand.nvfp4,
}


def store_all(store: types_by_hand.OneVector) -> Change:

    def change(x: torch.Tensor) -> torch.Tensor:
        rows = [store(row.numpy()) for row in x.reshape(-1, x.shape[-1])]
        return torch.from_numpy(np.stack(rows)).reshape(x.shape)

    return change


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe"])
@pytest.mark.parametrize("name", STORED)
def test_hidden_states_are_those_of_a_cache_by_hand(name: str, family: str, tmp_path: Path) -> None:
    with opened(zoo.build(family, head_dim=16), tmp_path) as subject:
        quantizers = CACHE_TYPES[name].quantize(subject.geometry)
        found = emulate(subject, Candidate(quantizers=quantizers), *BATCHES)
        change = store_all(STORED[name])
        layers = [layer.index for layer, _ in subject.geometry.attentions()]
        for batch, hidden in zip(BATCHES, found, strict=True):
            cache = HandCache(text_config(subject.model), dict.fromkeys(layers, (change, change)))
            wanted = plain_forward(subject.model, batch, cache)
            for row, length in enumerate(batch.lengths):
                assert torch.allclose(hidden[row, :length], wanted[row, :length], atol=2e-5)


def test_padding_takes_no_part_in_the_scale_of_a_sequence(tmp_path: Path) -> None:
    with opened(zoo.build("llama", head_dim=16), tmp_path) as subject:
        quantizers = CACHE_TYPES["fp8_quantized_cache"].quantize(subject.geometry)
        padded, *_ = emulate(subject, Candidate(quantizers=quantizers), PADDED)
        for row, length in enumerate(PADDED.lengths):
            one = replace(PADDED, input_ids=PADDED.input_ids[row : row + 1, :length])
            one = replace(one, lengths=(length,))
            (alone,) = emulate(subject, Candidate(quantizers=quantizers), one)
            assert torch.allclose(padded[row, :length], alone[0], atol=1e-5)


def test_global_scales_are_those_of_the_table(tmp_path: Path) -> None:
    """In layer 0 alone they differ from 1.0."""
    with opened(zoo.build("llama", head_dim=16), tmp_path) as subject:
        (_, first), *_ = subject.geometry.attentions()
        sites = [
            attention.site(role)
            for _, attention in subject.geometry.attentions()
            for role in (Role.K, Role.V)
        ]
        values = {site: 0.01 if site.module == first.module else 1.0 for site in sites}
        table = make_table(subject, values)
        quantizers = CACHE_TYPES["nvfp4"].quantize(subject.geometry, table)
        x = torch.randn(1, 2, 4, 16)
        change = store_all(partial(types_by_hand.nvfp4, scale=0.01))
        assert torch.equal(quantizers[sites[0]].fake(x).values, change(x))
        assert torch.equal(quantizers[sites[-1]].fake(x).values, store_all(types_by_hand.nvfp4)(x))


@pytest.mark.parametrize(
    ("name", "size"), [("turboquant_4bit_nc", 16 + 2 + 16 + 4), ("ultraquant_4bit", 2 * (16 + 1))]
)
def test_ends_stay_in_16_bits(name: str, size: int, tmp_path: Path) -> None:
    model = zoo.build("llama", num_hidden_layers=6, head_dim=32)
    with opened(model, tmp_path) as subject:
        geometry = subject.geometry
        quantizers = CACHE_TYPES[name].quantize(geometry)
        stored = {site.module for site in quantizers}
        layers = [layer.index for layer, a in geometry.attentions() if a.module in stored]
        assert layers == [2, 3]
        (_, attention), *_ = geometry.attentions()
        heads = attention.num_kv_heads
        wanted = 2 * heads * size + 4 * heads * 32 * 2 * 2
        assert CACHE_TYPES[name].count_bytes(geometry) == wanted


@pytest.mark.parametrize(("family", "is_refused"), [("falcon_h1", True), ("bamba", False)])
def test_hybrid_layers_are_refused_by_types_that_leave_the_ends(
    family: str, is_refused: bool, tmp_path: Path
) -> None:
    """In each layer of falcon_h1 are both attention and a recurrence, of bamba one of them."""
    with opened(zoo.build(family), tmp_path) as subject:
        why = CACHE_TYPES["turboquant_k8v4"].explain_misfit(subject.geometry)
        assert ("does not start with it" in why) is is_refused


SPARSE = {"index_topk": 16, "index_n_heads": 2, "index_head_dim": 16, "first_k_dense_replace": 2}
LATENT_RANK, ROTARY = 128, 8


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_latents_in_tiles_are_those_of_a_cache_by_hand(family: str, tmp_path: Path) -> None:
    changes = {**LATENT, **SPARSE, "mlp_layer_types": ["dense", "dense"]}
    sizes = {"kv_lora_rank": LATENT_RANK, "qk_rope_head_dim": ROTARY}
    with opened(build(family, {**changes, **sizes}), tmp_path) as subject:
        cache_type, geometry = CACHE_TYPES["fp8_ds_mla"], subject.geometry
        assert cache_type.explain_misfit(geometry) == ""
        assert "latents" in CACHE_TYPES["mxfp8"].explain_misfit(geometry)
        layers = len(geometry.layers)
        wanted_bytes = layers * (LATENT_RANK + 4 * LATENT_RANK / 128 + 2 * ROTARY)
        assert cache_type.count_bytes(geometry) == wanted_bytes
        quantizers = cache_type.quantize(geometry)
        (_, attention), *_ = geometry.attentions()
        x = torch.randn(1, 1, 5, LATENT_RANK)
        key, value = (quantizers[attention.site(role)] for role in (Role.K, Role.V))
        assert torch.equal(key.fake(x).values, store_all(types_by_hand.fp8_tiles)(x))
        part = torch.randn(1, 1, 5, ROTARY)
        assert torch.equal(value.fake(part).values, part.bfloat16().float())
        (hidden,) = emulate(subject, Candidate(quantizers=quantizers), BATCHES[1])
        plain = plain_forward(subject.model, BATCHES[1])
        assert 0 < float((hidden - plain).norm() / plain.norm()) < 0.1


@pytest.mark.parametrize(
    ("name", "size", "part"),
    [
        ("nvfp4", 72, "no multiple of 16"),
        ("turboquant_4bit_nc", 96, "no power of two"),
        ("ultraquant_4bit", 16, "no multiple of 32"),
        ("int4_per_token_head", 65, "no multiple of 2"),
        ("int8_per_token_head", 65, ""),
    ],
)
def test_heads_that_do_not_fit_are_named(name: str, size: int, part: str, tmp_path: Path) -> None:
    model = zoo.build("llama", num_hidden_layers=6, head_dim=8)
    with opened(model, tmp_path) as subject:
        layers = tuple(
            layer.model_copy(
                update={
                    "attention": attention.model_copy(
                        update={"k_head_dim": size, "v_head_dim": size}
                    )
                }
            )
            for layer, attention in subject.geometry.attentions()
        )
        why = CACHE_TYPES[name].explain_misfit(
            subject.geometry.model_copy(update={"layers": layers})
        )
        assert part in why
        assert bool(why) == bool(part)
