"""Tiny random models of every architecture that the project names."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedModel

from tests.architectures import families
from tests.kit.minutes import in_minutes

NEEDS_5_23 = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="older releases of transformers lack the model type, or load and run it otherwise",
)

ZOO: dict[str, dict[str, Any]] = families.KNOWN["zoo"]
CONFIGS = ZOO | families.FAMILIES
LIKE_OTHERS = {"gemma3_text", "mistral", "qwen2", "qwen3", "qwen3_moe", "starcoder2"}
"""Families of the zoo that have no layer, cache or layout on disk that no other has."""
KINDS = [*sorted(ZOO.keys() - LIKE_OTHERS), *in_minutes(*sorted(LIKE_OTHERS))]
"""The families of the zoo as parameters of a test."""
MIXED = ("gemma4_text", "granitemoehybrid", "qwen3_5_text")
"""Mixers without K and V, shared K and V, and tensors at odd places in their file."""


def build(family: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Build a random fp32 model of any family that tests know; `changes` override its config."""
    return families.build(family, {**CONFIGS[family], **changes}, seed=seed)


def save(family: str, folder: Path, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    shard_size = changes.pop("max_shard_size", "5GB")
    model = build(family, seed=seed, **changes)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model


def draw(lengths: list[int], *, seed: int = 7) -> list[torch.Tensor]:
    """Draw sequences of random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 128, (length,), generator=generator) for length in lengths]
