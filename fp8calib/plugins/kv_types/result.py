"""What `kv-types` compared, and what it recommends."""

from __future__ import annotations

from typing import ClassVar

from fp8calib.blocks import Table
from fp8calib.engines.facts.gpus import join_generations
from fp8calib.overview import Overview
from fp8calib.results.record import Result
from fp8calib.verification.figures import format_mean_kld, format_ratio, format_share
from fp8calib.verification.report import CandidateResult, PairedResult


class CacheResult(CandidateResult):
    """A KV cache beside the unquantized model, judged by the gate `kv`."""

    dtype: str
    """The value of `--kv-cache-dtype`."""
    bytes_per_token: float
    """In all layers and on all ranks."""
    tokens: int | None
    """How many fit into `--kv-memory`; None where that is not given."""
    backends: tuple[str, ...]
    """The engine's backends that store it, what it tries first, first; empty where not known."""
    gpus: tuple[str, ...]
    """The generations of GPUs with such a backend, as compilers name them."""

    @property
    def is_fp8(self) -> bool:
        """Whether it is FP8 with a scale for a tensor or a head."""
        return self.dtype in {"fp8", "fp8_e4m3"}


class KvTypesResult(Result):
    """The types, the smallest first, and the one to serve."""

    first_keys: ClassVar = ("next", "recommended", "why")
    model: str
    engine: str
    data: tuple[str, ...]
    tokens: int
    sequences: int
    dtype: str
    device: str
    types: tuple[CacheResult, ...]
    comparisons: tuple[PairedResult, ...]
    """All with all."""
    recommended: str
    """Empty where the text cannot tell."""
    why: str
    next: str
    """The command that serves the model with it; empty where none does."""
    warnings: tuple[str, ...]

    def make_table(self) -> Table:
        """Make the table of all types."""
        columns = {
            "type": [row.name for row in self.types],
            "verdict": [row.verdict.value for row in self.types],
            "KLD mean ± se": [format_mean_kld(row.kld_mean, row.kld_se) for row in self.types],
            "ratio ± se": [format_ratio(row.ppl_ratio, row.ppl_ratio_se) for row in self.types],
            "top-1": [format_share(row.top1_agreement) for row in self.types],
            "bytes a token": [f"{row.bytes_per_token:,.0f}" for row in self.types],
            "tokens that fit": [f"{row.tokens or 0:,}" for row in self.types],
            "GPUs": [join_generations(row.gpus) or "-" for row in self.types],
            "backends": [", ".join(row.backends) or "-" for row in self.types],
        }
        if all(row.tokens is None for row in self.types):
            del columns["tokens that fit"]
        return Table(
            title=f"KV caches in {self.engine}, emulated: {self.tokens:,} tokens in "
            f"{self.sequences} sequences, {self.dtype}",
            columns=list(columns),
            rows=list(zip(*columns.values(), strict=True)),
            words=(0, 1, len(columns) - 2, len(columns) - 1),
        )

    def overview(self) -> Overview:
        """Give the table and the recommendation."""
        table = self.make_table()
        notes = [self.why, *(f"warning: {text}" for text in self.warnings)]
        return Overview(table.title, table.columns, table.texts, notes)
