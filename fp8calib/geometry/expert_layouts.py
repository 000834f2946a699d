"""How checkpoints hold the experts of a layer in one tensor, by model type.

Read from transformers 5.23 and tried against its forward passes; engines load the same experts from
one tensor each, `X.experts.E.gate_proj.weight`, `up_proj` and `down_proj`, all [out, in].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Order(StrEnum):
    """Which way round a stack holds the matrix of an expert."""

    OUT_IN = "[experts, out, in]"
    IN_OUT = "[experts, in, out]"
    EITHER = "[experts, out, in] or [experts, in, out]"
    """Checkpoints of both kinds are about; the model's hidden size tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A tensor of a layer's experts."""

    ending: str
    """Of its name."""
    projections: tuple[str, ...]
    """What lies in it, one after another along the outputs."""
    base: str = ".experts"
    """What stands for the ending where experts have a tensor each, before their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayout:
    """How a model type stacks its experts."""

    stacks: tuple[Stack, ...]
    order: Order
    source: str
    """The file of transformers 5.23 that says so."""
    is_split_in_transformers: bool
    """transformers loads quantized experts with a tensor each too; else it leaves them out."""


_GATE_UP = ("gate_proj", "up_proj")
_DOWN = ("down_proj",)
_PARAMETERS = (
    Stack(ending=".experts.gate_up_proj", projections=_GATE_UP),
    Stack(ending=".experts.down_proj", projections=_DOWN),
)
_ARIA = (
    Stack(ending=".experts.fc1.weight", projections=_GATE_UP),
    Stack(ending=".experts.fc2.weight", projections=_DOWN),
)
_GRANITE = (
    Stack(ending=".input_linear.weight", projections=_GATE_UP),
    Stack(ending=".output_linear.weight", projections=_DOWN),
)


def _plain(file: str, *, is_split: bool = True) -> ExpertLayout:
    return ExpertLayout(
        stacks=_PARAMETERS,
        order=Order.OUT_IN,
        source=f"models/{file}",
        is_split_in_transformers=is_split,
    )


def _granite(file: str) -> ExpertLayout:
    return ExpertLayout(
        stacks=(*_GRANITE, *_PARAMETERS),
        order=Order.OUT_IN,
        source=f"models/{file}",
        is_split_in_transformers=False,
    )


_QWEN3_VL = ExpertLayout(
    stacks=_PARAMETERS,
    order=Order.EITHER,
    source="conversion_mapping.py (Transpose with check_dims)",
    is_split_in_transformers=False,
)
_LLAMA4 = ExpertLayout(
    stacks=_PARAMETERS,
    order=Order.IN_OUT,
    source="models/llama4/modeling_llama4.py (Llama4TextExperts)",
    is_split_in_transformers=True,
)
_ARIA_LAYOUT = ExpertLayout(
    stacks=(*_ARIA, *_PARAMETERS),
    order=Order.IN_OUT,
    source="models/aria/modeling_aria.py (AriaExperts)",
    is_split_in_transformers=False,
)
_GEMMA4 = _plain("gemma4/modeling_gemma4.py", is_split=False)
EXPERT_LAYOUTS: Mapping[str, ExpertLayout] = {
    "aria": _ARIA_LAYOUT,
    "aria_text": _ARIA_LAYOUT,
    "deepseek_v3": _plain("deepseek_v3/modeling_deepseek_v3.py"),
    "ernie4_5_moe": _plain("ernie4_5_moe/modeling_ernie4_5_moe.py"),
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "glm4_moe": _plain("glm4_moe/modeling_glm4_moe.py"),
    "glm4_moe_lite": _plain("glm4_moe_lite/modeling_glm4_moe_lite.py"),
    "granitemoe": _granite("granitemoe/modeling_granitemoe.py"),
    "granitemoehybrid": _granite("granitemoehybrid/modeling_granitemoehybrid.py"),
    "granitemoeshared": _granite("granitemoeshared/modeling_granitemoeshared.py"),
    "hunyuan_v1_moe": _plain("hunyuan_v1_moe/modeling_hunyuan_v1_moe.py"),
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
    "olmoe": _plain("olmoe/modeling_olmoe.py"),
    "qwen2_moe": _plain("qwen2_moe/modeling_qwen2_moe.py"),
    "qwen3_5_moe": _plain("qwen3_5_moe/modeling_qwen3_5_moe.py"),
    "qwen3_5_moe_text": _plain("qwen3_5_moe/modeling_qwen3_5_moe.py"),
    "qwen3_moe": _plain("qwen3_moe/modeling_qwen3_moe.py"),
    "qwen3_next": _plain("qwen3_next/modeling_qwen3_next.py"),
    "qwen3_vl_moe": _QWEN3_VL,
    "qwen3_vl_moe_text": _QWEN3_VL,
}
"""By model type. Published in stacks: aria, gemma4, granitemoe*, llama4, qwen3_5_moe,
qwen3_vl_moe. The others are stacked by `save_pretrained(save_original_format=False)`."""

UNSERVED_STACKS: Mapping[str, str] = {
    "dbrx": "vLLM 0.32.0 loads no tensors of single experts for dbrx (models/dbrx.py), and a stack "
    "has room for one scale per tensor alone",
    "gpt_oss": "gate and up lie in turn and have biases, and vLLM 0.32.0 loads FP8 experts of "
    "gpt_oss from Quark's own stacks alone (models/gpt_oss.py)",
}
"""Model types whose stacks are known, and why they stay as they are."""


def find_stack(layout: ExpertLayout, name: str) -> Stack | None:
    """Find the kind of stack that a tensor is by its name; None when it is none."""
    return next((stack for stack in layout.stacks if name.endswith(stack.ending)), None)


def find_layout(config: Mapping[str, object]) -> tuple[str, ExpertLayout | None, object]:
    """Find the first model type of a config that has a layout, that, and the hidden size."""
    for inner in _list_configs(config):
        kind = inner.get("model_type")
        if isinstance(kind, str) and kind in EXPERT_LAYOUTS and "hidden_size" in inner:
            return kind, EXPERT_LAYOUTS[kind], inner["hidden_size"]
    return "", None, None


def list_types(config: Mapping[str, object]) -> set[str]:
    """Give every `model_type` of a config and the configs inside it."""
    types = (inner.get("model_type") for inner in _list_configs(config))
    return {kind for kind in types if isinstance(kind, str)}


def _list_configs(config: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """List a config and the configs inside it, the outer ones first."""
    yield config
    for value in config.values():
        if isinstance(value, Mapping):
            yield from _list_configs(value)
