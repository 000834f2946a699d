"""A candidate: what of a model is quantized, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fp8calib.calibration.calibration_stats import RunStats
from fp8calib.calibration.origin import CalibrationOrigin
from fp8calib.errors import ModelError, VerificationError
from fp8calib.formats.table import ScaleTable
from fp8calib.model.geometry import Role, Site
from fp8calib.verification.emulation.fake_quantize import Quantizer

if TYPE_CHECKING:  # most candidates change no weights
    from fp8calib.verification.emulation.weights import WeightChange

Reads = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""By the module of a layer that reads another's cache: what K and V are multiplied by, 0-dim or
[H, 1, 1] with H KV heads, where the engine reads them with other scales than they were written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What an engine quantizes of a model, and how it computes with that."""

    name: str = ""
    description: str = ""
    quantizers: Mapping[Site, Quantizer] = field(default_factory=dict)
    """For K, V, q and inputs; other sites stay unquantized."""
    weights: tuple[WeightChange, ...] = ()
    reads: Reads = field(default_factory=dict)
    make_hooks: Callable[[Candidate], Any] | None = None
    """Makes the hooks of a plug-in, of a class that extends `EmulationHooks`."""
    notes: tuple[str, ...] = ()
    """Notes on what the emulation does not cover."""
    table: ScaleTable | None = None
    """Its KV scales."""
    stats: RunStats | None = None
    """The statistics that it was made from."""
    origin: CalibrationOrigin | None = None
    """The text it was calibrated on; None if unknown."""

    @property
    def has_cache(self) -> bool:
        """Whether it quantizes the KV cache."""
        return any(site.role is Role.K for site in self.quantizers)

    @property
    def default_gate(self) -> str:
        """The name of the gate for what is quantized."""
        return "w8a8" if self.weights else "kv"


@contextmanager
def blaming(candidate: str) -> Iterator[None]:
    """Note on an error which candidate it is about, unless that is known."""
    try:
        yield
    except (ModelError, VerificationError) as error:
        error.candidate = error.candidate or candidate
        raise
