"""The tensors of FP8 weights: dtypes, and names and shapes of scales in every tool's spelling."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fp8calib.formats.fp8.registry import list_scale_names
from fp8calib.formats.kv.parse_names import parse_name
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


def name_weight_scales(name: str, *, of_inputs: bool = False) -> tuple[str, ...]:
    """Name the scales that the FP8 weight `name` may have, or those of its input.

    A linear has `X.weight_scale` for `X.weight`. A stacked parameter `X` has `X_scale_inv`
    (transformers), `X_scale` (fbgemm) or `X_weight_scale` (ModelOpt).
    """
    suffixes = list_scale_names(of_inputs=of_inputs)
    if name.endswith(".weight") or of_inputs:
        return _name_beside(name, suffixes)
    short = tuple(suffix.removeprefix("weight_") for suffix in suffixes)
    return _name_beside(name, (*suffixes, *short))


def name_companions(name: str) -> tuple[str, ...]:
    """Name all scales and zero points that the FP8 weight `name` and its input may have."""
    scales = (*name_weight_scales(name), *name_weight_scales(name, of_inputs=True))
    return (*scales, *_name_beside(name, _ZERO_POINTS))


def _name_beside(name: str, suffixes: Iterable[str]) -> tuple[str, ...]:
    start = name.removesuffix("weight") if name.endswith(".weight") else f"{name}_"
    return tuple(f"{start}{suffix}" for suffix in suffixes)


def is_companion(name: str) -> bool:
    """Tell from a tensor's name whether it is a scale or a zero point."""
    suffix = name.rpartition(".")[2]
    is_other = suffix in (*_ZERO_POINTS, *_OUTPUT_SCALES)
    return is_other or is_linear_scale(name) or parse_name(name) is not None


def is_linear_scale(name: str) -> bool:
    """Tell from a tensor's name whether it is the scale of a linear's weight or input."""
    return name.rpartition(".")[2] in (*list_scale_names(), *list_scale_names(of_inputs=True))


def list_scale_shapes(
    shape: tuple[int, ...], block: tuple[int, int]
) -> dict[Granularity, tuple[tuple[int, ...], ...]]:
    """List the shapes that the scales of a weight are stored in: [out, in], or [experts, ., .]."""
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
