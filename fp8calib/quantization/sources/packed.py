"""Decode INT4, INT8 and FP4 weights, and FP8 in blocks that no other command reads.

Integers of compressed-tensors 0.20 (`compressors/pack_quantized`, `naive_quantized`): a weight is
`X.weight_packed` (integers in words of an int32, the first in the lowest bits, each plus half of
their range) with `X.weight_shape`, or int8 `X.weight`. Its scale `X.weight_scale` is one number, or
one for each row, or for each row and group of columns. Zero points have the shape of the scale:
int8, or packed too, along the rows.

FP4 is NVFP4 of compressed-tensors and ModelOpt, and MXFP4 of these and of gpt_oss. Two e2m1 numbers
are in a byte, the first in its low bits. Each group of 16 or 32 columns of a row has a scale; a
second scale is for the whole weight. ModelOpt multiplies by it (`weight_scale_2`),
compressed-tensors 0.20 divides by it (`weight_global_scale`, `compressors/nvfp4`; `mxfp4`).
gpt_oss stores its experts as `X_blocks` [experts, out, in / 32, 16] and `X_scales`, and its
unquantized form `X` is [experts, in, out] (transformers 5.23, `integrations/mxfp4.py`).

DeepSeek-V4 stores FP8 in blocks and MXFP4, in int8, as `X.weight`, both with `X.scale` of powers of
two (vLLM 0.33.0 `models/deepseek_v4/nvidia/model.py`, read).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

import torch

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.header import FLOATS
from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.errors import ModelError, shorten
from fp8calib.formats.fp8.quantization_config import read_block
from fp8calib.formats.fp8.uniform import BLOCK_KEY
from fp8calib.formats.fp8.weights import WEIGHT_FORMATS
from fp8calib.numerics.encode import decode_rows, decode_scale
from fp8calib.numerics.schemes import BLOCK, GROUP_SIZE, MX_BLOCK, count_blocks

_PACKED = ".weight_packed"
_BLOCKS = "_blocks"
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)])
_FP4_PAIRS = torch.stack((_VALUES.repeat(16), _VALUES.repeat_interleave(16)), dim=-1)
_FP4_PAIRS = _FP4_PAIRS.view(torch.int64).flatten()
"""The two fp32 numbers of every byte: looked up together in a sixth of the time."""
_INTEGERS = torch.arange(-8, 8, dtype=torch.int16)
_INT4_PAIRS = torch.stack((_INTEGERS.repeat(16), _INTEGERS.repeat_interleave(16)), dim=-1)
_INT4_PAIRS = _INT4_PAIRS.view(torch.int32).flatten()
"""The two int16 numbers of every byte."""
_TURNED_ROWS = 64
_GROUPS: Mapping[str, tuple[int, str]] = {"F8_E4M3": (16, "NVFP4"), "U8": (32, "MXFP4")}
"""By dtype of the scales: how many columns share one, and the format. MXFP4's are powers of two."""
_FP4_COMPANIONS = (
    *("weight_scale", "weight_scale_2", "weight_global_scale", "input_scale"),
    "input_global_scale",
)
_HINT = "download the checkpoint again, or name the unquantized model"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeight:
    """A quantized weight, as it is stored."""

    form: str
    """The name of the format."""
    shape: tuple[int, ...]
    """The shape of the decoded weight."""
    parts: tuple[str, ...]
    """The names of all tensors that may store it; the first stores its codes."""
    decode: Callable[[int, int], torch.Tensor]
    """Decode rows of the first axis, from start to stop (exclusive): fp32."""
    scale: str = ""
    """The name of the scales of integers."""
    zero_point: str = ""
    """The name of the zero points of integers; empty if there are none."""


def find_integers(checkpoint: Checkpoint) -> Iterator[tuple[str, StoredWeight]]:
    """Find the weights of integers in a checkpoint, by the name of the weight."""
    for stored, entry in checkpoint.tensors.items():
        module = stored.rpartition(".")[0]
        if stored.endswith(_PACKED) and entry.dtype == "I32":
            shape = _read_shape(checkpoint, f"{module}.weight_shape")
            sizes = {4: (shape[0], -(-shape[1] // 8)), 8: (shape[0], -(-shape[1] // 4))}
            bits = next((each for each, packed in sizes.items() if packed == entry.shape), 0)
        elif stored.endswith(".weight") and entry.dtype == "I8" and len(entry.shape) == 2:
            shape, bits = (entry.shape[0], entry.shape[1]), 8
        else:
            continue
        if not bits:
            raise _unfit(checkpoint, stored, f"integers of 4 or 8 bits of a weight {list(shape)}")
        yield f"{module}.weight", _find_integer_weight(checkpoint, module, stored, shape, bits)


def _find_integer_weight(
    checkpoint: Checkpoint, module: str, stored: str, shape: tuple[int, int], bits: int
) -> StoredWeight:
    scale, point = f"{module}.weight_scale", f"{module}.weight_zero_point"
    grid, in_word = _find_grid(checkpoint, scale, shape), 32 // bits
    zeros = checkpoint.tensors.get(point)
    if zeros is not None:
        packed = (-(-grid[0] // in_word), *grid[1:]) if len(grid) == 2 else None
        if (zeros.dtype, zeros.shape) not in (("I8", grid), ("I32", packed)):
            raise _unfit(checkpoint, point, f"zero points for scales {list(grid)}")

    def read(name: str, start: int, stop: int) -> torch.Tensor:
        """Read scales or zero points: fp32 [rows, groups], one row for a whole weight."""
        if prod(grid) == 1:
            start, stop = 0, 1
        if len(grid) < 2:
            return checkpoint.read(name).reshape(1, 1).to(torch.float32)
        if checkpoint.dtype(name) is not torch.int32:
            return checkpoint.read_rows(name, start, stop).to(torch.float32)
        first = start // in_word
        words = checkpoint.read_rows(name, first, -(-stop // in_word))
        points = unpack(words.T, len(words) * in_word, bits).T
        return points[start - first * in_word : stop - first * in_word].to(torch.float32)

    def decode(start: int, stop: int) -> torch.Tensor:
        codes = checkpoint.read_rows(stored, start, stop)
        if stored.endswith(_PACKED):
            codes = unpack(codes, shape[1], bits)
        scales = _check(checkpoint, scale, read(scale, start, stop))
        values = codes.to(torch.float32).reshape(len(codes), scales.shape[1], -1)
        if zeros is not None:
            values -= read(point, start, stop).unsqueeze(2)
        return values.mul_(scales.unsqueeze(2)).flatten(1)

    return StoredWeight(
        form=f"INT{bits}",
        shape=shape,
        parts=(stored, scale, f"{module}.weight_shape", point),
        decode=decode,
        scale=scale,
        zero_point="" if zeros is None else point,
    )


def _find_grid(checkpoint: Checkpoint, name: str, shape: tuple[int, int]) -> tuple[int, ...]:
    """Give the shape of the scales of integers: of one number, or [rows, groups of columns]."""
    entry, (rows, columns) = checkpoint.tensors.get(name), shape
    if entry is not None and entry.dtype in FLOATS:
        grid = entry.shape
        is_grid = len(grid) == 2 and grid[0] == rows and grid[1] > 0 and columns % grid[1] == 0
        if is_grid or prod(grid) == 1:
            return grid
    raise _unfit(checkpoint, name, f"float scales of a weight {list(shape)}")


def find_fp4(checkpoint: Checkpoint) -> Iterator[tuple[str, StoredWeight]]:
    """Find the FP4 weights of a checkpoint, by the name of the weight."""
    for stored, entry in checkpoint.tensors.items():
        module = stored.rpartition(".")[0]
        is_modelopt = (
            stored.endswith(".weight") and f"{module}.weight_scale_2" in checkpoint.tensors
        )
        if stored.endswith(_BLOCKS):
            yield stored.removesuffix(_BLOCKS), _find_experts(checkpoint, stored)
        elif (
            entry.dtype == "U8"
            and len(entry.shape) == 2
            and (is_modelopt or stored.endswith(_PACKED))
        ):
            yield f"{module}.weight", _find_fp4_weight(checkpoint, module, stored)


def _find_fp4_weight(checkpoint: Checkpoint, module: str, stored: str) -> StoredWeight:
    rows, octets = checkpoint.tensors[stored].shape
    shape, name = (rows, 2 * octets), f"{module}.weight_scale"
    entry = checkpoint.tensors.get(name)
    group, form = _GROUPS.get(entry.dtype, (0, "")) if entry is not None else (0, "")
    if entry is None or not group or entry.shape != (rows, shape[1] // group):
        what = "scales of 16 columns in e4m3 (NVFP4), or of 32 in uint8 (MXFP4),"
        raise _unfit(checkpoint, name, f"{what} for an FP4 weight {list(shape)}")
    factor = _read_number(checkpoint, f"{module}.weight_scale_2")
    divisor = _read_number(checkpoint, f"{module}.weight_global_scale")

    def decode(start: int, stop: int) -> torch.Tensor:
        values = _decode_fp4(checkpoint.read_rows(stored, start, stop))
        scale = decode_scale(checkpoint.read_rows(name, start, stop))
        if form == "NVFP4":
            scale = scale * factor / divisor
        _check(checkpoint, name, scale)
        return values.view(*scale.shape, group).mul_(scale.unsqueeze(2)).flatten(1)

    parts = (stored, *(f"{module}.{leaf}" for leaf in _FP4_COMPANIONS))
    return StoredWeight(form=form, shape=shape, parts=parts, decode=decode)


def _find_experts(checkpoint: Checkpoint, stored: str) -> StoredWeight:
    """Find stacked experts of gpt_oss, which are decoded as [experts, in, out]."""
    name = f"{stored.removesuffix(_BLOCKS)}_scales"
    blocks, scale = checkpoint.tensors[stored], checkpoint.tensors.get(name)
    is_blocks = blocks.dtype == "U8" and len(blocks.shape) == 4 and blocks.shape[3] == 16
    if not is_blocks or scale is None or (scale.dtype, scale.shape) != ("U8", blocks.shape[:3]):
        wanted = f"scales in uint8 for blocks {list(blocks.shape)} of gpt_oss, which have 16 bytes"
        raise _unfit(checkpoint, name, wanted)
    experts, rows, groups, _ = blocks.shape

    def decode(start: int, stop: int) -> torch.Tensor:
        octets = checkpoint.read_rows(stored, start, stop)
        powers = decode_scale(checkpoint.read_rows(name, start, stop))
        values = torch.empty(stop - start, 32 * groups, rows)
        # transposed in parts that fit in a core's cache: at once it takes three times as long
        for expert, first in product(range(stop - start), range(0, rows, _TURNED_ROWS)):
            part = slice(first, first + _TURNED_ROWS)
            outputs = _decode_fp4(octets[expert, part]).mul_(powers[expert, part].unsqueeze(2))
            values[expert, :, part] = outputs.flatten(1).T
        return values

    shape = (experts, 32 * groups, rows)
    return StoredWeight(form="MXFP4", shape=shape, parts=(stored, name), decode=decode)


def find_blocks(
    checkpoint: Checkpoint, config: Mapping[str, object]
) -> Iterator[tuple[str, StoredWeight]]:
    """Find weights of DeepSeek-V4, and FP8 in blocks whose width is not 128.

    The checkpoint has quant_method fp8; `config` is its quantization config.
    """
    size = config.get(BLOCK_KEY)
    block = BLOCK if size is None else read_block(checkpoint.folder / CONFIG_NAME, BLOCK_KEY, size)
    leaves = (".scale", ".weight_scale_inv") if block[1] != GROUP_SIZE else (".scale",)
    for scale in checkpoint.tensors:
        leaf = next(filter(scale.endswith, leaves), None)
        name = f"{scale.removesuffix(leaf or '')}.weight"
        entry = checkpoint.tensors.get(name) if leaf else None
        dtypes = ("I8", *WEIGHT_FORMATS)
        if entry is not None and entry.dtype in dtypes and len(entry.shape) == 2:
            is_fp4 = entry.dtype == "I8"
            yield name, _find_blocks(checkpoint, name, scale, MX_BLOCK if is_fp4 else block)


def _find_blocks(
    checkpoint: Checkpoint, name: str, scale: str, block: tuple[int, int]
) -> StoredWeight:
    entry = checkpoint.tensors[name]
    is_fp4 = entry.dtype == "I8"
    shape = (entry.shape[0], entry.shape[1] * (2 if is_fp4 else 1))
    if checkpoint.tensors[scale].shape != count_blocks(shape, block):
        raise _unfit(checkpoint, scale, f"scales of a weight {list(shape)} in blocks {list(block)}")

    def decode(start: int, stop: int) -> torch.Tensor:
        codes = checkpoint.read_rows(name, start, stop)
        values = _decode_fp4(codes.view(torch.uint8)) if is_fp4 else decode_rows(codes)
        first = start // block[0]
        scales = decode_scale(checkpoint.read_rows(scale, first, -(-stop // block[0])))
        spread = _check(checkpoint, scale, scales).repeat_interleave(block[1], 1)[:, : shape[1]]
        values *= spread[torch.arange(start, stop) // block[0] - first]
        if not bool(values.isfinite().all()):
            raise _refusal(checkpoint, f"{shorten(name)} holds NaN or infinity")
        return values

    form = "MXFP4" if is_fp4 else "FP8"
    return StoredWeight(form=form, shape=shape, parts=(name, scale), decode=decode)


def _decode_fp4(octets: torch.Tensor) -> torch.Tensor:
    """Decode the two numbers of every byte: twice as many columns, fp32."""
    pairs = _FP4_PAIRS.index_select(0, octets.flatten().to(torch.int32))
    return pairs.view(torch.float32).view(*octets.shape[:-1], -1)


def unpack(words: torch.Tensor, num_columns: int, bits: int) -> torch.Tensor:
    """Unpack int32 words of 4- or 8-bit integers, the first in the lowest bits.

    Args:
        words: int32 [R, words of a row], each number plus half of its range.
        num_columns: numbers per row; the rest of the last word is padding.
        bits: bits of a number.

    Returns:
        int16 [R, num_columns]; of 4 bits from -8 to 7.
    """
    octets = words.flatten().view(torch.uint8)  # a column alone keeps its stride
    if bits == 4:
        numbers = _INT4_PAIRS.index_select(0, octets.flatten().to(torch.int32)).view(torch.int16)
    else:
        numbers = octets.to(torch.int16) - 128
    return numbers.view(len(words), -1)[:, :num_columns]


def _read_shape(checkpoint: Checkpoint, name: str) -> tuple[int, int]:
    sizes = checkpoint.read(name).flatten().tolist() if name in checkpoint.tensors else []
    if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise _unfit(checkpoint, name, "the two sizes of a weight")
    return sizes[0], sizes[1]


def _read_number(checkpoint: Checkpoint, name: str) -> float:
    """Read the scale of a whole weight; 1 if there is none."""
    if name not in checkpoint.tensors:
        return 1.0
    stored = checkpoint.read(name).float()
    value = float(stored) if stored.numel() == 1 else 0.0
    if not 0 < value < float("inf"):
        raise _refusal(checkpoint, f"{shorten(name)} is not one number above zero")
    return value


def _check(checkpoint: Checkpoint, name: str, scale: torch.Tensor) -> torch.Tensor:
    """Give the scales; refuse a negative one, NaN and infinity."""
    if not bool((scale.isfinite() & (scale >= 0)).all()):
        raise _refusal(checkpoint, f"{shorten(name)} holds what is not a scale")
    return scale


def _unfit(checkpoint: Checkpoint, name: str, wanted: str) -> ModelError:
    """Make the error for a part of a weight that is missing, or of another dtype or shape."""
    entry = checkpoint.tensors.get(name)
    found = "missing" if entry is None else f"{entry.dtype} {list(entry.shape)}"
    return _refusal(checkpoint, f"{shorten(name)} is {found}, expected {wanted}")


def _refusal(checkpoint: Checkpoint, fault: str) -> ModelError:
    return ModelError(f"{checkpoint.folder}: {fault}", hint=_HINT)
