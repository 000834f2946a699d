"""Tiny models of every architecture, in sizes that vLLM's kernels and FP8 blocks accept.

Heads have 64 elements (vLLM's CPU kernels need a multiple of 32 in FP8), and linears fill blocks of
128, so that what an engine refuses is not the size of the model.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import is_torchvision_available

from tests.architectures.families import FAMILIES, KNOWN, SIZES
from tests.kit.multimodal import MULTIMODAL, WIDE, build_multimodal
from tests.zoo import ZOO

_WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256}
_HEADS: dict[str, Any] = {"head_dim": 64}
_CHANGES: Mapping[str, Mapping[str, Any]] = KNOWN["wide"]
_COMPARED: Mapping[str, dict[str, Any]] = KNOWN["compared"]
_FINE = ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size")
SIMPLEST = "llama"
ARCHITECTURES = (
    *dict.fromkeys((*ZOO, *FAMILIES, *_COMPARED)),
    *(WIDE if is_torchvision_available() else ()),
)
"""The model types; the first is what a disagreement is reduced to where it persists."""
_TOWER = re.compile(r"(vision_tower\.)(?=embeddings|encoder|post_layernorm|pre_layrnorm|head)")
"""How transformers 5 begins names of CLIP and Siglip, that checkpoints on the Hub, and vLLM, have
`vision_model` in."""


def make_config(architecture: str, **changes: Any) -> dict[str, Any]:
    """Give the fields of a tiny config; `changes` override them."""
    fields = {**SIZES, **ZOO.get(architecture, {}), **FAMILIES.get(architecture, {}), **_WIDE}
    fields |= _COMPARED.get(architecture, {})
    fields |= {name: 128 for name in _FINE if name in fields}
    fields |= _HEADS if "head_dim" in fields or architecture == SIMPLEST else {}
    return {**fields, **_CHANGES.get(architecture, {}), **changes}


def randomize(model: torch.nn.Module) -> None:
    """Make norms and biases matter: what is lost of them changes a number."""
    for value in model.parameters():
        if value.dim() == 1 and bool((value == value[0]).all()):
            value.data += torch.randn_like(value) / 8


def save_model(
    architecture: str,
    folder: Path,
    dtype: str,
    *,
    fill: Callable[[torch.nn.Module], None] = randomize,
    **changes: Any,
) -> None:
    """Write a random model of an architecture, with the same numbers in every dtype."""
    torch.manual_seed(0)
    if architecture in WIDE:
        model = _save_processor(architecture, folder, **changes)
    else:
        fields = make_config(architecture, **changes)
        if not hasattr(AutoConfig.for_model(architecture), "num_key_value_heads"):
            fields.pop("num_key_value_heads", None)  # which engines would read all the same
        config = AutoConfig.for_model(architecture, **fields)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fill(model)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tower = getattr(model.config, "vision_config", None)
    if getattr(tower, "model_type", "").startswith(("clip", "siglip")):
        file = folder / "model.safetensors"
        tensors = load_file(file)
        named = {_TOWER.sub(r"\1vision_model.", name): each for name, each in tensors.items()}
        save_file(named, file, metadata={"format": "pt"})


def _save_processor(name: str, folder: Path, **changes: Any) -> torch.nn.Module:
    """Write the processor of a model that sees or hears, and build the model in fp32."""
    own = MULTIMODAL[name].config
    sizes = {**_WIDE, **_HEADS, **dict.fromkeys(_FINE, 128)}
    wide = {key: each for key, each in sizes.items() if key in own.get("text_config", own)}
    model, processor = build_multimodal(name, **wide, **WIDE[name], **changes)
    processor.save_pretrained(folder)
    return model
