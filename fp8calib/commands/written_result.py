"""What commands give that write checkpoints or scales."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fp8calib.checkpoint.output import format_size
from fp8calib.commands.result import Result
from fp8calib.model.shapes import Frozen
from fp8calib.quantization.matrices import AllZeroWeight


class BeforeAfter(Frozen):
    """Sizes in bytes: before and after a command, or without and with FP8."""

    before: int
    after: int

    def describe(self) -> str:
        """Describe both sizes: `269 MB -> 135 MB`."""
        return f"{format_size(self.before)} -> {format_size(self.after)}"


class ShardIndex(Frozen):
    """Which shard of a run, from 1."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index} of {self.count}"


class LayerScheme(Frozen):
    """A pattern that gives linears another scheme, and the number of these linears."""

    pattern: str
    scheme: str
    linears: int

    def __str__(self) -> str:
        return f"{self.pattern}={self.scheme} ({self.linears} linears)"


class WrittenCheck(Frozen):
    """What an engine will do with a written checkpoint."""

    path: str
    """Path of the checkpoint, relative to the output folder; `.` for the folder itself."""
    engine: str
    """Name and release of the engine."""
    verdict: str
    """`ok`, `not ok` or `unknown`."""
    summary: str
    """The verdict with the layers that are served, or with the reason."""
    command: str
    """The command that serves it; empty if it is not ok."""


class UnquantizedLinear(Frozen):
    """A module that was left unquantized."""

    module: str
    why: str


class QuantizeResult(Result):
    """A written FP8 checkpoint: what `--json` prints."""

    out: Path
    files: tuple[str, ...]
    """Relative to `out`."""
    scheme: str
    layer_schemes: tuple[LayerScheme, ...]
    format: str
    bytes: BeforeAfter
    duration_s: float
    resumed: tuple[str, ...]
    quantized: tuple[str, ...]
    left: tuple[UnquantizedLinear, ...]
    dead: tuple[AllZeroWeight, ...]
    has_kv_scales: bool
    notes: tuple[str, ...]
    kv_bytes_per_token: BeforeAfter | None
    checked: tuple[WrittenCheck, ...] = ()
    """What `check` says of the written checkpoints; empty with --no-check."""

    def describe_dead(self) -> tuple[str, ...]:
        """Describe the weights with scales that cover zeros alone."""
        return tuple(
            f"{each.tensor}: all zeros in {each.count} of {each.total} of its scales"
            for each in self.dead
        )


def describe_checks(checks: Sequence[WrittenCheck]) -> Iterator[str]:
    """Give a line for each checkpoint and engine, with the command that serves it."""
    for each in checks:
        where = "" if each.path == "." else f"{each.path}, "
        command = f":\n    {each.command}" if each.command else ""
        yield f"{where}{each.engine}: {each.summary}{command}"


def list_top_level(files: Sequence[str]) -> str:
    """List files and folders, each folder once: `kv-overlay/, stats.safetensors`."""
    names = (f"{name.split('/')[0]}/" if "/" in name else name for name in files)
    return ", ".join(dict.fromkeys(names))


def list_checkpoint(files: Sequence[str]) -> str:
    """List the files of a checkpoint, several shards as one entry."""
    shards = [name for name in files if name.endswith(".safetensors")]
    if len(shards) <= 1:
        return list_top_level(files)
    return list_top_level([f"{len(shards)} shards", *(n for n in files if n not in shards)])
