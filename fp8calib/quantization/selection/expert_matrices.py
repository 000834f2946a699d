"""Find the matrices in a tensor of stacked experts, by model type, hidden size and shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fp8calib.geometry.expert_layouts import (
    UNSERVED_STACKS,
    ExpertLayout,
    Order,
    Stack,
    find_layout,
    find_stack,
    list_types,
)

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
class ExpertMatrix:
    """The weight of one projection of one expert."""

    module: str
    """Its path where every expert has its own tensor."""
    shape: tuple[int, int]
    """[out, in]."""
    position: StackPosition


class ExpertStacks:
    """The expert stacks of a checkpoint, described by config.json and the shapes of tensors."""

    def __init__(self, config: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes
        self._type, self._layout, self._hidden_size = find_layout(config)
        self._unserved = next(
            (why for kind, why in UNSERVED_STACKS.items() if kind in list_types(config)), None
        )

    def explain_unknown(self) -> str:
        """Explain why a stack cannot be split."""
        if self._unserved is not None:
            return f"which engines cannot load in FP8: {self._unserved}"
        if self._layout is None:
            return "in an unknown layout"
        return (
            f"in an unknown layout: {self._type} has {self._layout.order} with the "
            f"hidden size {self._hidden_size}"
        )

    def split(self, name: str) -> tuple[ExpertMatrix, ...]:
        """List the matrices of a stack, expert by expert; none when its layout is unknown."""
        stack = find_stack(self._layout, name) if self._layout else None
        if stack is None or self._layout is None:
            return ()
        turns = self._list_turns(self._layout, stack, name)
        if len(turns) > 1:  # a square matrix fits both ways
            turns = self._list_turns_beside(self._layout, stack, name)
        if len(turns) != 1:
            return ()
        shape = self._shapes[name]
        return tuple(_list_matrices(stack, name, shape, is_transposed=turns[0]))

    def _list_turns(self, layout: ExpertLayout, stack: Stack, name: str) -> list[bool]:
        """List the orientations that fit a stack's shape: whether it is transposed."""
        shape = self._shapes.get(name, ())
        turns = _ORIENTATIONS[layout.order] if len(shape) == _STACK_AXES else ()
        return [turn for turn in turns if self._fits(stack, shape, is_transposed=turn)]

    def _list_turns_beside(self, layout: ExpertLayout, stack: Stack, name: str) -> list[bool]:
        """List the orientations of a square stack that fit the other stack of the same experts.

        Where that one is transposed, transformers (whose Transpose looks at each shape alone) and
        vLLM read the square one differently, so its orientation is unknown.
        """
        base = name.removesuffix(stack.ending)
        others = [other for other in layout.stacks if other.projections != stack.projections]
        beside = [self._list_turns(layout, other, base + other.ending) for other in others]
        return [False] if [False] in beside else []

    def _fits(self, stack: Stack, shape: tuple[int, ...], *, is_transposed: bool) -> bool:
        outputs, inputs = _orient(shape, is_transposed=is_transposed)
        hidden = outputs if stack.projections == ("down_proj",) else inputs
        return hidden == self._hidden_size and outputs % len(stack.projections) == 0


_ORIENTATIONS: Mapping[Order, tuple[bool, ...]] = {
    Order.OUT_IN: (False,),
    Order.IN_OUT: (True,),
    Order.EITHER: (False, True),
}


def _orient(shape: tuple[int, ...], *, is_transposed: bool) -> tuple[int, int]:
    _, first, second = shape
    return (second, first) if is_transposed else (first, second)


def _list_matrices(
    stack: Stack, name: str, shape: tuple[int, ...], *, is_transposed: bool
) -> Iterator[ExpertMatrix]:
    outputs, inputs = _orient(shape, is_transposed=is_transposed)
    rows = outputs // len(stack.projections)
    base = name.removesuffix(stack.ending) + stack.base
    for expert in range(shape[0]):
        for number, projection in enumerate(stack.projections):
            yield ExpertMatrix(
                module=f"{base}.{expert}.{projection}",
                shape=(rows, inputs),
                position=StackPosition(
                    tensor=name, expert=expert, first=number * rows, is_transposed=is_transposed
                ),
            )
