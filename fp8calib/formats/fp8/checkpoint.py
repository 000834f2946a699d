"""Read the weights of an FP8 checkpoint in fp32, as stored or as an engine rounds them again.

Weights are read one at a time: codes times scales. Names and dtypes of the tensors show how the
checkpoint is quantized, and its config has to agree; a tensor that does not fit is an error that
names it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Self

import torch

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.header import TensorEntry
from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.checkpoint.torch_dtypes import TORCH_DTYPES
from fp8calib.errors import refusal
from fp8calib.formats.fp8.match_scales import EXPONENT_DTYPES, Fp8Weight, pair_tensors
from fp8calib.formats.fp8.quantization_config import StoredScheme, contradiction
from fp8calib.formats.fp8.registry import load_finder, refine_dialect
from fp8calib.formats.fp8.weights import WEIGHT_FORMATS, is_companion
from fp8calib.formats.kv.validate import check_scales
from fp8calib.formats.metadata import find_origin
from fp8calib.model.module_paths import name_fused_group, span_experts
from fp8calib.numerics.cast import round_to_format_
from fp8calib.numerics.encode import decode_rows, decode_scale
from fp8calib.numerics.formats import SMALLEST_EXPONENT, SMALLEST_SCALE
from fp8calib.numerics.schemes import Granularity, count_blocks


class Fp8Checkpoint(Checkpoint):
    """A folder of FP8 weights: headers, scales and config are checked, no weight stays in memory.

    `read` and `read_rows` give an FP8 weight as fp32 values, and any other tensor as stored.

    Attributes:
        tensors: all tensors as they are read, except scales and zero points.
        quantized: the names of the FP8 weights.
        dialect: how it is stored.
        fmt: the format of all FP8 weights.
        origin: the model and the text its scales come from; None if they are not recorded.
    """

    def __init__(
        self,
        stored: Checkpoint,
        *,
        fuse: bool = False,
        through_float16: bool = False,
        keeps_equal_scales: bool = False,
    ) -> None:
        """Check everything but the weights.

        Args:
            stored: the checkpoint, whose `tensors` are those to read.
            fuse: share scales as engines do at load: one per-tensor weight scale for projections
                that they fuse, one static input scale for these and for all experts of a layer.
                The shared scale is the largest; weights are rounded again with it.
            through_float16: with `fuse`, dequantize per-tensor weights to fp16 before they are
                rounded again, fused or not, as vLLM does; not the down projections of experts.
            keeps_equal_scales: with `through_float16`, leave out linears of ModelOpt's dialect
                whose fused projections have equal scales.

        Raises:
            ModelError: it is not an FP8 checkpoint, or it is incomplete or inconsistent.
        """
        super().__init__(stored.folder, files=stored.files, index=stored.index)
        self._checkpoint = stored  # with its codes and scales
        dialect, find_scheme = load_finder(self.folder, self.load_config())
        self._weights, companions = pair_tensors(stored, find_scheme)
        self.tensors: Mapping[str, TensorEntry] = MappingProxyType(
            {
                n: TensorEntry("F32", e.shape, 0, 4 * prod(e.shape)) if n in self._weights else e
                for n, e in stored.tensors.items()
                if n not in companions and not is_companion(n)
            }
        )
        self.quantized = frozenset(self._weights)
        self.fmt = WEIGHT_FORMATS[stored.tensors[next(iter(self._weights))].dtype]
        scales = {each.scale_name: each.scheme.weights for each in self._weights.values()}
        for name in scales:
            if not any(dialect.gives_name(name, granularity) for granularity in Granularity):
                fault = f"there is {name}, but quant_method is {dialect.method}"
                raise contradiction(self.folder / CONFIG_NAME, fault)
        self.dialect = refine_dialect(dialect, scales)
        self.origin = find_origin(self.folder, self.files)
        for name in sorted(companions):
            if name.endswith("zero_point") and stored.read(name).to(torch.float32).any():
                hint = "FP8 is symmetric; engines ignore zero points"
                raise refusal(self.file_of(name), f"{name} is not zero", hint=hint)
        # a weight is read in many parts, by several threads
        self._spread_scale = lru_cache(maxsize=2)(self._load_spread_scale)
        self._stored: dict[str, float] = {}
        """The scales of weights [out, in] that have one."""
        for name, weight in self._weights.items():
            scale = self._read_scale(weight.scale_name)  # which checks it
            if weight.scheme.weights is Granularity.TENSOR and len(weight.shape) == 2:
                self._stored[name] = scale.item()
        self._input_scales = {
            name: self._read_scale(weight.input_scale_name).item()
            for name, weight in self._weights.items()
            if weight.input_scale_name is not None
        }
        self._shared: Mapping[str, float] = {}
        self._through_float16: frozenset[str] = frozenset()
        if fuse and through_float16:
            keeps_equal = keeps_equal_scales and self.dialect.name == "modelopt"
            self._through_float16 = frozenset(self._list_requantized(keeps_equal=keeps_equal))
        if fuse:
            self._shared = _share(self._stored, self._name_group)
            self._input_scales = _share(
                self._input_scales, lambda name: span_experts(self._name_group(name))
            )

    @classmethod
    def open(cls, folder: Path, **options: bool) -> Self:
        """Open a Hugging Face checkpoint, with the options of the class."""
        with Checkpoint.open(folder) as stored:
            return cls(stored, **options)

    def make_rows(self, name: str, rows: slice) -> torch.Tensor | None:
        """Dequantize rows of an FP8 weight; it may hold no NaN and no infinity."""
        if name not in self.quantized:
            return None
        start, stop, _ = rows.indices(self.tensors[name].shape[0])
        return self._dequantize(name, self._checkpoint.read_rows(name, start, stop), start)

    def read_clip_limits(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Give the largest magnitude that the file can store for each element of an FP8 weight.

        The scale is the weight's own, not a shared one; the rounding error of the scale's dtype is
        added. `start` and `stop` (exclusive) choose rows.
        """
        weight = self._weights[name]
        scale = self._spread_scale(name)
        scale = scale.expand(weight.shape[0], *scale.shape[1:])[start:stop]
        columns = weight.shape[-1]
        if scale.shape[-1] not in (1, columns):
            scale = scale.repeat_interleave(weight.scheme.block[1], -1)[..., :columns]
        stored = TORCH_DTYPES[self._checkpoint.tensors[weight.scale_name].dtype]
        error = 0.0 if weight.scheme.is_mx else torch.finfo(stored).eps
        limits = scale * (self.fmt.max * (1 + max(error, 2.0**-20)))
        return limits.expand(scale.shape[0], *weight.shape[1:])

    def weight_scale(self, name: str) -> torch.Tensor:
        """Read the scale of an FP8 weight, which multiplies: fp32 in its stored shape.

        If weights share a scale, it is the shared one, which `read` uses too.
        """
        scale = self._read_scale(self._weights[name].scale_name)
        return scale.fill_(self._shared[name]) if name in self._shared else scale

    def scheme(self, name: str) -> StoredScheme:
        """Describe how the FP8 weight `name` and the input of its linear are quantized."""
        return replace(self._weights[name].scheme, input_scale=self._input_scales.get(name))

    def _name_group(self, name: str) -> str:
        """Name the weight that engines load an FP8 weight into."""
        return name_fused_group(name.removesuffix(".weight"))

    def _dequantize(self, name: str, codes: torch.Tensor, start: int) -> torch.Tensor:
        """Dequantize the rows from `start` on; fused weights are rounded again."""
        weight = self._weights[name]
        scale = self._spread_scale(name)
        if scale.shape[0] > 1:
            scale = scale[start : start + codes.shape[0]]
        values = _multiply(codes, scale, weight.scheme.block[1])
        if not _is_finite(values):
            hint = "download it again, or quantize the model again"
            row, *rest = (~values.isfinite()).nonzero()[0].tolist()
            fault = f"{name} holds NaN or infinity at {[start + row, *rest]}"
            raise refusal(self.file_of(name), fault, hint=hint)
        shared = self._shared.get(name)
        if shared is None:
            return values
        if name in self._through_float16:
            values = values.half().float()
        elif shared == self._stored[name]:
            return values
        # vLLM 0.32.0 does so at load (`w8a8_utils.py:requantize_with_max_scale`). Its values are
        # fp16 between the two scales; that rounding is not repeated here.
        return round_to_format_(values.div_(shared), self.fmt).mul_(shared)

    def _load_spread_scale(self, name: str) -> torch.Tensor:
        weight = self._weights[name]
        return _spread_scale(weight, self._read_scale(weight.scale_name))

    def _read_scale(self, name: str) -> torch.Tensor:
        """Read and check a scale: fp32, in its stored shape."""
        stored = self._checkpoint.tensors[name].dtype
        values = decode_scale(self._checkpoint.read(name))
        smallest = SMALLEST_EXPONENT if stored in EXPONENT_DTYPES else SMALLEST_SCALE
        check_scales(self.file_of(name), name, values, stored=stored, smallest=smallest)
        return values

    def _list_requantized(self, *, keeps_equal: bool) -> Iterator[str]:
        """List the per-tensor weights that are dequantized to fp16 and quantized again at load."""
        groups: dict[str, list[float]] = defaultdict(list)
        for name, scale in self._stored.items():
            groups[self._name_group(name)].append(scale)
        for name in self._stored:
            scales = groups[self._name_group(name)]
            if ".experts." in name:
                is_kept = len(scales) == 1
            else:
                is_kept = keeps_equal and len(set(scales)) == 1
            if not is_kept:
                yield name


def _is_finite(values: torch.Tensor) -> bool:
    """Tell whether all elements are finite; `aminmax` propagates NaN and takes 1/14 of the time."""
    return not values.numel() or all(bool(end.isfinite()) for end in torch.aminmax(values))


def _share(scales: Mapping[str, float], group_of: Callable[[str], str]) -> dict[str, float]:
    """Give every scale the largest of its group."""
    groups: dict[str, float] = defaultdict(float)
    for name, scale in scales.items():
        groups[group_of(name)] = max(groups[group_of(name)], scale)
    return {name: groups[group_of(name)] for name in scales}


def _spread_scale(weight: Fp8Weight, scale: torch.Tensor) -> torch.Tensor:
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


def _multiply(codes: torch.Tensor, scale: torch.Tensor, block_columns: int) -> torch.Tensor:
    """Multiply codes by their scales in fp32.

    `codes` are rows of a weight, of any FP8 dtype; `scale` is what `_spread_scale` gives for them.
    """
    values = decode_rows(codes)
    if scale.shape[-1] in (1, values.shape[-1]):
        return values.mul_(scale)
    if values.shape[-1] == scale.shape[-1] * block_columns:
        values.view(*values.shape[:-1], -1, block_columns).mul_(scale.unsqueeze(-1))
        return values
    for block in range(scale.shape[-1]):
        columns = slice(block * block_columns, (block + 1) * block_columns)
        values[..., columns].mul_(scale[..., block : block + 1])
    return values
