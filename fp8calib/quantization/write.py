"""Write a planned checkpoint shard by shard; an interrupted run can be resumed.

Weights pass through buffers of a megabyte, so that memory does not grow with the model, a shard or
a tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.json_files import encode_json
from fp8calib.checkpoint.output import (
    PROGRESS_NAME,
    list_files,
    output_folder,
    require_free_space,
    write_file_atomic,
)
from fp8calib.checkpoint.overlay import CARD_NAME, copy_side_files
from fp8calib.machine import count_processors
from fp8calib.model.device import one_thread
from fp8calib.quantization.matrices import AllZeroWeight
from fp8calib.quantization.plan import CheckpointPlan, QuantizePlan
from fp8calib.quantization.shard_layout import Codes, ShardLayout
from fp8calib.quantization.shard_writer import ShardWriter, WeightCodes, encode_scale
from fp8calib.quantization.weights import WeightReader, WeightScales

_MAX_THREADS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a run wrote."""

    files: tuple[str, ...]
    all_zero: tuple[AllZeroWeight, ...] = ()
    resumed: tuple[str, ...] = ()
    """Shards that an interrupted run had finished."""


def write_checkpoint(
    checkpoint: Checkpoint,
    plan: CheckpointPlan,
    out: Path,
    *,
    device: torch.device,
    advance: Callable[[int], None],
    resume: bool = False,
    force: bool = False,
    inputs: Collection[Path] = (),
    rounded: WeightCodes | None = None,
) -> Written:
    """Write the checkpoint that `plan` describes.

    Args:
        checkpoint: the source the plan was made for.
        plan: what to write.
        out: the folder, which appears only when it is complete; until then it is `OUT.partial`.
        device: the device to compute on.
        advance: called with the number of bytes that were written.
        resume: continue an interrupted run of the same plan.
        force: replace an existing output.
        inputs: other files that are read, and that the output must not replace.
        rounded: the codes of weights that are not rounded to nearest.

    Raises:
        UsageError: the folder is in use, or the interrupted run had another plan.
        ModelError: a weight cannot be read, or holds NaN or infinity.
        ExportError: the disk cannot hold the output.
    """
    folder = output_folder(
        out,
        owned=plan.names,
        tag=plan.tag,
        resume=resume,
        force=force,
        inputs=[checkpoint.folder, *inputs],
    )
    threads = ThreadPoolExecutor(min(count_processors(), _MAX_THREADS))
    with folder as staging, one_thread(), threads as pool:
        reader = WeightReader(checkpoint, pool, device=device)
        contents = (tensor.content for shard in plan.shards for tensor in shard.tensors)
        quantized = [each.matrix for each in contents if isinstance(each, Codes)]
        scales = WeightScales(quantized, reader)
        progress = json.loads((staging / PROGRESS_NAME).read_bytes())
        all_zero: dict[str, list[dict[str, Any]]] = progress.setdefault("dead", {})
        finished = [
            shard.name
            for shard in plan.shards
            if shard.name in all_zero and _is_shard(staging / shard.name, shard)
        ]
        written = sum((staging / name).stat().st_size for name in finished)
        require_free_space(staging, plan.size_bytes - written)
        for shard in plan.shards:
            if shard.name in finished:
                advance(shard.data_bytes)
                continue
            temporary = staging / f"{shard.name}.unfinished"
            found = ShardWriter(shard, reader, scales, rounded).write(temporary, advance)
            all_zero[shard.name] = list(map(asdict, found))
            write_file_atomic(staging / PROGRESS_NAME, json.dumps(progress).encode())
            temporary.replace(staging / shard.name)
        for path in staging.iterdir():  # an interrupted run's unfinished files
            if path.name not in {*plan.names, PROGRESS_NAME}:
                path.unlink()
        copy_side_files(plan.side_files, staging)
        for name, document in plan.json_files.items():
            (staging / name).write_bytes(encode_json(document))
    return Written(
        files=list_files(out),
        all_zero=tuple(AllZeroWeight(**each) for found in all_zero.values() for each in found),
        resumed=tuple(finished),
    )


def find_finished(
    out: Path, plan: CheckpointPlan, names: frozenset[str] | None = None
) -> Written | None:
    """Look for the checkpoint of this plan that an earlier run finished, but for the card.

    `names` are those of its entries, if it is an overlay of the plan's checkpoint.
    """
    entries = (plan.names if names is None else names) - {CARD_NAME}
    if not all((out / name).exists() for name in entries):
        return None
    files = [out / name for name in entries if name.endswith(".safetensors")]
    if not all(any(_is_shard(path, shard) for path in files) for shard in plan.shards):
        return None
    (out / PROGRESS_NAME).unlink(missing_ok=True)
    return Written(files=list_files(out))


def _is_shard(path: Path, shard: ShardLayout) -> bool:
    """Tell from its length and first bytes whether a file is a finished shard."""
    if not path.is_file() or path.stat().st_size != shard.size_bytes:
        return False
    with path.open("rb") as file:
        return file.read(len(shard.head)) == shard.head


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
