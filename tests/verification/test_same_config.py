"""A checkpoint whose config computes something else is told from one that is stored otherwise."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig, PreTrainedModel

from fp8calib.verification.open_files import find_other_setting
from tests import zoo

FAMILIES = ("llama", "gemma2", "qwen3_moe", "gpt_oss", "granite")


def change(settings: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Change one number or flag of a config at a time, also of its sections."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            for inner, changed in change(value):
                yield f"{key}.{inner}", {**settings, key: changed}
        elif isinstance(value, bool):
            yield key, {**settings, key: not value}
        elif isinstance(value, int | float):
            yield key, {**settings, key: value + 1 if isinstance(value, int) else value * 2}


def compute(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 27)[None], use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_every_number_that_changes_logits_is_named(family: str) -> None:
    model = zoo.build(family)
    expected, weights, config = compute(model), model.state_dict(), model.config
    raw = config.to_dict()
    assert not find_other_setting(raw, config)
    noticed = 0
    for key, changed in change(raw):
        try:
            other = type(model)(type(config).from_dict(changed)).eval()
            other.load_state_dict(weights)
            logits = compute(other)
        except (
            StrictDataclassError,
            AttributeError,
            IndexError,
            RuntimeError,
            TypeError,
            ValueError,
            ZeroDivisionError,
        ):
            continue  # of other shapes, or of none
        if not torch.equal(logits, expected):
            noticed += 1
            assert key in find_other_setting(changed, config)
    assert noticed


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["Other"], "transformers_version": "4.1.0", "dtype": "float16"},
        {"quantization_config": {"quant_method": "fp8"}, "use_cache": False},
        {"eos_token_id": [1, 2], "pad_token_id": 5, "max_position_embeddings": 4096},
        {"rope_parameters": None, "rope_theta": 10000.0},  # as transformers 4 writes it
        {"attention_dropout": 0.1, "initializer_range": 0.5},
    ],
)
def test_what_files_and_training_have_of_their_own_is_accepted(change: dict[str, Any]) -> None:
    config = zoo.build("llama").config
    raw = {key: value for key, value in (config.to_dict() | change).items() if value is not None}
    assert not find_other_setting(raw, config)


def test_another_type_and_what_cannot_be_read_are_named() -> None:
    config: PreTrainedConfig = zoo.build("llama").config
    raw = config.to_dict()
    assert find_other_setting(raw | {"model_type": "mistral"}, config) == (
        "model_type is mistral, not llama"
    )
    told = find_other_setting(raw | {"num_attention_heads": "many"}, config)
    assert told.startswith("transformers cannot read it")
