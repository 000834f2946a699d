"""The faults that a server may have, as emulations: a scale that is lost, or too small."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.geometry.sites import KV_ROLES, Role, Site
from fp8calib.verification.emulation.emulate import Emulation
from fp8calib.verification.emulation.fake_quantize import Quantizer

CLIPPING = 8
"""A scale divided by less may not clip; dividing by a larger one clips the same large values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A candidate with scales that are lost (1.0) or too small."""

    base: str
    """The candidate's name."""
    layer: int | None
    """None: the scales of `role` are lost in all layers."""
    is_lost: bool
    role: Role | None = None
    """None: K and V, of one layer."""

    @property
    def runs_beside(self) -> bool:
        """Whether it runs beside the candidates, on all sequences."""
        return self.role is Role.Q

    def with_changes(self, changes: torch.Tensor) -> FaultEffect:
        """Join it with what the candidate changes with it."""
        base, layer, is_lost = self.base, self.layer, self.is_lost
        if layer is None:
            return FaultEffect(
                base=base, layer=None, is_lost=is_lost, role=self.role, changes=changes
            )
        return LayerEffect(base=base, layer=layer, is_lost=is_lost, changes=changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedFault(Fault):
    """A fault, and the candidate with it."""

    emulation: Emulation


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultEffect(Fault):
    """What a candidate changes with a fault that does not run beside it."""

    changes: torch.Tensor
    """By token: fp64 [N]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerEffect(FaultEffect):
    """The same for a fault in one layer."""

    layer: int


def lose_query_scales(name: str, emulation: Emulation) -> dict[str, EmulatedFault]:
    """Quantize q of a candidate at 1.0; empty where it is not quantized with another scale."""
    return _lose_scales(name, emulation, Role.Q) if _find_scaled(emulation, Role.Q) else {}


def lose_kv_scales(name: str, emulation: Emulation) -> dict[str, EmulatedFault]:
    """Quantize K, or V, of a candidate at 1.0; empty unless both have other scales.

    Where only one of them has any, nothing but scale 1.0 is left without them.
    """
    if not all(_find_scaled(emulation, role) for role in KV_ROLES):
        return {}
    return _lose_scales(name, emulation, Role.K) | _lose_scales(name, emulation, Role.V)


def has_kv_scales(emulation: Emulation) -> bool:
    """Tell whether K or V of any layer has a scale other than 1.0."""
    return any(_find_scaled(emulation, role) for role in KV_ROLES)


def list_layer_faults(
    name: str, emulation: Emulation, geometry: ModelGeometry
) -> Iterator[tuple[str, EmulatedFault]]:
    """List the faults of single layers of a candidate with KV scales, by their names."""
    for layer, attention in geometry.attentions():
        found = {
            site: emulation.quantizers[site]
            for site in map(attention.site, KV_ROLES)
            if site in emulation.quantizers and _is_scaled(emulation.quantizers[site])
        }
        if found:
            one = {site: replace(each, scale=torch.tensor(1.0)) for site, each in found.items()}
            yield (
                f"{name} with layer {layer.index} at scale 1.0",
                EmulatedFault(
                    base=name,
                    layer=layer.index,
                    is_lost=True,
                    emulation=_change(emulation, one),
                ),
            )
            small = {site: _divide(quantizer) for site, quantizer in found.items()}
            yield (
                f"{name} with layer {layer.index} at 1/{CLIPPING} of its scales",
                EmulatedFault(
                    base=name,
                    layer=layer.index,
                    is_lost=False,
                    emulation=_change(emulation, small),
                ),
            )


def _lose_scales(name: str, emulation: Emulation, role: Role) -> dict[str, EmulatedFault]:
    scaled = _find_scaled(emulation, role)
    lost = {site: replace(each, scale=torch.tensor(1.0)) for site, each in scaled.items()}
    fault = EmulatedFault(
        base=name, layer=None, is_lost=True, role=role, emulation=_change(emulation, lost)
    )
    return {f"{name} without its {role} scales": fault}


def _find_scaled(emulation: Emulation, role: Role) -> dict[Site, Quantizer]:
    """Find the sites of a role that have a scale other than 1.0."""
    return {
        site: quantizer
        for site, quantizer in emulation.quantizers.items()
        if site.role is role and _is_scaled(quantizer)
    }


def _change(emulation: Emulation, changed: Mapping[Site, Quantizer]) -> Emulation:
    return replace(emulation, quantizers={**emulation.quantizers, **changed})


def _divide(quantizer: Quantizer) -> Quantizer:
    assert isinstance(quantizer.scale, torch.Tensor)  # noqa: S101 -- `_is_scaled`
    return replace(quantizer, scale=quantizer.scale / CLIPPING)


def _is_scaled(quantizer: Quantizer) -> bool:
    scale = quantizer.scale
    return isinstance(scale, torch.Tensor) and bool((scale != 1).any())
