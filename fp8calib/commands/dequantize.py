"""Write a quantized checkpoint back in 16 bits, shard by shard."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import KW_ONLY, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fp8calib.checkpoint.locations import find_local_model
from fp8calib.checkpoint.output import check_output, list_files, output_folder, remove_unfinished
from fp8calib.commands import options as shared
from fp8calib.commands.command_line import slow_imports
from fp8calib.commands.request import ProgressCallback, Reporter, as_function, option, request_class
from fp8calib.commands.result import BeforeAfter, Result, describe_written
from fp8calib.errors import ExportError, ModelError
from fp8calib.formats.registry import find_dialect
from fp8calib.numerics.formats import E4M3FN
from fp8calib.text import Block, Line

if TYPE_CHECKING:
    from fp8calib.checkpoint.checkpoint import Checkpoint
    from fp8calib.formats.dialect import Dialect
    from fp8calib.formats.table import ScaleTable

_WITHOUT_SCALES = "without-scales"
"""A folder of the temporary output: the checkpoint that the overlay is written from."""
_DTYPES = ("auto", "bfloat16", "float16", "float32")


@request_class
class DequantizeRequest:
    """Write a quantized checkpoint back in 16 bits, shard by shard, without loading the model.

    Example: fp8calib dequantize deepseek-ai/DeepSeek-V3 --out DeepSeek-V3-BF16
    """

    model: str | Path = option(
        "MODEL",
        "The quantized model: folder or Hub id. FP8, MXFP8, NVFP4, MXFP4, or INT4 or INT8 "
        "of compressed-tensors.",
        reads=str,
        check=find_local_model,
    )
    out: str | Path = option("--out DIR", "Output folder of the checkpoint.", reads=Path)
    _: KW_ONLY
    dtype: str = option(
        "--dtype",
        "Data type of dequantized weights; auto is that of config.json, or bfloat16 if it "
        "names none. Other tensors keep theirs.",
        choices=_DTYPES,
        default="auto",
    )
    keep_kv_scales: bool = option(
        "--keep-kv-scales",
        "Keep the KV scales of MODEL: the output is a kv-overlay, or a kv-overlay-head.",
        default=False,
    )
    resume: bool = option(
        "--resume", "Continue an interrupted run after its last finished shard.", default=False
    )
    revision: str | None = option(shared.REVISION, default=None)
    force: bool = option(shared.FORCE, default=False)
    progress: ProgressCallback | None = option(shared.PROGRESS, default=None)


class DequantizeResult(Result):
    """A written checkpoint in 16 bits: what `--json` prints."""

    out: Path
    files: tuple[str, ...]
    """Relative to `out`, sorted."""
    source: str
    """How the weights of MODEL are quantized."""
    dtype: str
    dequantized: tuple[str, ...]
    """The names of the tensors that were quantized."""
    bytes: BeforeAfter
    """Of all tensors."""
    duration_s: float
    resumed: tuple[str, ...] = ()
    has_kv_scales: bool
    notes: tuple[str, ...]


def run(request: DequantizeRequest, reporter: Reporter) -> DequantizeResult:
    """Dequantize a checkpoint.

    Raises:
        UsageError: an option is invalid, or the folder is in use.
        ModelError: the model cannot be read, is not quantized, or has weights that cannot be
            dequantized or do not fit the dtype.
        ExportError: the disk cannot hold the checkpoint.
    """
    with slow_imports():
        import torch

        from fp8calib.checkpoint.hub import find_folder
        from fp8calib.commands.check import CheckRequest
        from fp8calib.commands.check_run import replay_path
        from fp8calib.commands.check_written import write_card
        from fp8calib.formats.kv.parse_names import find_spelling
        from fp8calib.model.module_paths import split_expert
        from fp8calib.quantization.plan import plan_dequantized
        from fp8calib.quantization.sources.decoded import open_quantized
        from fp8calib.quantization.write import Written, find_finished, write_checkpoint
    started, out = time.monotonic(), Path(request.out)
    folder = find_folder(str(request.model), request.revision)
    dtype = "" if request.dtype == "auto" else request.dtype
    with open_quantized(folder, dtype=dtype) as checkpoint:
        plan = plan_dequantized(checkpoint)
        notes = [f"{name}: not copied: {why}" for name, why in plan.skipped.items()]
        found, owned = None, plan.names
        if request.keep_kv_scales:
            found, dialect, owned = _read_kv_scales(checkpoint)
        elif any(map(find_spelling, checkpoint.stored.tensors)):
            notes.append("its KV scales are left out; add --keep-kv-scales to keep them")

        def write(folder: Path, *, force: bool) -> Written:
            return write_checkpoint(
                *(checkpoint, plan, folder),
                device=torch.device("cpu"),
                advance=reporter.advance,
                resume=request.resume,
                force=force,
            )

        written = find_finished(out, plan, owned) if request.resume else None
        if written is not None:
            reporter.say(f"{out} is finished already")
        else:
            check_output(out, owned, request.force, inputs=[folder])
            reporter.stage("dequantizing", plan.data_bytes, unit="bytes")
            if found is None:
                written = write(out, force=request.force)
            else:
                inside = output_folder(
                    out,
                    owned=owned,
                    force=request.force,
                    inputs=[folder],
                    tag=f"{plan.tag} with KV scales",
                    resume=request.resume,
                    kept_after=(KeyboardInterrupt, ExportError),
                )
                with inside as staging:
                    plain = staging / _WITHOUT_SCALES
                    written = find_finished(plain, plan) or write(plain, force=True)
                    remove_unfinished(staging, kept=_WITHOUT_SCALES)
                    notes += _write_overlay(found, dialect, plain, staging, shown=out)
                    shutil.rmtree(plain)
        write_card(
            *(out, out.resolve().name, checkpoint.dtype_name, request.model),
            revision=request.revision,
            is_quantized=False,
        )
        if any(split_expert(name.rpartition(".")[0]) for name in checkpoint.weights):
            with suppress(ModelError):  # its layers are not understood
                (report,) = replay_path(CheckRequest(out, engine="transformers")).values()
                if fault := report.load_fault:  # it may want experts in one tensor
                    notes.append(f"transformers does not load it as it is: {fault}")
        result = DequantizeResult(
            out=out,
            files=list_files(out),
            source=checkpoint.form,
            dtype=checkpoint.dtype_name,
            dequantized=tuple(checkpoint.weights),
            bytes=BeforeAfter(before=checkpoint.stored.total_size_bytes, after=plan.data_bytes),
            duration_s=time.monotonic() - started,
            resumed=written.resumed,
            has_kv_scales=found is not None,
            notes=tuple(notes),
        )
    for text in result.notes:
        reporter.warn(text)
    return result


def _read_kv_scales(checkpoint: Checkpoint) -> tuple[ScaleTable, Dialect, frozenset[str]]:
    """Read the scales; choose the overlay for them, and name the entries of its folder."""
    from fp8calib.formats.fp8.registry import FP8_DIALECTS
    from fp8calib.formats.read import read_scales
    from fp8calib.formats.write import list_owned
    from fp8calib.model.geometry_from_config import read_geometry

    geometry = read_geometry(checkpoint.folder, checkpoint.load_config())
    found = read_scales(checkpoint.folder, geometry, drops_bad_query=True)
    dialect = find_dialect("kv-overlay-head" if found.per_head else "kv-overlay")
    # the config of a quantization that no longer holds is not copied
    quantizations = {each.own_file for each in FP8_DIALECTS.values()}
    return found, dialect, list_owned(dialect, [1], checkpoint) - quantizations


def _write_overlay(
    found: ScaleTable, dialect: Dialect, plain: Path, folder: Path, *, shown: Path
) -> Iterable[str]:
    """Write an overlay of a checkpoint without scales, and say what a user should know of it."""
    from fp8calib.calibration.fingerprint import fingerprint_model
    from fp8calib.checkpoint.checkpoint import Checkpoint
    from fp8calib.formats.write import write_found

    with Checkpoint.open(plain) as checkpoint:
        model = fingerprint_model(checkpoint.load_config(), checkpoint)
        # norms and embeddings are those of the source, and so are their hashes
        origin = found.origin and replace(found.origin, model=model)
        names = tuple(Path(path.name) for path in found.files)
        found = replace(found, origin=origin, files=names)
        _, notes = write_found(
            *(found, dialect, folder),
            fmt=E4M3FN,
            tps=[1],
            model=model,
            source=checkpoint,
            shown=shown,
        )
    return notes


def describe(
    result: DequantizeResult,
    request: DequantizeRequest,  # noqa: ARG001
) -> Iterator[Block]:
    """Describe the checkpoint."""
    yield Line(
        f"{result.source}: {len(result.dequantized)} tensors are {result.dtype} now, weights "
        f"{result.bytes}, {result.duration_s:.1f} s"
    )
    yield from describe_written(result.out, result.files, ())


dequantize = as_function("dequantize", DequantizeRequest, run)
