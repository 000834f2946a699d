"""What transformers' class of a model says of tensors that may stack matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fp8calib.errors import ModelError
from fp8calib.model.expert_layouts import ExpertLayout, Order

_STACK_AXES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassStacks:
    """What a class holds with three axes or more."""

    layout: ExpertLayout | None = None
    """How it stacks the experts of a layer; None where it does not, or in a way of its own."""
    model_type: str = ""
    """That of the text model, and its hidden size."""
    hidden_size: int = 0
    buffers: frozenset[str] = frozenset()
    """The last two parts of the names of its buffers, which are no weights."""


def ask_class(folder: Path, config: Mapping[str, object]) -> ClassStacks:
    """Build a model without weights, and look at its experts and its buffers.

    The class is one of transformers'; of another model nothing is known.
    """
    from fp8calib.model.geometry_from_config import make_source  # noqa: PLC0415 -- transformers
    from fp8calib.model.load import build_skeleton  # noqa: PLC0415

    try:
        skeleton = build_skeleton(make_source(folder, config))
    except ModelError:
        return ClassStacks()
    # `use_experts_implementation` of transformers 5.23 sets these (`integrations/moe.py`).
    flags = ("has_gate", "has_bias", "is_concatenated", "is_transposed")
    found = {
        tuple(getattr(module, flag) for flag in flags)
        for module in skeleton.modules()
        if all(hasattr(module, flag) for flag in flags)
    }
    layouts = {
        (True, False, True, False): ExpertLayout(order=Order.OUT_IN),
        (True, False, True, True): ExpertLayout(order=Order.IN_OUT),
    }
    buffers = (name for name, each in skeleton.named_buffers() if each.ndim >= _STACK_AXES)
    text = skeleton.config.get_text_config()
    return ClassStacks(
        layout=layouts.get(found.pop()) if len(found) == 1 else None,
        model_type=text.model_type,
        hidden_size=getattr(text, "hidden_size", 0),
        buffers=frozenset(cut_name(name) for name in buffers),
    )


def cut_name(name: str) -> str:
    """Give the last two parts of a tensor's name: wrappers and checkpoints have other roots."""
    return ".".join(name.split(".")[-2:])
