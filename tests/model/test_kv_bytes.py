"""The size of a KV cache, from a geometry and from a config."""

import pytest

from fp8calib.model.kv_bytes import estimate_kv_bytes

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
