"""Read int4 checkpoints of compressed-tensors that have one scale per weight, for the RFC.

The RFC has one scale per weight, and no zero points: a checkpoint that needs more is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.model_config import CONFIG_NAME, find_quantization_configs
from fp8calib.errors import ModelError, shorten
from fp8calib.numerics.formats import SMALLEST_SCALE
from fp8calib.quantization.sources.decoded import DecodedCheckpoint
from fp8calib.quantization.sources.packed import StoredWeight

_FORMATS = {"pack-quantized": ".weight_packed", "int-quantized": ".weight"}
"""Format -> suffix of the tensor with the integers."""
_BITS = 4
_BEYOND = 8
"""The integers are from -8 to 7."""
_LARGEST_SCALE = torch.finfo(torch.float32).max / _BEYOND
_HINT = "name the unquantized model, or int4 weights with one scale per tensor"


def is_int4_source(checkpoint: Checkpoint) -> bool:
    """Tell whether config.json describes symmetric int4 weights with one scale per tensor."""
    sections = [section for _, section in find_quantization_configs(checkpoint.load_config())]
    return bool(sections) and all(_is_int4(section) for section in sections)


class Int4Source(DecodedCheckpoint):
    """An int4 checkpoint, its quantized weights in fp32: integers times scale.

    Attributes:
        quantizes_inputs: whether the config describes how inputs are quantized too.

    Raises:
        ModelError: config.json contradicts the tensors, or a weight has another format.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.folder = checkpoint.folder
        self.quantizes_inputs = False
        self._scales: dict[str, torch.Tensor] = {}
        suffixes: set[str] = set()
        for _, section in find_quantization_configs(checkpoint.load_config()):
            for group in _list_groups(section):
                fmt = group.get("format") or section.get("format")
                if not isinstance(fmt, str) or fmt not in _FORMATS:
                    raise self._refusal(f"its int4 weights have the format {fmt!a:.40}")
                suffixes.add(_FORMATS[fmt])
                self.quantizes_inputs |= group.get("input_activations") is not None
        super().__init__(checkpoint, dtype="float32")
        self._scales = {
            name: self._read_scale(weight, tuple(suffixes)) for name, weight in self.weights.items()
        }
        if not self._scales:
            raise self._refusal(f"{CONFIG_NAME} describes int4 weights, but there are none")
        self._refuse_strays()

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read rows of the first axis, of an int4 weight in fp32.

        Raises:
            ModelError: there is no such tensor, or an integer has more than four bits.
        """
        values = super().read_rows(name, start, stop)
        if name in self._scales and values.numel():
            low, high = torch.aminmax(values)
            beyond = self._scales[name] * _BEYOND
            if not -beyond <= low <= high < beyond:
                raise self._refusal(f"{shorten(name)} holds integers of more than four bits")
        return values

    def scale(self, name: str) -> torch.Tensor:
        """Give the scale of the tensor `name`: fp32 [], 0 if it is not quantized."""
        return self._scales.get(name, torch.zeros(()))

    def _read_scale(self, weight: StoredWeight, suffixes: tuple[str, ...]) -> torch.Tensor:
        """Read the one scale of a weight: fp32 []."""
        stored = weight.parts[0]
        if not weight.scale or not stored.endswith(suffixes):
            raise self._refusal(f"{shorten(stored)} holds {weight.form}, which is not its format")
        if weight.zero_point:
            raise self._refusal(f"there is {shorten(weight.zero_point)}")
        found, name = self.stored.read(weight.scale), shorten(weight.scale)
        if found.numel() != 1:
            kind = f"{list(found.shape)} {self.stored.tensors[weight.scale].dtype}"
            raise self._refusal(f"{name} is {kind}, where one scale is expected")
        scale = found.to(torch.float32).reshape(())
        if not SMALLEST_SCALE <= float(scale) <= _LARGEST_SCALE:
            raise self._refusal(f"{name}: {float(scale):.4g} is not a scale")
        return scale

    def _refuse_strays(self) -> None:
        """Refuse weights that are stored twice, and parts of a missing weight."""
        for name in self.stored.tensors:
            module, _, leaf = name.rpartition(".")
            weight = self.weights.get(f"{module}.weight")
            if leaf == "weight" and weight is not None and weight.parts[0] != name:
                raise self._refusal(f"{shorten(name)} is stored twice, packed and plain")
            if leaf in {"weight_packed", "weight_shape", "weight_scale"} and weight is None:
                raise self._refusal(f"there is {shorten(name)}, but no int4 weight for it")

    def _refusal(self, fault: str) -> ModelError:
        return ModelError(f"{self.folder}: {fault}", hint=_HINT)


class ScaleSpread:
    """A tensor source with the scales of an int4 checkpoint, each expanded to its weight's shape.

    A `WeightSource` merges, splits and transposes these scales like the weights.
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


def _list_groups(section: Mapping[str, object]) -> list[Mapping[str, object]]:
    """List the config groups that quantize weights."""
    groups = section.get("config_groups")
    items = groups.values() if isinstance(groups, Mapping) else ()
    return [item for item in items if isinstance(item, Mapping) and item.get("weights")]


def _is_int4(section: Mapping[str, object]) -> bool:
    weights = [group["weights"] for group in _list_groups(section)]
    is_known = section.get("quant_method") == "compressed-tensors"
    return is_known and bool(weights) and all(map(_is_int4_per_tensor, weights))


def _is_int4_per_tensor(weights: object) -> bool:
    """Check a group's weights; missing keys have compressed-tensors' defaults."""
    if not isinstance(weights, Mapping):
        return False
    kind, num_bits = weights.get("type", "int"), weights.get("num_bits", 8)
    is_int4 = (kind, num_bits) == ("int", _BITS) and weights.get("symmetric", True) is True
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    return is_int4 and strategy == "tensor" and not weights.get("dynamic")
