"""A receipt: what was measured on what, so that others can check it; and what checking one found.

The file is one JSON object in the canonical form of RFC 8785. Shares are 0..1, KL divergences in
nats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from fp8calib.errors import VerificationError
from fp8calib.overview import Overview
from fp8calib.results.record import Record, Result
from fp8calib.verification.judge.gates import Gate
from fp8calib.verification.report import NoiseResult, Verdict


class HashedFile(Record):
    """A file that was read."""

    name: str
    size_bytes: int
    sha256: str


class HashedFiles(Record):
    """A model or scales: the files with weights, config, tokenizer and scales."""

    name: str
    """As it was named; of an absolute path, the last component."""
    files: tuple[HashedFile, ...]


class ReceiptText(Record):
    """The text, and how to get it again."""

    specs: tuple[str, ...]
    """Values of `--data`; of an absolute path, the last component. Empty: the built-in text."""
    files: tuple[HashedFile, ...]
    """The files among them."""
    samples: int
    seq_len: int | None
    pack: bool
    text_column: str | None
    fingerprint: str
    """SHA-256 over the token ids of all sequences."""
    sequences: int
    tokens: int
    """Scored ones: all but the first of each sequence."""


class ReceiptEngine(Record):
    """An engine whose arithmetic was computed."""

    name: str
    release: str
    numerics: Mapping[str, Any]
    """What differs from the plain rule of dividing, saturating and rounding to nearest even."""


class ReceiptSettings(Record):
    """The options of `verify` that measure the same again."""

    engine: tuple[str, ...]
    scheme: str | None
    kv_cache_dtype: tuple[str, ...]
    gpu: str | None
    fp8_dtype: str
    batch_size: int
    dtype: str
    """The one that was computed in."""
    gate: Gate | None
    """None: each candidate's own."""
    kv_cache_dtype_skip_layers: tuple[int, ...]
    """Those whose KV cache stays in 16 bits by an option of the engine."""


class ReceiptRow(Record):
    """The figures of one candidate beside the unquantized model."""

    candidate: str
    how: Literal["emulated", "server", "in-engine"]
    """Computed as the engine computes; answered by a running server; or computed in the engine."""
    ppl: float
    ppl_ratio: float
    ppl_ratio_se: float | None
    kld_mean: float | None
    kld_se: float | None
    kld_p99: float | None
    top1_agreement: float | None
    top1_se: float | None
    """As of independent tokens."""
    noise: NoiseResult | None
    """The noise floor: of emulation, what the unquantized model differs by from itself; of a
    server, its answers. None where it was not measured."""
    gate: Gate
    verdict: Verdict
    verdict_why: str


class Receipt(Record):
    """What was measured on what."""

    kind: Literal["fp8calib receipt"] = "fp8calib receipt"
    schema_version: Literal[1] = 1
    date: str
    """UTC, in the form of ISO 8601."""
    command: str
    versions: Mapping[str, str]
    model: HashedFiles
    """The unquantized model."""
    model_hash: str
    """Of its config and a sample of every tensor, however the weights are sharded."""
    scales: tuple[HashedFiles, ...]
    """What was compared with it, in the order of `--scales`."""
    text: ReceiptText
    engines: tuple[ReceiptEngine, ...]
    settings: ReceiptSettings
    device: str
    reference_ppl: float
    rows: Annotated[tuple[ReceiptRow, ...], Field(min_length=1)]
    warnings: tuple[str, ...]
    seal: str
    """SHA-256 of the canonical JSON of all other fields."""


class ReceiptResult(Result):
    """What an action on a receipt did or found."""

    action: str
    receipt: Receipt
    checked: tuple[str, ...] = ()
    """What was compared and agrees."""
    unchecked: tuple[str, ...] = ()
    """What was not compared, and the option that does."""
    faults: tuple[str, ...] = ()
    """What does not agree."""
    written: str = ""
    """The file that was written."""
    markdown: str = ""
    """The block for a card."""

    @property
    def passed(self) -> bool:
        """Whether nothing disagrees."""
        return not self.faults

    @property
    def exit_code(self) -> int:
        """8 where something disagrees."""
        return 0 if self.passed else VerificationError.exit_code

    def overview(self) -> Overview:
        """Give what was checked, and what disagrees."""
        notes = [*self.checked, *(f"not checked: {text}" for text in self.unchecked)]
        notes += [f"fault: {text}" for text in self.faults]
        return Overview(f"ReceiptResult of {self.receipt.model.name}", notes=notes)
