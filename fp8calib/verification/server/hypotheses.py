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
    """None: the q scales of all layers."""
    is_lost: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedFault(Fault):
    """A fault, and the candidate with it."""

    emulation: Emulation


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerEffect(Fault):
    """What a candidate changes with a fault in one layer."""

    layer: int
    changes: torch.Tensor
    """By token: fp64 [N]."""


def lose_query_scales(name: str, emulation: Emulation) -> dict[str, EmulatedFault]:
    """Quantize q of a candidate at 1.0; empty where it is not quantized with another scale."""
    scaled = {
        site: quantizer
        for site, quantizer in emulation.quantizers.items()
        if site.role is Role.Q and _is_scaled(quantizer)
    }
    if not scaled:
        return {}
    lost = {site: replace(each, scale=torch.tensor(1.0)) for site, each in scaled.items()}
    fault = EmulatedFault(base=name, layer=None, is_lost=True, emulation=_change(emulation, lost))
    return {f"{name} without its q scales": fault}


def has_kv_scales(emulation: Emulation) -> bool:
    """Tell whether K or V of any layer has a scale other than 1.0."""
    return any(
        site.role in KV_ROLES and _is_scaled(quantizer)
        for site, quantizer in emulation.quantizers.items()
    )


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


def _change(emulation: Emulation, changed: Mapping[Site, Quantizer]) -> Emulation:
    return replace(emulation, quantizers={**emulation.quantizers, **changed})


def _divide(quantizer: Quantizer) -> Quantizer:
    assert isinstance(quantizer.scale, torch.Tensor)  # noqa: S101 -- `_is_scaled`
    return replace(quantizer, scale=quantizer.scale / CLIPPING)


def _is_scaled(quantizer: Quantizer) -> bool:
    scale = quantizer.scale
    return isinstance(scale, torch.Tensor) and bool((scale != 1).any())
