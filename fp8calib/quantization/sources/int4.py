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

_BEYOND = 8
"""The integers are from -8 to 7."""
_LARGEST_SCALE = torch.finfo(torch.float32).max / _BEYOND


def is_int4_source(checkpoint: Checkpoint) -> bool:
    """Tell whether config.json describes symmetric int4 weights with one scale per tensor."""
    sections = [section for _, section in find_quantization_configs(checkpoint.load_config())]
    return bool(sections) and all(map(_is_int4, sections))


def _is_int4(section: Mapping[str, object]) -> bool:
    groups = section.get("config_groups")
    items = groups.values() if isinstance(groups, Mapping) else ()
    weights = [item.get("weights") for item in items if isinstance(item, Mapping)]
    is_known = section.get("quant_method") == "compressed-tensors"
    return is_known and any(weights) and all(map(_is_int4_per_tensor, filter(None, weights)))


def _is_int4_per_tensor(weights: object) -> bool:
    """Check a group's weights; missing keys have compressed-tensors' defaults."""
    if not isinstance(weights, Mapping):
        return False
    kind, num_bits = weights.get("type", "int"), weights.get("num_bits", 8)
    is_int4 = (kind, num_bits) == ("int", 4) and weights.get("symmetric", True) is True
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    return is_int4 and strategy == "tensor" and not weights.get("dynamic")


class Int4Source(DecodedCheckpoint):
    """An int4 checkpoint, its quantized weights in fp32: integers times scale.

    Raises:
        ModelError: config.json contradicts the tensors, or a weight has another format.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint, dtype="float32")
        self._scales = {name: self._read_scale(weight) for name, weight in self.weights.items()}
        if not self._scales:
            raise self._refusal(f"{CONFIG_NAME} describes int4 weights, but there are none")

    def make_rows(self, name: str, rows: slice) -> torch.Tensor | None:
        """Decode rows of an int4 weight in fp32; refuse integers of more than four bits."""
        values = super().make_rows(name, rows)
        if values is not None and values.numel():
            low, high = torch.aminmax(values)
            beyond = self._scales[name] * _BEYOND
            if not -beyond <= low <= high < beyond:
                raise self._refusal(f"{shorten(name)} holds integers of more than four bits")
        return values

    def scale(self, name: str) -> torch.Tensor:
        """Give the scale of the tensor `name`: fp32 [], 0 if it is not quantized."""
        return self._scales.get(name, torch.zeros(()))

    def _read_scale(self, weight: StoredWeight) -> torch.Tensor:
        """Read the one scale of a weight: fp32 []."""
        found = self.stored.read(weight.scale).to(torch.float32) if weight.scale else torch.ones(0)
        is_one = found.numel() == 1
        is_scale = is_one and SMALLEST_SCALE <= float(found) <= _LARGEST_SCALE
        if is_scale and not weight.zero_point:
            return found.reshape(())
        what = f"{float(found):.4g}" if is_one else str(list(found.shape))
        if not weight.scale or weight.zero_point:
            what = weight.form + (" with zero points" if weight.zero_point else "")
        name = shorten(weight.scale or weight.parts[0])
        raise self._refusal(f"{name} is {what}, where symmetric int4 with one scale is expected")

    def _refusal(self, fault: str) -> ModelError:
        hint = "name the unquantized model, or int4 weights with one scale per tensor"
        return ModelError(f"{self.folder}: {fault}", hint=hint)
