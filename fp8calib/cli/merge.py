"""Run `fp8calib merge`: load all shards, join them, write, print."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from fp8calib.checkpoint.atomic import check_output_file
from fp8calib.checkpoint.json_files import load_json_object
from fp8calib.cli.console import print_json, print_text, prints_json
from fp8calib.dialects.registry import find_dialect
from fp8calib.engines.registry import find_replayed, list_defaults
from fp8calib.errors import ModelError, UsageError
from fp8calib.requests.merge import MergeRequest
from fp8calib.stats.calibration_stats import (
    REPORT_NAME,
    STATS_NAME,
    is_stats_file,
    load_stats,
    save_stats,
)
from fp8calib.stats.merge import merge_shards


def run_merge(request: MergeRequest) -> None:
    """Join the shards and write the statistics.

    Raises:
        UsageError: the shards are not those of one run, or `out` is no valid output.
        ModelError: a file is damaged.
        ExportError: the file cannot be written.
    """
    out = request.out
    files = [path / STATS_NAME if path.is_dir() else path for path in request.shards]
    _check_output(out, files, force=request.force)
    merged = merge_shards([(str(path), load_stats(path, accepts_shard=True)) for path in files])
    save_stats(merged, out)
    header = merged.header
    if prints_json():
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
            f", written to {out}"
        )
        for text in _suggest_commands(files, out):
            print_text(text)


def _suggest_commands(files: Sequence[Path], out: Path) -> Iterator[str]:
    """Spell the commands that write an overlay and serve it, for the model of the shards."""
    folder = out.parent / "scales"
    model = shlex.quote(_find_model(files))
    target = shlex.quote(str(folder))
    stats = shlex.quote(str(out))
    export = f"fp8calib export {stats} --format kv-overlay --model {model} --out {target}"
    yield f"write scales:\n    {export}"
    overlay = str(folder / find_dialect("kv-overlay").path())
    for engine in map(find_replayed, list_defaults()):
        if engine.launch is not None:
            yield f"then serve with {engine.title}:\n    {engine.launch.spell(overlay)}"


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
