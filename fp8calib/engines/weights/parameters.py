"""The parameters that engines create for linears, and the tensors that fit into them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

Shape = tuple[int, ...]
WEIGHT = "weight"
INPUT_SCALE = "input_scale"
PLAIN_DTYPES = ("BF16", "F16", "F32", "F64")
"""The dtypes of weights that are not quantized."""


class Fit(StrEnum):
    """What becomes of a tensor of some shape that is copied into a parameter."""

    WHOLE = "whole"
    CUT = "cut"
    """The parameter is smaller and gets the first part."""
    PARTIAL = "partial"
    """The parameter is larger, and the rest of it keeps what it held."""
    PADDED = "padded"
    """The parameter is larger, and the rest of it becomes zero."""
    REFUSED = "refused"
    """Loading fails."""


class Unfilled(StrEnum):
    """What becomes of a parameter that gets no tensor."""

    MEMORY = "the engine uses uninitialised memory"
    LOWEST = "the engine uses -3.4e38, the lowest float32"
    ONE = "the engine uses 1.0"
    RANDOM = "the engine uses random numbers"
    NONE = "the weight stays FP8, and the first forward pass fails (RuntimeError)"
    REFUSED = "loading fails (NotImplementedError)"
    JOINED = "loading fails (RuntimeError: the experts of a layer are joined)"
    ABSENT = "loading fails (RuntimeError: does not exist)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of a linear, as far as one tensor of a checkpoint fills it."""

    shape: Shape
    fit: Callable[[Shape], Fit]
    unfilled: Unfilled
    is_shared: bool = False
    """The engine uses the largest of those of the linears that are joined with this one."""


def fit_number(shape: Shape) -> Fit:
    """Fit a tensor into a parameter of one number: as itself, or as a vector of one."""
    return Fit.WHOLE if shape in ((), (1,)) else Fit.REFUSED


def fit_exactly(expected: Shape) -> Callable[[Shape], Fit]:
    """Make the fit of a parameter that takes only its own shape."""
    return lambda shape: Fit.WHOLE if shape == expected else Fit.REFUSED


def fit_slice(expected: Shape, axis: int, *, short: Fit = Fit.REFUSED) -> Callable[[Shape], Fit]:
    """Make the fit of a parameter that gets a slice along `axis`: longer tensors are cut.

    Args:
        expected: the shape of the parameter.
        axis: of the slice.
        short: what becomes of a tensor that is shorter there.
    """

    def fit(shape: Shape) -> Fit:
        others = [place for place in range(len(expected)) if place != axis]
        if len(shape) != len(expected) or any(shape[i] != expected[i] for i in others):
            return Fit.REFUSED
        if shape[axis] == expected[axis]:
            return Fit.WHOLE
        return Fit.CUT if shape[axis] > expected[axis] else short

    return fit
