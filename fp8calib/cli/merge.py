"""Run `fp8calib merge`: load all shards, join them, write, print."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fp8calib.checkpoint.atomic import check_output_file
from fp8calib.cli.console import print_json, print_text
from fp8calib.errors import UsageError
from fp8calib.stats.calibration_stats import STATS_NAME, is_stats_file, load_stats, save_stats
from fp8calib.stats.merge import merge_shards


def run_merge(paths: Sequence[Path], out: Path, *, force: bool, as_json: bool) -> None:
    """Join the shards and write the statistics; `force` replaces an older stats file at `out`.

    Raises:
        UsageError: the shards are not those of one run, or `out` is no valid output.
        ModelError: a file is damaged.
        ExportError: the file cannot be written.
    """
    files = [path / STATS_NAME if path.is_dir() else path for path in paths]
    _check_output(out, files, force=force)
    merged = merge_shards([(str(path), load_stats(path, accepts_shard=True)) for path in files])
    save_stats(merged, out)
    header = merged.header
    if as_json:
        print_json(
            {
                "out": str(out),
                "parts": [str(path) for path in files],
                "tokens": header.num_tokens,
                "sequences": header.num_sequences,
                "sites": len(merged.sites),
            }
        )
    else:
        print_text(
            f"{len(files)} shards, {header.num_tokens:,} tokens in {header.num_sequences} sequences"
            f", written to {out}\nwrite scales: fp8calib export {out} --format NAME --out DIR"
        )


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
