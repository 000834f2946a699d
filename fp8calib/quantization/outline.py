"""A planned checkpoint without its weights, for those who read configs, headers and scales."""

from __future__ import annotations

from pathlib import Path

import torch

from fp8calib.checkpoint.json_files import encode_json
from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.quantization.plan import QuantizePlan
from fp8calib.quantization.shard_layout import Constant, WeightScale
from fp8calib.quantization.shard_writer import encode_scale


def write_outline(plan: QuantizePlan, folder: Path) -> None:
    """Write what `check` reads of a checkpoint: configs, headers, and scales of 1.0.

    Files have holes for the rest.
    """
    for document, content in {CONFIG_NAME: plan.config, **plan.json_files}.items():
        (folder / document).write_bytes(encode_json(content))
    for shard in plan.shards:
        with (folder / shard.name).open("wb") as file:
            file.write(shard.head)
            for tensor in shard.tensors:
                if isinstance(tensor.content, WeightScale):
                    values = torch.ones(tensor.shape)
                elif isinstance(tensor.content, Constant):
                    values = tensor.content.value
                else:
                    continue
                file.seek(shard.starts[tensor.name])
                file.write(encode_scale(tensor, values))
            file.truncate(shard.size_bytes)
