"""The faults that a server may have, as emulations: scales that are lost, too small or mixed up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from fp8calib.model.shapes import KV_ROLES, ModelGeometry, Role, Site
from fp8calib.verification.emulation.candidate import Candidate

CLIPPING = 8
"""A scale divided by less may not clip; dividing by a larger one clips the same large values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A candidate with scales that are lost (1.0), too small or mixed up."""

    emulation: Candidate
    effect: str
    """What the server then does, in words."""
    layer: int | None = None
    """None: the scales of all layers."""
    is_lost: bool = False
    is_mixup: bool = False
    """Whether the right scales are in the wrong places."""


def lose_query_scales(name: str, emulation: Candidate) -> dict[str, Fault]:
    """Quantize q of a candidate at 1.0; empty where it is not quantized with another scale."""
    return _lose_scales(name, emulation, Role.Q) if _find_scaled(emulation, Role.Q) else {}


def lose_kv_scales(name: str, emulation: Candidate) -> dict[str, Fault]:
    """Quantize K, or V, of a candidate at 1.0; empty unless both have other scales.

    Where only one of them has any, nothing but scale 1.0 is left without them.
    """
    if not all(_find_scaled(emulation, role) for role in KV_ROLES):
        return {}
    return _lose_scales(name, emulation, Role.K) | _lose_scales(name, emulation, Role.V)


def mix_up_scales(name: str, emulation: Candidate, geometry: ModelGeometry) -> dict[str, Fault]:
    """Give K and V the scales of other places; without those that change nothing.

    A scale goes only to a place where one of the same shape is.
    """
    known = _find_static(emulation, *KV_ROLES)
    pairs = ([attention.site(role) for role in KV_ROLES] for _, attention in geometry.attentions())
    sites = [pair for pair in pairs if all(site in known for site in pair)]
    scales = [[known[site] for site in pair] for pair in sites]
    mixed = (
        (
            "k and v scales swapped",
            "k is quantized with the scales of v, and v with those of k",
            [pair[::-1] for pair in scales],
        ),
        (  # as where one tool multiplies by what another divides by
            "reciprocals of its scales",
            "every k/v scale is 1 / scale",
            [[1 / scale for scale in pair] for pair in scales],
        ),
        (  # the last layer has its own
            "the scales of the next layer",
            "every layer has the k/v scales of the next one",
            [*scales[1:], *scales[-1:]],
        ),
        (  # the first layer has its own
            "the scales of the previous layer",
            "every layer has the k/v scales of the previous one",
            [*scales[:1], *scales[:-1]],
        ),
    )
    faults: dict[str, Fault] = {}
    for mixup, effect, given in mixed:
        changed = {
            site: scale
            for places, pair in zip(sites, given, strict=True)
            for site, scale in zip(places, pair, strict=True)
            if scale.shape == known[site].shape and not torch.equal(scale, known[site])
        }
        if changed:
            mixed_up = _rescale(emulation, changed)
            faults[f"{name} with {mixup}"] = Fault(emulation=mixed_up, effect=effect, is_mixup=True)
    return faults


def has_scaled_kv(emulation: Candidate) -> bool:
    """Tell whether K or V of any layer has a scale other than 1.0."""
    return bool(_find_scaled(emulation, *KV_ROLES))


def list_layer_faults(name: str, emulation: Candidate, geometry: ModelGeometry) -> dict[str, Fault]:
    """List the faults of single layers of a candidate with KV scales, by their names."""
    scaled = _find_scaled(emulation, *KV_ROLES)
    faults: dict[str, Fault] = {}
    for layer, attention in geometry.attentions():
        own = {site: scale for site, scale in scaled.items() if site.module == attention.module}
        if own:
            small = _rescale(emulation, {site: scale / CLIPPING for site, scale in own.items()})
            place = f"{name} with layer {layer.index}"
            faults[f"{place} at scale 1.0"] = Fault(
                emulation=_rescale(emulation, dict.fromkeys(own, _ONE)),
                effect=f"the k/v scales of layer {layer.index} are not in use",
                layer=layer.index,
                is_lost=True,
            )
            faults[f"{place} at 1/{CLIPPING} of its scales"] = Fault(
                emulation=small,
                effect=f"values of layer {layer.index} clip, as its scales are too small",
                layer=layer.index,
            )
    return faults


_ONE = torch.tensor(1.0)


def _lose_scales(name: str, emulation: Candidate, role: Role) -> dict[str, Fault]:
    lost = _rescale(emulation, dict.fromkeys(_find_scaled(emulation, role), _ONE))
    where = " in all layers" if role in KV_ROLES else ""
    effect = f"{role} is quantized at scale 1.0{where}"
    return {f"{name} without its {role} scales": Fault(emulation=lost, effect=effect, is_lost=True)}


def _find_static(emulation: Candidate, *roles: Role) -> dict[Site, torch.Tensor]:
    """Find the static scales of some roles."""
    return {
        site: quantizer.scale
        for site, quantizer in emulation.quantizers.items()
        if site.role in roles and isinstance(quantizer.scale, torch.Tensor)
    }


def _find_scaled(emulation: Candidate, *roles: Role) -> dict[Site, torch.Tensor]:
    """Find those that are other than 1.0."""
    found = _find_static(emulation, *roles)
    return {site: scale for site, scale in found.items() if bool((scale != 1).any())}


def _rescale(emulation: Candidate, scales: Mapping[Site, torch.Tensor]) -> Candidate:
    """Quantize some sites with other scales."""
    quantizers = emulation.quantizers
    changed = {site: replace(quantizers[site], scale=scale) for site, scale in scales.items()}
    return replace(emulation, quantizers={**quantizers, **changed})
