"""Read int4 checkpoints of compressed-tensors that have one scale per weight.

Such a weight is stored as `X.weight_packed` (eight integers in an int32, the first in the lowest
bits, each plus 8) with `X.weight_shape`, or as int8 `X.weight`; its scale is `X.weight_scale`.
Other int4 weights are errors that name them: the RFC, for which they are read, has one scale per
weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.header import TensorEntry
from fp8calib.checkpoint.model_config import CONFIG_NAME, find_quantization_configs
from fp8calib.dialects.fp8.weights import is_companion
from fp8calib.errors import ModelError, shorten
from fp8calib.fp8.encode import ENCODABLE_DTYPES
from fp8calib.scales.scale_table import SMALLEST_SCALE

_PACKED = ".weight_packed"
_SHAPE = ".weight_shape"
_SCALE = ".weight_scale"
_FORMATS = {"pack-quantized": _PACKED, "int-quantized": ".weight"}
"""Format -> suffix of the tensor with the integers."""
_BITS = 4
_OFFSET = 8
_PER_WORD = 8
_LARGEST_SCALE = torch.finfo(torch.float32).max / _OFFSET
_HINT = "name the unquantized model, or int4 weights with one scale per tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Int4Weight:
    """The tensor with the integers of a weight [out, in], and their scale."""

    stored: str
    shape: tuple[int, int]
    scale: torch.Tensor
    """fp32 []."""


def is_int4_source(checkpoint: Checkpoint) -> bool:
    """Tell whether config.json describes symmetric int4 weights with one scale per tensor."""
    sections = [section for _, section in find_quantization_configs(checkpoint.load_config())]
    return bool(sections) and all(_is_int4(section) for section in sections)


class Int4Source:
    """The tensors of an int4 checkpoint, its quantized weights in fp32: integers times scale.

    Attributes:
        folder: of the checkpoint.
        tensors: quantized weights by their original names, and unquantized tensors; no scales.
        quantizes_inputs: whether the config describes how inputs are quantized too.

    Raises:
        ModelError: config.json contradicts the tensors, or a weight has another format.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.folder = checkpoint.folder
        self._checkpoint = checkpoint
        suffixes: set[str] = set()
        self.quantizes_inputs = False
        for _, section in find_quantization_configs(checkpoint.load_config()):
            suffixes |= self._read_section(section)
        stored = [name for name in checkpoint.tensors if self._holds_integers(name, suffixes)]
        self._weights = {f"{_module(name)}.weight": self._read_weight(name) for name in stored}
        if not self._weights:
            raise self._refusal(f"{CONFIG_NAME} describes int4 weights, but there are none")
        entries = {name: _make_entry(weight) for name, weight in self._weights.items()}
        others = {n: e for n, e in checkpoint.tensors.items() if self._is_plain(n, e)}
        self.tensors: Mapping[str, TensorEntry] = MappingProxyType(others | entries)

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor; an int4 weight in fp32.

        Raises:
            ModelError: there is no such tensor, or an integer has more than four bits.
        """
        weight = self._weights.get(name)
        return self._checkpoint.read(name) if weight is None else self._read(weight, None)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read the rows `start` to `stop` (exclusive) of the first axis, as `read` does."""
        weight = self._weights.get(name)
        if weight is None:
            return self._checkpoint.read_rows(name, start, stop)
        return self._read(weight, (start, stop))

    def scale(self, name: str) -> torch.Tensor:
        """Give the scale of the tensor `name`: fp32 [], 0 where it is not quantized."""
        weight = self._weights.get(name)
        return torch.zeros(()) if weight is None else weight.scale

    def _read_section(self, section: Mapping[str, object]) -> set[str]:
        """Check how integers are stored, and list the suffixes of their names."""
        if section.get("transform_config"):
            raise self._refusal("transform_config rotates the inputs of its weights")
        suffixes = set()
        for group in _list_groups(section):
            fmt = group.get("format") or section.get("format")
            if not isinstance(fmt, str) or fmt not in _FORMATS:
                raise self._refusal(f"its int4 weights have the format {fmt!a:.40}")
            suffixes.add(_FORMATS[fmt])
            self.quantizes_inputs |= group.get("input_activations") is not None
        return suffixes

    def _holds_integers(self, name: str, suffixes: set[str]) -> bool:
        if not name.endswith(tuple(suffixes)):
            return False
        return name.endswith(_PACKED) or self._checkpoint.tensors[name].dtype == "I8"

    def _read_weight(self, stored: str) -> _Int4Weight:
        module = _module(stored)
        entry = self._checkpoint.tensors[stored]
        is_packed = stored.endswith(_PACKED)
        shape = self._read_shape(module + _SHAPE) if is_packed else entry.shape
        held = ("I32", (shape[0], -(-shape[-1] // _PER_WORD))) if is_packed else ("I8", shape)
        if len(shape) != 2 or min(shape) < 1 or (entry.dtype, entry.shape) != held:
            raise self._refusal(
                f"{shorten(stored)} is {entry.dtype} {list(entry.shape)}, for a weight of "
                f"{list(shape)}"
            )
        rows, columns = shape
        return _Int4Weight(stored=stored, shape=(rows, columns), scale=self._read_scale(module))

    def _read_shape(self, name: str) -> tuple[int, ...]:
        stored = self._checkpoint.read(name)
        if stored.dtype not in (torch.int64, torch.int32) or stored.shape != (2,):
            raise self._refusal(f"{shorten(name)} is not the two sizes of a weight")
        return tuple(stored.tolist())

    def _read_scale(self, module: str) -> torch.Tensor:
        name = module + _SCALE
        stored = self._checkpoint.read(name)
        if stored.numel() != 1 or stored.dtype not in ENCODABLE_DTYPES:
            kind = f"{list(stored.shape)} {self._checkpoint.tensors[name].dtype}"
            raise self._refusal(f"{shorten(name)} is {kind}, where one scale is expected")
        scale = stored.to(torch.float32).reshape(())
        if not SMALLEST_SCALE <= float(scale) <= _LARGEST_SCALE:
            raise self._refusal(f"{shorten(name)}: {float(scale):.4g} is not a scale")
        return scale

    def _is_plain(self, name: str, entry: TensorEntry) -> bool:
        """Tell whether a tensor is unquantized; refuse one that is neither that nor int4."""
        module, _, suffix = name.rpartition(".")
        if suffix in {"weight_zero_point", "weight_g_idx"}:
            raise self._refusal(f"there is {shorten(name)}")
        if suffix in {"weight_packed", "weight_shape", "weight_scale"}:
            if f"{module}.weight" not in self._weights:
                raise self._refusal(f"there is {shorten(name)}, but no int4 weight for it")
            return False
        if is_companion(name):
            return False
        if name in self._weights:
            if self._weights[name].stored != name:
                raise self._refusal(f"{shorten(name)} is stored twice, packed and plain")
            return False
        if suffix == "weight" and entry.dtype not in {"BF16", "F16", "F32"}:
            raise self._refusal(f"{shorten(name)} is stored in {entry.dtype}")
        return True

    def _read(self, weight: _Int4Weight, rows: tuple[int, int] | None) -> torch.Tensor:
        first, last = rows or (0, weight.shape[0])
        stored = self._checkpoint.read_rows(weight.stored, first, last)
        if stored.dtype is torch.int32:
            return unpack(stored, weight.shape[1]).to(torch.float32).mul_(weight.scale)
        if stored.numel() and not -_OFFSET <= int(stored.min()) <= int(stored.max()) < _OFFSET:
            raise self._refusal(f"{shorten(weight.stored)} holds integers of more than four bits")
        return stored.to(torch.float32).mul_(weight.scale)

    def _refusal(self, fault: str) -> ModelError:
        return ModelError(f"{self.folder}: {fault}", hint=_HINT)


class ScaleSpread:
    """A tensor source with the scales of an int4 checkpoint, each expanded to its weight's shape.

    So a `WeightSource` merges, splits and transposes the scales as it does the weights.
    """

    def __init__(self, source: Int4Source) -> None:
        self.folder = source.folder
        self.tensors = source.tensors
        self._source = source

    def read(self, name: str) -> torch.Tensor:
        """Give the scale of every element of a weight: fp32, 0 if the weight is not quantized."""
        return self._source.scale(name).expand(self.tensors[name].shape)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Give the scale of every element of some rows."""
        return self.read(name)[start:stop]


def unpack(words: torch.Tensor, num_columns: int) -> torch.Tensor:
    """Unpack int32 words of eight int4 numbers, the first in the lowest bits, each plus 8.

    Args:
        words: int32 [R, ceil(num_columns / 8)].
        num_columns: numbers per row; the rest of the last word is padding.

    Returns:
        int8 [R, num_columns], from -8 to 7.
    """
    octets = words.contiguous().view(torch.uint8)
    pairs = torch.stack((octets & 15, octets >> _BITS), dim=-1)
    return pairs.view(torch.int8).reshape(len(words), -1)[:, :num_columns] - _OFFSET


def _make_entry(weight: _Int4Weight) -> TensorEntry:
    """Describe the tensor that is read; the file does not contain it as such."""
    return TensorEntry("F32", weight.shape, 0, 4 * weight.shape[0] * weight.shape[1])


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _is_int4(section: Mapping[str, object]) -> bool:
    weights = [group["weights"] for group in _list_groups(section)]
    is_known = section.get("quant_method") == "compressed-tensors"
    return is_known and bool(weights) and all(_is_int4_per_tensor(each) for each in weights)


def _list_groups(section: Mapping[str, object]) -> list[Mapping[str, object]]:
    """List the config groups that quantize weights."""
    groups = section.get("config_groups")
    items = groups.values() if isinstance(groups, Mapping) else ()
    return [item for item in items if isinstance(item, Mapping) and item.get("weights")]


def _is_int4_per_tensor(weights: object) -> bool:
    """Check a group's weights; missing keys have compressed-tensors' defaults."""
    if not isinstance(weights, Mapping):
        return False
    kind, num_bits = weights.get("type", "int"), weights.get("num_bits", 8)
    is_int4 = (kind, num_bits) == ("int", _BITS) and weights.get("symmetric", True) is True
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    return is_int4 and strategy == "tensor" and not weights.get("dynamic")
