"""The size of a KV cache, from a geometry and from a config."""

from __future__ import annotations

import pytest

from fp8calib.model.kv_bytes import estimate_kv_bytes, kv_bytes_per_token
from tests.formats.handmade import latent_stats, make_attention, make_geometry

HEADS = {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({**HEADS, "head_dim": 16}, (2 * 2 * 16 * 3 * 2, 2 * 2 * 16 * 3)),
        ({"text_config": {**HEADS, "head_dim": 16}}, (384, 192)),
        (
            {**HEADS, "head_dim": 4, "layer_types": ["full_attention", "linear_attention"]},
            (32, 16),
        ),
        ({**HEADS, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, (576 * 3 * 2, 576 * 3)),
        ({"n_layer": 2, "n_head": 4, "n_embd": 32}, (256, 128)),
        ({"num_hidden_layers": 2}, None),
    ],
)
def test_the_cache_is_sized_from_the_config(
    config: dict[str, object], expected: tuple[int, int] | None
) -> None:
    assert estimate_kv_bytes(config, "bfloat16") == expected


def test_float32_takes_four_bytes_an_element() -> None:
    assert estimate_kv_bytes({**HEADS, "hidden_size": 64}, "float32") == (4 * 96, 96)


@pytest.mark.parametrize(
    ("checkpoint_dtype", "before"), [("bfloat16", 32), ("float16", 32), ("float32", 64)]
)
def test_the_cache_takes_one_byte_an_element_instead_of_the_checkpoints_size(
    checkpoint_dtype: str, before: int
) -> None:
    geometry = make_geometry(
        [make_attention(0), make_attention(1), make_attention(2, producer=0), None],
        checkpoint_dtype=checkpoint_dtype,
    )
    assert kv_bytes_per_token(geometry) == (before, 16)  # 2 layers of 2 heads of 2 + 2


def test_a_latent_and_its_rotary_part_are_cached_once() -> None:
    assert kv_bytes_per_token(latent_stats().geometry) == (12, 6)
