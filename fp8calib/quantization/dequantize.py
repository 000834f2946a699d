"""Plan the checkpoint of a quantized one's values."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict

from fp8calib.calibration.fingerprint import fingerprint_model
from fp8calib.checkpoint.checkpoint import refuse_duplicate_tensors
from fp8calib.checkpoint.model_config import CONFIG_NAME, replace_dtype
from fp8calib.checkpoint.weight_index import SINGLE_FILE_NAME
from fp8calib.quantization.plan import CheckpointPlan, plan_files
from fp8calib.quantization.shard_layout import OutputTensor, lay_out
from fp8calib.quantization.sources.decoded import DecodedCheckpoint


def plan_dequantized(checkpoint: DecodedCheckpoint) -> CheckpointPlan:
    """Lay out every file; few bytes of weights are read, for the fingerprint.

    A file of the source that holds scales alone has no shard.
    """
    refuse_duplicate_tensors(checkpoint)
    stored = checkpoint.stored
    fields = [checkpoint.dtype_name, fingerprint_model(stored.load_config(), stored)]
    by_file: dict[str, list[OutputTensor]] = defaultdict(list)
    for name, entry in checkpoint.tensors.items():
        tensor = OutputTensor(name=name, dtype=entry.dtype, shape=entry.shape, content=name)
        by_file[checkpoint.file_of(name).name].append(tensor)
    shards = tuple(
        lay_out(name if checkpoint.index else SINGLE_FILE_NAME, by_file[name], metadata={})
        for name in sorted(by_file)
    )
    config = replace_dtype(checkpoint.load_config(), checkpoint.dtype_name)
    return CheckpointPlan(
        **plan_files(checkpoint, shards, {CONFIG_NAME: config}),
        tag=hashlib.sha256(json.dumps(fields).encode()).hexdigest(),
    )
