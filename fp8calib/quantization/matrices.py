"""The weights of linears, and the places of experts in the tensors that stack them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fp8calib.checkpoint.header import TensorEntry
from fp8calib.model.expert_classes import ClassStacks
from fp8calib.model.expert_layouts import (
    UNSERVED_STACKS,
    ExpertLayout,
    Order,
    Stack,
    find_layout,
    find_stack,
    list_types,
)
from fp8calib.model.module_paths import name_fused_group

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


class ExpertStacks:
    """The expert stacks of a checkpoint, described by config.json and the shapes of tensors.

    Args:
        config: of the model.
        tensors: of the checkpoint.
        known: what the model's class says of stacks, where the type has no layout here.
    """

    def __init__(
        self,
        config: Mapping[str, object],
        tensors: Mapping[str, TensorEntry],
        known: ClassStacks | None = None,
    ) -> None:
        self._tensors = tensors
        self._type, self._layout, self._hidden_size = find_layout(config)
        if self._layout is None and known is not None:
            self._type, self._layout = known.model_type, known.layout
            self._hidden_size = known.hidden_size
        types = list_types(config)
        # why engines load the experts of this model in no form of FP8 that is written
        self.unserved = next((why for kind, why in UNSERVED_STACKS.items() if kind in types), "")

    def explain_unknown(self) -> str:
        """Explain why a stack cannot be split."""
        if self.unserved:
            return f"which engines cannot load in FP8: {self.unserved}"
        if self._layout is None:
            return "in an unknown layout"
        return (
            f"in an unknown layout: {self._type} has {self._layout.order} with the "
            f"hidden size {self._hidden_size}"
        )

    def split(self, name: str) -> tuple[Matrix, ...]:
        """List the matrices of a stack, expert by expert; none when its layout is unknown."""
        layout = self._layout
        stack = find_stack(layout, name) if layout else None
        if stack is None or layout is None:
            return ()
        fitting = self._list_orientations(layout, stack, name)
        if len(fitting) > 1:
            # A square matrix fits both ways: it is read as the other stack of the same experts.
            # Where that one is transposed, transformers (whose Transpose looks at each shape alone)
            # and vLLM read the square one differently, so its orientation is unknown.
            base = name.removesuffix(stack.ending)
            others = [each for each in layout.stacks if each.projections != stack.projections]
            beside = [self._list_orientations(layout, each, base + each.ending) for each in others]
            fitting = [False] if [False] in beside else []
        if len(fitting) != 1:
            return ()
        return tuple(_list_matrices(stack, name, self._tensors[name], is_transposed=fitting[0]))

    def _list_orientations(self, layout: ExpertLayout, stack: Stack, name: str) -> list[bool]:
        """List the orientations that fit a stack's shape: whether it is transposed."""
        shape = self._tensors[name].shape if name in self._tensors else ()
        found = []
        for is_transposed in _ORIENTATIONS[layout.order] if len(shape) == _STACK_AXES else ():
            outputs, inputs = _orient(shape, is_transposed=is_transposed)
            hidden = outputs if stack.projections == ("down_proj",) else inputs
            if hidden == self._hidden_size and outputs % len(stack.projections) == 0:
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


def _list_matrices(
    stack: Stack, name: str, entry: TensorEntry, *, is_transposed: bool
) -> Iterator[Matrix]:
    outputs, inputs = _orient(entry.shape, is_transposed=is_transposed)
    rows = outputs // len(stack.projections)
    base = name.removesuffix(stack.ending) + stack.base
    for expert in range(entry.shape[0]):
        for number, projection in enumerate(stack.projections):
            yield Matrix(
                module=f"{base}.{expert}.{projection}",
                shape=(rows, inputs),
                dtype=entry.dtype,
                position=StackPosition(
                    tensor=name, expert=expert, first=number * rows, is_transposed=is_transposed
                ),
            )
