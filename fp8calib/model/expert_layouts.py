"""How checkpoints stack the experts of a layer in one tensor, by model type.

Engines load a tensor for each expert instead: `X.experts.E.gate_proj.weight`, `up_proj` and
`down_proj`, all [out, in]. Source: transformers 5.23, `models/*/modeling_*.py` except where another
file is named; compared with its forward passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Order(StrEnum):
    """The order of the axes of a stack."""

    OUT_IN = "[experts, out, in]"
    IN_OUT = "[experts, in, out]"
    EITHER = "[experts, out, in] or [experts, in, out]"
    """Published checkpoints have either order; the model's hidden size tells which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A tensor that holds projections of all experts of a layer."""

    ending: str
    """The end of its name."""
    projections: tuple[str, ...]
    """The projections it holds, concatenated along the outputs."""
    base: str = ".experts"
    """Replaces `ending` in the names of experts with a tensor each; their number follows."""


_GATE_UP = ("gate_proj", "up_proj")
_DOWN = ("down_proj",)
_PARAMETERS = (
    Stack(ending=".experts.gate_up_proj", projections=_GATE_UP),
    Stack(ending=".experts.down_proj", projections=_DOWN),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayout:
    """How a model type stacks its experts."""

    stacks: tuple[Stack, ...] = _PARAMETERS
    order: Order = Order.OUT_IN


_ARIA = ExpertLayout(
    stacks=(
        Stack(ending=".experts.fc1.weight", projections=_GATE_UP),
        Stack(ending=".experts.fc2.weight", projections=_DOWN),
        *_PARAMETERS,
    ),
    order=Order.IN_OUT,
)
_GRANITE = ExpertLayout(
    stacks=(
        Stack(ending=".input_linear.weight", projections=_GATE_UP),
        Stack(ending=".output_linear.weight", projections=_DOWN),
        *_PARAMETERS,
    ),
)
_LLAMA4 = ExpertLayout(order=Order.IN_OUT)
_QWEN3_VL = ExpertLayout(order=Order.EITHER)
"""`conversion_mapping.py`: Transpose with check_dims."""
EXPERT_LAYOUTS: Mapping[str, ExpertLayout] = {
    **dict.fromkeys(("aria", "aria_text"), _ARIA),
    **dict.fromkeys(("granitemoe", "granitemoehybrid", "granitemoeshared"), _GRANITE),
    **dict.fromkeys(("llama4", "llama4_text"), _LLAMA4),
    **dict.fromkeys(("qwen3_vl_moe", "qwen3_vl_moe_text"), _QWEN3_VL),
    **dict.fromkeys(("deepseek_v3", "ernie4_5_moe", "gemma4", "gemma4_text"), ExpertLayout()),
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite"), ExpertLayout()),
    **dict.fromkeys(("hunyuan_v1_moe", "olmoe", "qwen2_moe", "qwen3_moe"), ExpertLayout()),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"), ExpertLayout()),
}
"""By model type. Checkpoints of aria, gemma4, granitemoe*, llama4, qwen3_5_moe and qwen3_vl_moe are
published with stacks; all other types have them only from
`save_pretrained(save_original_format=False)`."""

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

    layout: ExpertLayout | None = None
    """How it stacks the experts of a layer; None if it does not, or in a way of its own."""
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
            return KnownStacks(
                layout=EXPERT_LAYOUTS[kind], model_type=kind, hidden_size=inner["hidden_size"]
            )
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
