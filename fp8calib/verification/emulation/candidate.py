"""A candidate: what of a model is quantized, and how."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch

from fp8calib.errors import ModelError, VerificationError
from fp8calib.model.shapes import Role, Site
from fp8calib.verification.emulation.fake_quantize import Quantizer
from fp8calib.verification.emulation.weights import Requantized, WeightChange

Reads = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""By the module of a layer that reads another's cache: what K and V are multiplied by, 0-dim or
[H, 1, 1] with H KV heads, where the engine reads them with other scales than they were written."""
NO_READS: Reads = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What an engine quantizes of a model, and how it computes with that."""

    name: str = ""
    description: str = ""
    quantizers: Mapping[Site, Quantizer] = field(default_factory=dict)
    """For K, V, q and inputs; other sites stay unquantized."""
    weights: tuple[WeightChange, ...] = ()
    reads: Reads = field(default_factory=dict)
    prompt_in_16_bits: bool = False
    """Whether attention of a prompt reads K, V and q as they were before the cache."""
    fitted: Mapping[Site, Quantizer] = field(default_factory=dict)
    """The quantizers of the KV cache with scales that fit every tensor (`fit_kv`)."""
    notes: tuple[str, ...] = ()
    """Notes on what the emulation does not cover."""

    @property
    def has_cache(self) -> bool:
        """Whether it quantizes the KV cache."""
        return any(site.role is Role.K for site in self.quantizers)

    @property
    def default_gate(self) -> str:
        """The name of the gate for what is quantized."""
        return "w8a8" if self.weights else "kv"

    def only(self, modules: frozenset[str]) -> Candidate:
        """Keep what belongs to `modules`, the paths of attention modules and linears.

        Of weights without a site, those that are copied stay: norms with factors folded in.
        """
        return replace(
            self,
            quantizers={s: q for s, q in self.quantizers.items() if s.module in modules},
            reads={module: each for module, each in self.reads.items() if module in modules},
            weights=tuple(change for change in self.weights if _belongs(change, modules)),
        )


def _belongs(change: WeightChange, modules: frozenset[str]) -> bool:
    sites = {site.module for parameter in change.parameters for site in parameter.sites}
    return sites <= modules if sites else not isinstance(change, Requantized)


@contextmanager
def blaming(candidate: str) -> Iterator[None]:
    """Note on an error which candidate it is about."""
    try:
        yield
    except (ModelError, VerificationError) as error:
        error.candidate = candidate
        raise
