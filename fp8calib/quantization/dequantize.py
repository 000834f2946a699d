"""Write the values of a quantized checkpoint, shard by shard.

Weights pass through buffers of a megabyte, or of one expert where experts are stacked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fp8calib.checkpoint.checkpoint import refuse_duplicate_tensors
from fp8calib.checkpoint.disk import require_free_space
from fp8calib.checkpoint.json_files import encode_json
from fp8calib.checkpoint.model_config import CONFIG_NAME, replace_dtype
from fp8calib.checkpoint.overlay import CARD_NAME, copy_side_files, find_side_files
from fp8calib.checkpoint.weight_index import INDEX_NAME, SINGLE_FILE_NAME
from fp8calib.formats.fp8.registry import FP8_DIALECTS
from fp8calib.quantization.plan import list_unlisted, make_index
from fp8calib.quantization.quantize import open_threads
from fp8calib.quantization.shard_layout import CopiedTensor, OutputTensor, ShardLayout, lay_out
from fp8calib.quantization.shard_writer import ShardWriter
from fp8calib.quantization.sources.decoded import DecodedCheckpoint
from fp8calib.quantization.weight_reader import WeightReader


@dataclass(frozen=True, slots=True, kw_only=True)
class DequantizedFiles:
    """The files of a checkpoint without its quantization, before a weight is read."""

    shards: Sequence[ShardLayout]
    json_files: Mapping[str, Mapping[str, object]]
    side_files: Mapping[str, Path]
    skipped: Mapping[str, str]
    """Files and tensors of the source that are not copied, with the reason."""

    @property
    def data_bytes(self) -> int:
        """Sum the bytes of all tensors."""
        return sum(shard.data_bytes for shard in self.shards)

    @property
    def names(self) -> frozenset[str]:
        """Name all entries of the output folder, with the card that is written last."""
        sides = (name.split("/")[0] for name in self.side_files)
        shards = (shard.name for shard in self.shards)
        return frozenset({CARD_NAME, *self.json_files, *shards, *sides})


def plan_files(checkpoint: DecodedCheckpoint) -> DequantizedFiles:
    """Lay out every file; only headers and config.json are read.

    Raises:
        ModelError: two files hold the same tensor.
    """
    refuse_duplicate_tensors(checkpoint)
    shards = tuple(_lay_out_shards(checkpoint))
    config = replace_dtype(checkpoint.load_config(), checkpoint.dtype_name)
    index = {INDEX_NAME: make_index(checkpoint.index, shards)} if checkpoint.index else {}
    sides, skipped = find_side_files(checkpoint)
    own_files = {dialect.own_file for dialect in FP8_DIALECTS.values()}
    return DequantizedFiles(
        shards=shards,
        json_files={CONFIG_NAME: config, **index},
        side_files={name: path for name, path in sides.items() if name not in own_files},
        skipped={**skipped, **list_unlisted(checkpoint)},
    )


def _lay_out_shards(checkpoint: DecodedCheckpoint) -> Iterator[ShardLayout]:
    """Give a shard for every file of the source that holds more than scales."""
    by_file: dict[str, list[OutputTensor]] = defaultdict(list)
    for name, entry in checkpoint.tensors.items():
        tensor = OutputTensor(
            name=name, dtype=entry.dtype, shape=entry.shape, content=CopiedTensor()
        )
        by_file[checkpoint.file_of(name).name].append(tensor)
    for name in sorted(by_file):
        shown = name if checkpoint.is_sharded else SINGLE_FILE_NAME
        yield lay_out(shown, by_file[name], metadata={})


def write_files(
    checkpoint: DecodedCheckpoint,
    files: DequantizedFiles,
    folder: Path,
    advance: Callable[[int], None],
) -> None:
    """Write the planned files into a folder; `advance` is called with the bytes of tensors written.

    Raises:
        ModelError: a weight cannot be read, is damaged, or does not fit the dtype.
        ExportError: the disk cannot hold the output.
        OSError: a file cannot be written.
    """
    require_free_space(folder, sum(shard.size_bytes for shard in files.shards))
    with open_threads() as pool:
        reader = WeightReader(checkpoint, pool, device=torch.device("cpu"))
        for shard in files.shards:
            ShardWriter(shard, reader).write(folder / shard.name, advance)
    copy_side_files(files.side_files, folder)
    for name, document in files.json_files.items():
        (folder / name).write_bytes(encode_json(document))
