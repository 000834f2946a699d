"""A planned checkpoint without its weights, for those who read configs, headers and scales."""

from __future__ import annotations

from pathlib import Path

import torch

from fp8calib.checkpoint.json_files import encode_json
from fp8calib.quantization.plan import QuantizePlan
from fp8calib.quantization.shard_layout import Codes
from fp8calib.quantization.shard_writer import encode_scale


def write_outline(plan: QuantizePlan, folder: Path) -> None:
    """Write what `check` reads of a checkpoint: configs, headers, and scales of 1.0.

    Files have holes for the rest.
    """
    for name, document in plan.json_files.items():
        (folder / name).write_bytes(encode_json(document))
    for shard in plan.shards:
        with (folder / shard.name).open("wb") as file:
            file.write(shard.head)
            for tensor in shard.tensors:
                place, values = tensor, tensor.content
                if isinstance(values, Codes):
                    place = values.scale
                    values = torch.ones(place.shape)
                if isinstance(values, torch.Tensor):
                    file.seek(shard.starts[place.name])
                    file.write(encode_scale(place, values))
            file.truncate(shard.size_bytes)
