"""The weights of linears, and the places of experts in the tensors that stack them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fp8calib.model.expert_layouts import (
    UNSERVED_STACKS,
    ExpertLayout,
    KnownStacks,
    Order,
    Stack,
    find_layout,
    list_configs,
)
from fp8calib.model.module_paths import name_fused_group

if TYPE_CHECKING:  # the command line needs no safetensors
    from fp8calib.checkpoint.header import TensorEntry

SUFFIX = ".weight"
_LAYER = re.compile(r"(.*?\.\d+)\.")
_STACK_AXES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StackPosition:
    """The position of a matrix in a tensor of the source, [experts, ., .]."""

    tensor: str
    expert: int
    first: int
    """The index of its first output."""
    is_transposed: bool
    """Whether the tensor is [experts, in, out]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """The weight of one linear, [rows, columns]: outputs by inputs."""

    module: str
    """The linear's path in the checkpoint; of an expert, that where each has its own tensor."""
    shape: tuple[int, int]
    dtype: str
    """In the spelling of safetensors."""
    position: StackPosition | None = None
    """Its position in a stack; None where it is a whole tensor of the source."""

    @property
    def tensor(self) -> str:
        """Name the tensor it is written to."""
        return self.module + SUFFIX

    @property
    def source(self) -> str:
        """Name the tensor it is read from."""
        return self.tensor if self.position is None else self.position.tensor

    @property
    def layer(self) -> str:
        """Name the layer it belongs to; empty outside the numbered layers."""
        found = _LAYER.match(self.module)
        return found.group(1) if found else ""

    @property
    def fused_group(self) -> str:
        """Name the fused projection that engines load it into."""
        return name_fused_group(self.module)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllZeroWeight:
    """A weight that is all zeros, whole or in some rows or blocks."""

    tensor: str
    count: int
    """How many of its scales cover only zeros."""
    total: int


class ExpertStacks:
    """The expert stacks of a checkpoint, described by config.json and the shapes of tensors.

    `known` is what the model's class says of stacks, where the type has no layout here.
    """

    def __init__(
        self,
        config: Mapping[str, object],
        tensors: Mapping[str, TensorEntry],
        known: KnownStacks | None = None,
    ) -> None:
        self._tensors = tensors
        found = find_layout(config)
        self._known = found if known is None or found.layout is not None else known
        types = [inner.get("model_type") for inner in list_configs(config)]
        # why engines load the experts of this model in no form of FP8 that is written
        self.unserved = next((why for kind, why in UNSERVED_STACKS.items() if kind in types), "")

    def explain_unknown(self) -> str:
        """Explain why a stack cannot be split."""
        known = self._known
        if self.unserved:
            return f"which engines cannot load in FP8: {self.unserved}"
        if known.layout is None:
            return "in an unknown layout"
        return (
            f"in an unknown layout: {known.model_type} has {known.layout.order} with the hidden "
            f"size {known.hidden_size}"
        )

    def split(self, name: str) -> tuple[Matrix, ...]:
        """List the matrices of a stack, expert by expert; none when its layout is unknown."""
        if (layout := self._known.layout) is None:
            return ()
        stack = next((each for each in layout.stacks if name.endswith(each.ending)), None)
        if stack is None:
            return ()
        fitting = self._list_orientations(layout, stack, name)
        base = name.removesuffix(stack.ending)
        if len(fitting) > 1:
            # A square matrix fits both ways: it is read as the other stack of the same experts.
            # Where that one is transposed, transformers (whose Transpose looks at each shape alone)
            # and vLLM read the square one differently, so its orientation is unknown.
            others = [each for each in layout.stacks if each.projections != stack.projections]
            beside = [self._list_orientations(layout, each, base + each.ending) for each in others]
            fitting = [False] if [False] in beside else []
        if len(fitting) != 1:
            return ()
        entry, is_transposed = self._tensors[name], fitting[0]
        outputs, inputs = _orient(entry.shape, is_transposed=is_transposed)
        rows = outputs // len(stack.projections)
        return tuple(
            Matrix(
                module=f"{base}{stack.base}.{expert}.{projection}",
                shape=(rows, inputs),
                dtype=entry.dtype,
                position=StackPosition(
                    tensor=name, expert=expert, first=number * rows, is_transposed=is_transposed
                ),
            )
            for expert in range(entry.shape[0])
            for number, projection in enumerate(stack.projections)
        )

    def _list_orientations(self, layout: ExpertLayout, stack: Stack, name: str) -> list[bool]:
        """List the orientations that fit a stack's shape: whether it is transposed."""
        shape = self._tensors[name].shape if name in self._tensors else ()
        found = []
        for is_transposed in _ORIENTATIONS[layout.order] if len(shape) == _STACK_AXES else ():
            outputs, inputs = _orient(shape, is_transposed=is_transposed)
            hidden = outputs if stack.projections == ("down_proj",) else inputs
            if hidden == self._known.hidden_size and outputs % len(stack.projections) == 0:
                found.append(is_transposed)
        return found


_ORIENTATIONS: Mapping[Order, tuple[bool, ...]] = {
    Order.OUT_IN: (False,),
    Order.IN_OUT: (True,),
    Order.EITHER: (False, True),
}


def _orient(shape: tuple[int, ...], *, is_transposed: bool) -> tuple[int, int]:
    _, first, second = shape
    return (second, first) if is_transposed else (first, second)
