"""Names, dtypes and layers of weights."""

from __future__ import annotations

import re

from fp8calib.model.geometry import ModelGeometry

Shape = tuple[int, ...]
WEIGHT = "weight"
PLAIN_DTYPES = ("BF16", "F16", "F32", "F64")
"""The dtypes of weights that are not quantized."""
HEADS = ("lm_head", "embed_out")
"""The last part of the path of an output layer."""
LAYER = re.compile(r"(.*?\.)(\d+)\.")
"""The beginning of a path, up to the number of its layer."""


def count_experts(geometry: ModelGeometry) -> dict[int, int]:
    """Count the experts of each layer that has some."""
    return {
        layer.index: number
        for layer in geometry.layers
        if (number := max((linear.num_experts for linear in layer.linears), default=0))
    }


def find_decoder(geometry: ModelGeometry) -> str | None:
    """Find what the names of tensors in decoder layers begin with, before the layer's number."""
    modules = (attention.checkpoint_module for _, attention in geometry.attentions())
    found = LAYER.match(next(modules, ""))
    return None if found is None else found[1]


def find_layer_index(decoder: str | None, path: str) -> int:
    """Find the number of the decoder layer that a path is in; -1 where it is elsewhere."""
    found = LAYER.match(path)
    return int(found[2]) if found is not None and found[1] == decoder else -1
