"""FP8 weights and their scales: names, shapes, and dequantization."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fp8calib.formats.fp8.quantization_config import StoredScheme
from fp8calib.formats.fp8.registry import list_input_scale_names, list_scale_names
from fp8calib.formats.kv.parse_names import parse_name
from fp8calib.model.module_paths import name_fused_group, span_experts
from fp8calib.numerics.cast import round_to_format_
from fp8calib.numerics.formats import E4M3FN, E4M3FNUZ, E5M2, Fp8Format
from fp8calib.numerics.schemes import Granularity, count_blocks

WEIGHT_FORMATS: Mapping[str, Fp8Format] = {
    "F8_E4M3": E4M3FN,
    "F8_E4M3FNUZ": E4M3FNUZ,
    "F8_E5M2": E5M2,
}
"""Name of a dtype in safetensors -> its format."""

_ZERO_POINTS = ("weight_zero_point", "input_zero_point")
_OUTPUT_SCALES = ("output_scale", "prob_output_scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weight:
    """An FP8 weight, its scheme in the config, and the names of its scales."""

    name: str
    module: str
    """Path of the linear; for stacked experts, of the parameter."""
    shape: tuple[int, ...]
    """[out, in]; for stacked experts [experts, ., .]."""
    scale_name: str
    input_scale_name: str | None
    scheme: StoredScheme

    @property
    def fused_group(self) -> str:
        """Name the weight that engines load it into."""
        return name_fused_group(self.module)

    @property
    def input_group(self) -> str:
        """Name the group that shares one static input scale: fused, over all experts of a layer."""
        return span_experts(self.fused_group)


@dataclass(frozen=True, slots=True)
class Companions:
    """The names that scales and zero points of an FP8 weight have, in every tool's spelling."""

    module: str
    scales: tuple[str, ...]
    input_scales: tuple[str, ...]
    zero_points: tuple[str, ...]

    @property
    def all(self) -> tuple[str, ...]:
        """List all of these names."""
        return (*self.scales, *self.input_scales, *self.zero_points)


def name_companions(name: str) -> Companions:
    """Name the scales and zero points that the FP8 weight `name` may have.

    A linear has `X.weight_scale` for `X.weight`. A stacked parameter `X` has `X_scale_inv`
    (transformers), `X_scale` (fbgemm) or `X_weight_scale` (ModelOpt).
    """
    is_linear = name.endswith(".weight")
    module = name.removesuffix(".weight")
    start = f"{module}." if is_linear else f"{module}_"
    scales = list_scale_names()
    if not is_linear:
        scales = (*scales, *(suffix.removeprefix("weight_") for suffix in scales))
    return Companions(
        module,
        scales=tuple(start + suffix for suffix in scales),
        input_scales=tuple(start + suffix for suffix in list_input_scale_names()),
        zero_points=tuple(start + suffix for suffix in _ZERO_POINTS),
    )


def is_companion(name: str) -> bool:
    """Tell from a tensor's name whether it is a scale or a zero point."""
    suffix = name.rpartition(".")[2]
    is_other = suffix in (*_ZERO_POINTS, *_OUTPUT_SCALES)
    return is_other or is_linear_scale(name) or parse_name(name) is not None


def is_linear_scale(name: str) -> bool:
    """Tell from a tensor's name whether it is the scale of a linear's weight or input."""
    return name.rpartition(".")[2] in (*list_scale_names(), *list_input_scale_names())


def list_scale_shapes(
    shape: tuple[int, ...], block: tuple[int, int]
) -> dict[Granularity, tuple[tuple[int, ...], ...]]:
    """List the shapes that the scales of a weight are stored in.

    Args:
        shape: [out, in]; for stacked experts [experts, ., .].
        block: rows and columns of a block.
    """
    blocks = count_blocks(shape, block)
    if len(shape) == 3:
        experts, rows, columns = shape
        return {
            Granularity.TENSOR: ((experts,), (experts, 1, 1), (), (1,)),
            Granularity.CHANNEL: ((experts, rows, 1), (experts, 1, columns)),
            Granularity.BLOCK: (blocks,),
        }
    return {
        Granularity.TENSOR: ((), (1,)),
        Granularity.CHANNEL: ((shape[0],), (shape[0], 1)),
        Granularity.BLOCK: (blocks, (blocks[0], 1, blocks[1], 1)),
    }


def spread_scale(weight: Fp8Weight, scale: torch.Tensor) -> torch.Tensor:
    """Reshape a stored fp32 scale to the axes of its weight.

    The last axis has length 1, the weight's length, or the number of blocks; every other axis has
    length 1 or the weight's length.
    """
    if scale.numel() == 1:
        return scale.reshape((1,) * len(weight.shape))
    if weight.scheme.weights is Granularity.BLOCK:
        block, num_rows = weight.scheme.block, weight.shape[-2]
        blocks = scale.reshape(count_blocks(weight.shape, block))
        return blocks.repeat_interleave(min(block[0], num_rows), dim=-2)[..., :num_rows, :]
    if scale.dim() == 1:
        return scale.reshape(-1, *(1,) * (len(weight.shape) - 1))
    return scale


def dequantize(codes: torch.Tensor, scale: torch.Tensor, block_columns: int) -> torch.Tensor:
    """Multiply codes by their scales in fp32; torch converts every FP8 code to its exact value.

    Args:
        codes: some or all rows of a weight, of any FP8 dtype.
        scale: the result of `spread_scale` for these rows.
        block_columns: columns of a block.
    """
    values = codes.to(torch.float32)
    if scale.shape[-1] in (1, values.shape[-1]):
        return values.mul_(scale)
    if values.shape[-1] == scale.shape[-1] * block_columns:
        values.view(*values.shape[:-1], -1, block_columns).mul_(scale.unsqueeze(-1))
        return values
    for block in range(scale.shape[-1]):
        columns = slice(block * block_columns, (block + 1) * block_columns)
        values[..., columns].mul_(scale[..., block : block + 1])
    return values


def requantize(values: torch.Tensor, scale: float, fmt: Fp8Format) -> torch.Tensor:
    """Round fp32 `values` in place to what `fmt` can represent with `scale`.

    vLLM 0.32.0 does so at load (`w8a8_utils.py:requantize_with_max_scale`). Its values are fp16
    between the two scales; that rounding is not repeated here.
    """
    return round_to_format_(values.div_(scale), fmt).mul_(scale)
