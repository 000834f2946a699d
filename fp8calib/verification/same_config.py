"""Whether a checkpoint computes as the model that it was made from: their configs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig

from fp8calib.errors import first_line

_OF_FILES = (
    *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"),
    *("quantization_config", "compression_config", "name_or_path", "model_type"),
)
"""Keys that say how files are stored and read."""
_OF_TRAINING = (
    *("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout"),
    *("initializer_range", "pretraining_tp", "router_aux_loss_coef", "router_z_loss_coef"),
)
_OF_GENERATION = (
    *("use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings"),
    *("return_dict", "output_attentions", "output_hidden_states", "output_router_logits"),
    *("num_logits_to_keep", "is_decoder", "is_encoder_decoder", "id2label", "label2id"),
    *("problem_type", "chunk_size_feed_forward"),
)
_IDLE = frozenset((*_OF_FILES, *_OF_TRAINING, *_OF_GENERATION))
"""Keys that change nothing of what a forward pass computes from the same weights."""
_TIED = "tie_word_embeddings"


def find_other_setting(raw: Mapping[str, Any], config: PreTrainedConfig) -> str:
    """Name a setting by which a checkpoint computes something else; empty where none does.

    Args:
        raw: the config.json of the checkpoint.
        config: that of the model.
    """
    own = {key: value for key, value in raw.items() if key != "quantization_config"}
    if own.get("model_type") != config.model_type:
        return f"model_type is {own.get('model_type')}, not {config.model_type}"
    try:
        read = type(config).from_dict(own)
    except Exception as error:  # noqa: BLE001 -- of any library, on any value
        return f"transformers cannot read it: {first_line(error)}"
    found, expected = (
        dict(_flatten(each.get_text_config(decoder=True).to_dict())) for each in (read, config)
    )
    for key in found.keys() & expected.keys():
        is_untied = key == _TIED and not found[key]  # it has a copy of the embedding
        if found[key] != expected[key] and not is_untied:
            return f"{key} is {found[key]}, not {expected[key]}"
    return ""


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if key.startswith("_") or key in _IDLE:
            continue
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value
