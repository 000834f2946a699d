"""The faults that a server may have, as emulations: scales that are lost, too small or mixed up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.geometry.sites import KV_ROLES, Role, Site
from fp8calib.verification.emulation.emulate import Emulation
from fp8calib.verification.emulation.fake_quantize import Quantizer

CLIPPING = 8
"""A scale divided by less may not clip; dividing by a larger one clips the same large values."""


class Mixup(StrEnum):
    """How the right scales get to the wrong place, in all layers."""

    SWAPPED = "swapped"
    """K has the scale of V, and V that of K."""
    INVERTED = "inverted"
    """1 / scale, as where one tool multiplies by what another divides by."""
    NEXT = "next"
    """A layer has the scales of the next one; the last layer has its own."""
    PREVIOUS = "previous"
    """A layer has the scales of the previous one; the first layer has its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A candidate with scales that are lost (1.0), too small or mixed up."""

    emulation: Emulation
    layer: int | None = None
    """None: the scales of all layers."""
    is_lost: bool = False
    role: Role | None = None
    """None: K and V."""
    mixup: Mixup | None = None


def lose_query_scales(name: str, emulation: Emulation) -> dict[str, Fault]:
    """Quantize q of a candidate at 1.0; empty where it is not quantized with another scale."""
    return _lose_scales(name, emulation, Role.Q) if _find_scaled(emulation, Role.Q) else {}


def lose_kv_scales(name: str, emulation: Emulation) -> dict[str, Fault]:
    """Quantize K, or V, of a candidate at 1.0; empty unless both have other scales.

    Where only one of them has any, nothing but scale 1.0 is left without them.
    """
    if not all(_find_scaled(emulation, role) for role in KV_ROLES):
        return {}
    return _lose_scales(name, emulation, Role.K) | _lose_scales(name, emulation, Role.V)


def mix_up_scales(name: str, emulation: Emulation, geometry: ModelGeometry) -> dict[str, Fault]:
    """Give K and V the scales of other places; without those that change nothing.

    A scale goes only to a place where one of the same shape is.
    """
    pairs = ([attention.site(role) for role in KV_ROLES] for _, attention in geometry.attentions())
    sites = [pair for pair in pairs if all(_has_scale(emulation, site) for site in pair)]
    scales = [[_scale(emulation, site) for site in pair] for pair in sites]
    mixed = {
        Mixup.SWAPPED: [pair[::-1] for pair in scales],
        Mixup.INVERTED: [[1 / scale for scale in pair] for pair in scales],
        Mixup.NEXT: [*scales[1:], *scales[-1:]],
        Mixup.PREVIOUS: [*scales[:1], *scales[:-1]],
    }
    faults: dict[str, Fault] = {}
    for mixup, given in mixed.items():
        changed = {
            site: replace(emulation.quantizers[site], scale=scale)
            for places, pair, own in zip(sites, given, scales, strict=True)
            for site, scale, old in zip(places, pair, own, strict=True)
            if scale.shape == old.shape and not torch.equal(scale, old)
        }
        if changed:
            mixed_up = _change(emulation, changed)
            faults[f"{name} with {_MIXED[mixup]}"] = Fault(emulation=mixed_up, mixup=mixup)
    return faults


_MIXED = {
    Mixup.SWAPPED: "k and v scales swapped",
    Mixup.INVERTED: "reciprocals of its scales",
    Mixup.NEXT: "the scales of the next layer",
    Mixup.PREVIOUS: "the scales of the previous layer",
}


def has_scaled_kv(emulation: Emulation) -> bool:
    """Tell whether K or V of any layer has a scale other than 1.0."""
    return any(_find_scaled(emulation, role) for role in KV_ROLES)


def list_layer_faults(
    name: str, emulation: Emulation, geometry: ModelGeometry
) -> Iterator[tuple[str, Fault]]:
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
                Fault(emulation=_change(emulation, one), layer=layer.index, is_lost=True),
            )
            small = {site: _divide(quantizer) for site, quantizer in found.items()}
            yield (
                f"{name} with layer {layer.index} at 1/{CLIPPING} of its scales",
                Fault(emulation=_change(emulation, small), layer=layer.index),
            )


def _lose_scales(name: str, emulation: Emulation, role: Role) -> dict[str, Fault]:
    scaled = _find_scaled(emulation, role)
    lost = {site: replace(each, scale=torch.tensor(1.0)) for site, each in scaled.items()}
    fault = Fault(emulation=_change(emulation, lost), is_lost=True, role=role)
    return {f"{name} without its {role} scales": fault}


def _has_scale(emulation: Emulation, site: Site) -> bool:
    quantizer = emulation.quantizers.get(site)
    return quantizer is not None and isinstance(quantizer.scale, torch.Tensor)


def _scale(emulation: Emulation, site: Site) -> torch.Tensor:
    scale = emulation.quantizers[site].scale
    assert isinstance(scale, torch.Tensor)  # noqa: S101 -- `_has_scale`
    return scale


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
