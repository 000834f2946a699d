"""What `quantize` wrote."""

from __future__ import annotations

from pathlib import Path

from fp8calib.checkpoint.disk import format_size
from fp8calib.overview import Overview
from fp8calib.quantization.weight_scales import AllZeroWeight
from fp8calib.results.record import BeforeAfter, LayerScheme, Record, Result
from fp8calib.results.written import WrittenCheck


class UnquantizedLinear(Record):
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

    def describe_bytes(self) -> str:
        """Describe the size of the weights before and after."""
        return f"{format_size(self.bytes.before)} -> {format_size(self.bytes.after)}"

    def describe_dead(self) -> tuple[str, ...]:
        """Describe the weights with scales that cover zeros alone."""
        return tuple(
            f"{each.tensor}: all zeros in {each.count} of {each.total} of its scales"
            for each in self.dead
        )

    def overview(self) -> Overview:
        """Summarize what was written."""
        return Overview(
            title=f"{self.scheme} in {self.out}: {len(self.quantized)} linears, "
            f"{self.describe_bytes()}",
            notes=[
                *self.notes,
                *map(str, self.checked),
            ],
        )
