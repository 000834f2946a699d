"""Write an FP8 checkpoint from an unquantized one, shard by shard.

Weights pass through buffers of a megabyte, so that memory does not grow with the model, a shard or
a tensor.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.disk import require_free_space
from fp8calib.checkpoint.json_files import encode_json
from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.checkpoint.output import (
    PROGRESS_NAME,
    remove_progress_file,
    resumable_folder,
)
from fp8calib.checkpoint.overlay import CARD_NAME, copy_side_files
from fp8calib.model.device import one_thread
from fp8calib.quantization.all_zero import AllZeroWeight
from fp8calib.quantization.plan import QuantizePlan
from fp8calib.quantization.shard_layout import ShardLayout
from fp8calib.quantization.shard_writer import ShardWriter, WeightCodes
from fp8calib.quantization.weight_reader import CHUNK_BYTES, WeightReader
from fp8calib.quantization.weight_scales import WeightScales

_MAX_THREADS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a run wrote."""

    files: tuple[str, ...]
    all_zero: tuple[AllZeroWeight, ...]
    resumed: tuple[str, ...]
    """Shards that an interrupted run had finished."""
    was_finished: bool = False
    """Whether an earlier run had written all of it."""


def quantize(
    checkpoint: Checkpoint,
    plan: QuantizePlan,
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
    folder = resumable_folder(
        out,
        owned=plan.names,
        tag=plan.tag,
        resume=resume,
        force=force,
        inputs=[checkpoint.folder, *inputs],
    )
    with folder as staging, open_threads() as pool:
        reader = WeightReader(checkpoint, pool, device=device)
        journal = _Journal(staging, pool)
        finished = [shard.name for shard in plan.shards if journal.has(shard)]
        written = sum((staging / name).stat().st_size for name in finished)
        require_free_space(staging, plan.size_bytes - written)
        scales = WeightScales(plan.selection.quantized, plan.settings, reader)
        for shard in plan.shards:
            if shard.name in finished:
                advance(shard.data_bytes)
                continue
            temporary = staging / f"{shard.name}.unfinished"
            all_zero = ShardWriter(shard, reader, scales, rounded).write(temporary, advance)
            journal.add(shard, temporary, all_zero)
            temporary.replace(staging / shard.name)
        for path in staging.iterdir():  # an interrupted run's unfinished files
            if path.name not in {*plan.names, PROGRESS_NAME}:
                path.unlink()
        copy_side_files(plan.side_files, staging)
        for name, document in {CONFIG_NAME: plan.config, **plan.json_files}.items():
            (staging / name).write_bytes(encode_json(document))
    all_zero_weights = tuple(item for items in journal.all_zero.values() for item in items)
    return Written(files=list_files(out), all_zero=all_zero_weights, resumed=tuple(finished))


def list_files(folder: Path) -> tuple[str, ...]:
    """List the files in a folder and below, sorted."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return tuple(sorted(path.relative_to(folder).as_posix() for path in files))


def find_finished(out: Path, plan: QuantizePlan) -> Written | None:
    """Look for the checkpoint of this plan that an earlier run finished."""
    if not is_finished(out, plan):
        return None
    remove_progress_file(out)
    return Written(files=list_files(out), all_zero=(), resumed=(), was_finished=True)


def is_finished(out: Path, plan: QuantizePlan) -> bool:
    """Tell whether `out` is already what the plan would write, but for the card."""
    if not all((out / name).exists() for name in plan.names - {CARD_NAME}):
        return False
    return all(_is_shard(out / shard.name, shard) for shard in plan.shards)


def _is_shard(path: Path, shard: ShardLayout) -> bool:
    """Tell from its length and first bytes whether a file is a finished shard."""
    if not path.is_file() or path.stat().st_size != shard.size_bytes:
        return False
    with path.open("rb") as file:
        return file.read(len(shard.head)) == shard.head


class _Journal:
    """Records in the partial folder which shards are finished, and their all-zero weights.

    A shard whose bytes have changed since then is not finished.
    """

    def __init__(self, folder: Path, pool: Executor) -> None:
        self._folder = folder
        self._pool = pool
        self._document = json.loads((folder / PROGRESS_NAME).read_bytes())
        self._checksums: dict[str, str] = self._document.get("checksums", {})
        self.all_zero = {
            name: [AllZeroWeight(**fields) for fields in items]
            for name, items in self._document.get("dead", {}).items()
        }

    def has(self, shard: ShardLayout) -> bool:
        path, known = self._folder / shard.name, self._checksums.get(shard.name)
        return known is not None and _is_shard(path, shard) and self._sum_up(path) == known

    def add(self, shard: ShardLayout, path: Path, all_zero: list[AllZeroWeight]) -> None:
        """Record a shard that is written, but does not have its final name yet."""
        self.all_zero[shard.name] = all_zero
        self._checksums[shard.name] = self._sum_up(path)
        items = {name: [asdict(item) for item in items] for name, items in self.all_zero.items()}
        document = {**self._document, "dead": items, "checksums": self._checksums}
        temporary = self._folder / f"{PROGRESS_NAME}.new"
        temporary.write_text(json.dumps(document), encoding="utf-8")
        temporary.replace(self._folder / PROGRESS_NAME)

    def _sum_up(self, path: Path) -> str:
        """Compute a checksum: the CRC-32 of the CRC-32s of a file's chunks."""
        with path.open("rb") as file:

            def sum_up(offset: int) -> bytes:
                data = os.pread(file.fileno(), CHUNK_BYTES, offset)
                return zlib.crc32(data).to_bytes(4, "big")

            size_bytes = path.stat().st_size
            parts = self._pool.map(sum_up, range(0, size_bytes, CHUNK_BYTES))
            return f"{zlib.crc32(b''.join(parts)):08x}"


@contextmanager
def open_threads() -> Iterator[ThreadPoolExecutor]:
    """Open a pool with a thread per core, in which torch starts no threads of its own."""
    count = min(len(os.sched_getaffinity(0)), _MAX_THREADS)
    with one_thread(), ThreadPoolExecutor(count) as pool:
        yield pool
