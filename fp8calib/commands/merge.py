"""Join the statistics of the shards of a calibration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fp8calib.checkpoint.atomic import check_output_file
from fp8calib.checkpoint.json_files import load_json_object
from fp8calib.errors import ModelError, UsageError
from fp8calib.jobs.function import as_function
from fp8calib.jobs.reporter import Reporter
from fp8calib.requests.merge import MergeRequest
from fp8calib.results.merge import MergeResult
from fp8calib.stats.calibration_stats import (
    REPORT_NAME,
    STATS_NAME,
    is_stats_file,
    load_stats,
    save_stats,
)
from fp8calib.stats.merge import merge_shards


def run(request: MergeRequest, reporter: Reporter) -> MergeResult:  # noqa: ARG001
    """Join the shards and write the statistics.

    Raises:
        UsageError: the shards are not those of one run, or `out` is no valid output.
        ModelError: a file is damaged.
        ExportError: the file cannot be written.
    """
    out = Path(request.out)
    files = [path / STATS_NAME if path.is_dir() else path for path in map(Path, request.shards)]
    _check_output(out, files, force=request.force)
    merged = merge_shards([(str(path), load_stats(path, accepts_shard=True)) for path in files])
    save_stats(merged, out)
    return MergeResult(
        model=_find_model(files),
        out=out,
        parts=tuple(files),
        tokens=merged.header.num_tokens,
        sequences=merged.header.num_sequences,
        sites=len(merged.sites),
    )


def _find_model(files: Sequence[Path]) -> str:
    """Find the model in the reports beside the shards; MODEL where they have none."""
    for file in files:
        try:
            report = load_json_object(file.parent / REPORT_NAME)
        except ModelError:
            continue
        model = report.get("model")
        if isinstance(model, str):
            return model
    return "MODEL"


def _check_output(out: Path, files: Sequence[Path], *, force: bool) -> None:
    """Refuse to overwrite an input, or a file that holds no statistics."""
    check_output_file(out)
    if out.suffix != ".safetensors":
        raise UsageError(f"--out {out}: must end in .safetensors", hint="rename it")
    if out.exists() and any(path.exists() and path.samefile(out) for path in files):
        raise UsageError(f"--out {out}: is one of the inputs", hint="choose another file")
    if out.exists() and not is_stats_file(out):
        raise UsageError(f"--out {out}: exists and holds no statistics", hint="choose another file")
    check_output_file(out, force=force)


merge = as_function("merge", MergeRequest, run)
