"""How checkpoints stack the experts of a layer in one tensor, by model type.

Engines load a tensor for each expert instead: `X.experts.E.gate_proj.weight`, `up_proj` and
`down_proj`, all [out, in]. Source: transformers 5.23, `models/*/modeling_*.py` except where another
file is named; compared with its forward passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

OUT_IN, IN_OUT = "[experts, out, in]", "[experts, in, out]"
"""Orders of the axes of a stack."""
EITHER = f"{OUT_IN} or {IN_OUT}"
"""Published checkpoints have either order; the model's hidden size tells which."""


_GATE_UP = ("gate_proj", "up_proj")
_DOWN = ("down_proj",)
PARAMETERS: Mapping[str, tuple[str, ...]] = {
    ".experts.gate_up_proj": _GATE_UP,
    ".experts.down_proj": _DOWN,
}
"""By the end of a stack's name, the projections that it holds, concatenated along the outputs."""
_ARIA = {".experts.fc1.weight": _GATE_UP, ".experts.fc2.weight": _DOWN, **PARAMETERS}
_GRANITE = {".input_linear.weight": _GATE_UP, ".output_linear.weight": _DOWN, **PARAMETERS}

EXPERT_LAYOUTS: Mapping[str, tuple[Mapping[str, tuple[str, ...]], str]] = {
    **dict.fromkeys(("aria", "aria_text"), (_ARIA, IN_OUT)),
    **dict.fromkeys(("granitemoe", "granitemoehybrid", "granitemoeshared"), (_GRANITE, OUT_IN)),
    **dict.fromkeys(("llama4", "llama4_text"), (PARAMETERS, IN_OUT)),
    # `conversion_mapping.py`: Transpose with check_dims
    **dict.fromkeys(("qwen3_vl_moe", "qwen3_vl_moe_text"), (PARAMETERS, EITHER)),
    **dict.fromkeys(
        (
            *("deepseek_v3", "ernie4_5_moe", "gemma4", "gemma4_text", "glm4_moe", "glm4_moe_lite"),
            *("hunyuan_v1_moe", "olmoe", "qwen2_moe", "qwen3_moe"),
            *("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"),
        ),
        (PARAMETERS, OUT_IN),
    ),
}
"""By model type: the stacks by the end of their names, and the order of their axes.

Checkpoints of aria, gemma4, granitemoe*, llama4, qwen3_5_moe and qwen3_vl_moe are published with
stacks; all other types have them only from `save_pretrained(save_original_format=False)`."""

UNSERVED_STACKS: Mapping[str, str] = {
    "dbrx": "vLLM 0.32.0 loads no tensors of single experts for dbrx (models/dbrx.py), and a stack "
    "can have only one scale per tensor",
    "gpt_oss": "rows of gate and up alternate and have biases, and vLLM 0.32.0 loads FP8 experts "
    "of gpt_oss only from Quark's stacks (models/gpt_oss.py)",
}
"""Model types whose stacks are known but not split, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownStacks:
    """What is known of a model's tensors with three axes or more."""

    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The projections in a stack of a layer's experts, by the end of its name; empty if it has no
    stacks, or in a way of its own."""
    order: str = OUT_IN
    model_type: str = ""
    """The type of the text model."""
    hidden_size: object = None
    """The hidden size of the text model, as config.json has it."""
    buffers: frozenset[str] = frozenset()
    """The last two parts of the names of its buffers, which are not weights."""


def find_layout(config: Mapping[str, object]) -> KnownStacks:
    """Look for the first model type in a config that has a layout here."""
    for inner in list_configs(config):
        kind = inner.get("model_type")
        if isinstance(kind, str) and kind in EXPERT_LAYOUTS and "hidden_size" in inner:
            stacks, order = EXPERT_LAYOUTS[kind]
            size = inner["hidden_size"]
            return KnownStacks(stacks=stacks, order=order, model_type=kind, hidden_size=size)
    return KnownStacks()


def cut_name(name: str) -> str:
    """Give the last two parts of a tensor's name: wrappers and checkpoints have other roots."""
    return ".".join(name.split(".")[-2:])


def list_configs(config: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """List a config and the configs inside it, the outer ones first."""
    yield config
    for value in config.values():
        if isinstance(value, Mapping):
            yield from list_configs(value)
