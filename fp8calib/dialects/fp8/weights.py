"""FP8 weights and their scales: how they are called, their shapes, and their product."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fp8calib.dialects.kv.tensor_names import parse_name
from fp8calib.fp8.cast import round_to_format_
from fp8calib.fp8.formats import E4M3FN, E4M3FNUZ, E5M2, Fp8Format
from fp8calib.fp8.schemes import BLOCK, Granularity

WEIGHT_FORMATS: Mapping[str, Fp8Format] = {
    "F8_E4M3": E4M3FN,
    "F8_E4M3FNUZ": E4M3FNUZ,
    "F8_E5M2": E5M2,
}
"""Safetensors' name of a dtype -> its format."""

_SCALES = ("weight_scale", "weight_scale_inv")
_INPUT_SCALES = ("input_scale", "activation_scale")
_ZERO_POINTS = ("weight_zero_point", "input_zero_point")
_OUTPUT_SCALES = ("output_scale", "prob_output_scale")
_FUSED_PROJECTIONS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
    ("c_fc_0", "c_fc_1"),
)
"""Projections of one module that engines load into one weight (vLLM 0.32.0 `models/*.py`)."""
FUSED_NAME = {part: "+".join(parts) for parts in _FUSED_PROJECTIONS for part in parts}
"""Projection -> what it is loaded into, for those that are loaded with others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weight:
    """An FP8 weight, and what its scales are called."""

    name: str
    module: str
    """The linear's path; of stacked experts, the parameter's."""
    shape: tuple[int, ...]
    """[out, in], or [experts, ., .] for stacked experts."""
    scale_name: str
    input_scale_name: str | None
    granularity: Granularity
    block: tuple[int, int] = BLOCK
    """Rows and columns that share a scale, where the granularity is `BLOCK`."""

    @property
    def fused_group(self) -> tuple[str, str]:
        """Name what the weight is loaded into: the parent module, and the fused projection."""
        parent, _, projection = self.module.rpartition(".")
        return parent, FUSED_NAME.get(projection, projection)

    @property
    def input_group(self) -> tuple[str, str]:
        """Name what shares one static input scale: as `fused_group`, over all experts."""
        parent, projection = self.fused_group
        outer, _, expert = parent.rpartition(".")
        is_expert = expert.isdecimal() and outer.rpartition(".")[2] == "experts"
        return (outer if is_expert else parent), projection


@dataclass(frozen=True, slots=True)
class Companions:
    """The names of an FP8 weight's companions, in every tool's spelling."""

    module: str
    scales: tuple[str, ...]
    input_scales: tuple[str, ...]
    zero_points: tuple[str, ...]

    @property
    def all(self) -> tuple[str, ...]:
        """List all names that belong to the weight."""
        return (*self.scales, *self.input_scales, *self.zero_points)


def name_companions(name: str) -> Companions:
    """Name the tensors that may stand beside the FP8 weight `name`.

    A linear's are `X.weight_scale` beside `X.weight`. A stacked parameter `X` has `X_scale_inv`
    (transformers), `X_scale` (fbgemm) or `X_weight_scale` (ModelOpt).
    """
    is_linear = name.endswith(".weight")
    module = name.removesuffix(".weight")
    start = f"{module}." if is_linear else f"{module}_"
    scales = _SCALES if is_linear else (*_SCALES, "scale", "scale_inv")
    return Companions(
        module,
        scales=tuple(start + suffix for suffix in scales),
        input_scales=tuple(start + suffix for suffix in _INPUT_SCALES),
        zero_points=tuple(start + suffix for suffix in _ZERO_POINTS),
    )


def is_companion(name: str) -> bool:
    """Tell whether a tensor is by its name a scale or a zero point, whatever stands beside it."""
    suffix = name.rpartition(".")[2]
    known = (*_SCALES, *_INPUT_SCALES, *_ZERO_POINTS, *_OUTPUT_SCALES)
    return suffix in known or parse_name(name) is not None


def is_orphan(name: str) -> bool:
    """Tell whether a tensor is by its name the scale of a weight or of its input."""
    return name.rpartition(".")[2] in (*_SCALES, *_INPUT_SCALES)


def list_scale_shapes(
    shape: tuple[int, ...], block: tuple[int, int]
) -> dict[Granularity, tuple[tuple[int, ...], ...]]:
    """List the shapes in which scales of a weight are stored.

    Args:
        shape: [out, in], or of stacked experts [experts, ., .].
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
    """Bring a scale, fp32 as stored, to as many axes as the weight has.

    Every axis but the last is whole or 1. The last is 1, the weight's, or the number of blocks.
    """
    if scale.numel() == 1:
        return scale.reshape((1,) * len(weight.shape))
    if weight.granularity is Granularity.BLOCK:
        blocks = scale.reshape(count_blocks(weight.shape, weight.block))
        num_rows = weight.shape[-2]
        return blocks.repeat_interleave(min(weight.block[0], num_rows), dim=-2)[..., :num_rows, :]
    if scale.dim() == 1:
        return scale.reshape(-1, *(1,) * (len(weight.shape) - 1))
    return scale


def dequantize(codes: torch.Tensor, scale: torch.Tensor, block_columns: int) -> torch.Tensor:
    """Multiply codes by their scales, in fp32; torch converts every FP8 code to its exact value.

    Args:
        codes: any FP8 dtype, some or all rows of a weight.
        scale: from `spread_scale`, for these rows.
        block_columns: columns of a block.
    """
    values = codes.to(torch.float32)
    if scale.shape[-1] in (1, values.shape[-1]):
        return values.mul_(scale)
    for block in range(scale.shape[-1]):
        columns = slice(block * block_columns, (block + 1) * block_columns)
        values[..., columns].mul_(scale[..., block : block + 1])
    return values


def requantize(values: torch.Tensor, scale: float, fmt: Fp8Format) -> torch.Tensor:
    """Round fp32 `values` in place to what `fmt` holds under `scale`.

    As vLLM 0.32.0 does at load (`w8a8_utils.py:requantize_with_max_scale`), but for its fp16
    between the two scales, whose rounding is left out.
    """
    return round_to_format_(values.div_(scale), fmt).mul_(scale)


def count_blocks(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Count the blocks of a weight, those at the edges included: [..., rows, columns]."""
    rows, columns = shape[-2:]
    return (*shape[:-2], -(-rows // block[0]), -(-columns // block[1]))
