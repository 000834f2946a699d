"""What a config.json says of its model."""

from __future__ import annotations

import pytest

from fp8calib.checkpoint.model_config import find_dtype


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"dtype": "auto", "torch_dtype": "float32"}, "float32"),
        ({"dtype": None, "llm_config": {"dtype": "float16"}}, "float16"),
        ({"language_config": {"torch_dtype": "float32"}}, "float32"),
        ({"torch_dtype": "bfloat16", "text_config": {"dtype": "float32"}}, "bfloat16"),
        ({"vision_config": {"dtype": "float32"}, "text_config": {"dtype": "float16"}}, "float16"),
        ({"dtype": 16}, ""),
        ({}, ""),
    ],
)
def test_the_outermost_dtype_counts_then_the_text_models(
    config: dict[str, object], expected: str
) -> None:
    assert find_dtype(config) == expected
