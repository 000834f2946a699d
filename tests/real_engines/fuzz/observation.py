"""What an engine did with a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

_BLOCK = 128
_MX = 32
_NAN_EXPONENT = 255
_CLOSE = 0.1
"""Larger than what rounding to e4m3 does to a matrix (0.03), smaller than what a damage does."""
_CLOSE_ROW = 0.5
"""The same of a single row, which has few numbers, and may have a scale of its own."""
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPair:
    """The scales that one attention layer multiplies by; empty where it has none."""

    k: tuple[float, ...]
    v: tuple[float, ...]
    is_fp8: bool = True
    """Whether its cache is quantized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What an engine did: an error, or what it holds."""

    error: str = ""
    """The exception's type and text, and the engine's file and line; empty where it loads."""
    layers: Mapping[int, HeldPair] = field(default_factory=dict)
    """By index; without an entry where nothing can be said of a layer."""
    weights_fault: str = ""
    """How the weights it computes with differ from the model's; empty where they do not."""


def is_scale(value: float) -> bool:
    """Whether a number can be a scale."""
    return math.isfinite(value) and value > 0


def compare_matrices(held: torch.Tensor, meant: torch.Tensor) -> float:
    """Give the norm of the difference over the norm; either matrix may be transposed.

    That of the worst row is given where it is too large and that of the matrix is not.
    """
    meant = meant.float()
    ways = (held.float(), held.float().transpose(-1, -2)) if held.dim() > 1 else (held.float(),)
    return min(
        (_find_error(way, meant) for way in ways if way.shape == meant.shape), default=math.inf
    )


def _find_error(held: torch.Tensor, meant: torch.Tensor) -> float:
    if torch.equal(held, meant):
        return 0.0
    differences, norms = (held - meant).norm(dim=-1), meant.norm(dim=-1)
    whole, rows = float(differences.norm() / norms.norm()), (differences / norms).nan_to_num(nan=0)
    if math.isnan(whole):
        return math.inf
    worst = float(rows.max())
    return worst if whole < _CLOSE and worst > _CLOSE_ROW else whole


def describe_difference(held: Tensors, meant: Tensors) -> str:
    """Say how tensors differ from those that are meant; empty where rounding explains it.

    A weight that the model does not have, such as one of a layer too many, is one that nothing set.
    """
    for name, matrix in meant.items():
        if not matrix.dim() or matrix.isnan().any():  # NaN: the engine does not load it at all
            continue
        if name not in held:
            return f"{name} is not there"
        error = compare_matrices(held[name], matrix)
        if not error < _CLOSE:
            return f"{name} differs by {error:.2g} of its norm"
    more = (name for name in held if name.endswith(".weight") and name not in meant)
    return next((f"{name} is of no tensor of the model" for name in more), "")


def dequantize(tensors: Tensors, *, is_transposed: bool = False) -> dict[str, torch.Tensor]:
    """Multiply the FP8 matrices of an engine by their scales; give the others as they are.

    Args:
        tensors: by name.
        is_transposed: square matrices are [in, out].
    """
    found = dict(tensors)
    for name, tensor in tensors.items():
        scale = next((tensors[n] for n in _name_scales(name) if n in tensors), None)
        if tensor.dtype in FP8_DTYPES and scale is not None:
            if scale.dtype is torch.uint8:  # MXFP8, whose kernels want no other layout
                powers = torch.exp2(scale.float() - 127)
                powers[scale == _NAN_EXPONENT] = torch.nan
                spread = powers.repeat_interleave(_MX, -1)
                spread = spread if spread.shape == tensor.shape else None
            else:
                spread = _spread(scale.float(), tensor.shape, is_transposed=is_transposed)
            found[name] = tensor.float() if spread is None else tensor.float() * spread
    return found


def _name_scales(name: str) -> tuple[str, str]:
    return f"{name}_scale_inv", f"{name}_scale"


def _spread(scale: torch.Tensor, shape: torch.Size, *, is_transposed: bool) -> torch.Tensor | None:
    """Give every element of a weight its scale; None where a scale has another shape.

    The scale is one number, or by output, by part of a stack of experts, or by block.
    """
    *experts, rows, columns = shape
    blocks = (*experts, -(-rows // _BLOCK), -(-columns // _BLOCK))
    if scale.numel() == 1:
        found = scale.reshape(())
    elif not experts and scale.numel() in {rows, columns} and 1 in {*scale.shape, scale.dim()}:
        by_column = is_transposed if rows == columns else scale.numel() == columns
        found = scale.reshape(1, -1) if by_column else scale.reshape(-1, 1)
    elif experts and scale.shape == (*experts,):
        found = scale.reshape(-1, 1, 1)
    elif experts and scale.shape == (*experts, 2):
        found = scale.repeat_interleave(rows // 2, 1)[..., None]
    elif scale.shape == blocks:
        row, column = (torch.arange(size) // _BLOCK for size in (rows, columns))
        found = scale[..., row, :][..., column]
    else:
        found = scale if scale.shape == (*experts, rows, 1) else None
    return found
