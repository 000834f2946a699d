"""Find values in a config.json that transformers accepts, and that engines may not.

transformers validates the fields that a model's class declares. It does not validate those of the
base class, whether a size is above zero, nor what the class has no use for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, get_type_hints

import torch
from huggingface_hub.dataclasses import type_validator
from transformers import PretrainedConfig

from fp8calib.errors import shorten

_SIZES = (
    *("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "max_position_embeddings"),
)
_STRUCTURE = ("layer_types", "layers_block_type", "attn_type_list", "sliding_window")
"""What vLLM 0.32.0 reads of any class (`config/model.py`, read): its cache and its attention follow
it, also where the class has no use for it."""
_PLAIN_LAYERS = {"attention", "full_attention"}


def list_odd_values(parsed: Any, config: Mapping[str, Any]) -> Iterator[str]:
    """List the values that an engine may refuse, or take for another structure.

    vLLM stopped at `architectures` that is a text, at `max_position_embeddings: 0`, and at a llama
    with two kinds of `layer_types`.

    Args:
        parsed: the config as transformers reads it.
        config: the same as the file has it.
    """
    default = type(parsed)()
    given = {key: value for key, value in config.items() if value is not None}
    types = _base_types()
    for key, value in given.items():
        try:
            type_validator(key, value, types.get({"torch_dtype": "dtype"}.get(key, key), Any))
        except TypeError:
            yield f"config.json says {key}: {shorten(str(value))}, which is of another type"
        if _is_negative(value) and not key.endswith("_token_id"):
            usual = getattr(default, key, None)
            if _is_number(usual) and not _is_negative(usual):
                yield f"config.json says {key}: {value}, where the class has {usual}"
        if key in _STRUCTURE and not hasattr(default, key) and not _is_plain(value):
            yield f"config.json says {key}, for which {type(parsed).__name__} has no use"
    for key in _SIZES:
        if getattr(parsed, key, None) == 0 and getattr(default, key, None) != 0:
            yield f"config.json says {key}: 0"


@cache
def _base_types() -> Mapping[str, Any]:
    """Give the types of the fields that every config has."""
    hints = get_type_hints(PretrainedConfig, localns={"torch": torch})
    return {field.name: hints[field.name] for field in fields(PretrainedConfig)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_negative(value: object) -> bool:
    return isinstance(value, int | float) and value < 0


def _is_plain(value: object) -> bool:
    """Check whether it says that every layer has full attention."""
    return not value or (isinstance(value, list) and _PLAIN_LAYERS.issuperset(map(str, value)))
