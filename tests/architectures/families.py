"""Tiny random models of further families; `families.yaml` has the configs that tests know."""

from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

KNOWN: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("families.yaml").read_text())
SIZES: dict[str, Any] = KNOWN["sizes"]
GPT2, SLIDING, EXPERTS, ROUTED, LATENT = (
    KNOWN["parts"][name] for name in ("gpt2", "sliding", "experts", "routed", "latent")
)
FAMILIES: dict[str, dict[str, Any]] = KNOWN["families"]
"""Families that are calibrated."""
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    name: (each["config"], each["says"]) for name, each in KNOWN["refused"].items()
}
"""Families that are not, and what the error says."""


def build(family: str, changes: dict[str, Any], *, seed: int = 0) -> PreTrainedModel:
    """Build a random fp32 model of `family` in which every parameter matters."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def save(family: str, changes: dict[str, Any], folder: Path) -> PreTrainedModel:
    """Build a model and write it as a checkpoint folder."""
    model = build(family, changes)
    model.save_pretrained(folder)
    return model
