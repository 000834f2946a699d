"""The faults that a server may have: scales that are lost, too small or mixed up, as emulations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fp8calib.calibration.progress import Progress
from fp8calib.calibration.streamed_model import StreamedModel
from fp8calib.data.sequences import Batch, DataPlan, batches
from fp8calib.model.geometry import KV_ROLES, ModelGeometry, Role, Site
from fp8calib.model.prepared import PreparedModel
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.score import Scores, count_in_rounds, score_in_rounds

CLIPPING = 8
"""A scale divided by less may not clip; dividing by a larger one clips the same large values."""
SEQUENCES = 8
"""Answers are asked for again, and faults emulated, on at most so many sequences."""
_MOST_TIMES = 10
"""Faults together run over at most so many times the tokens of the text..."""
_LEAST_TOKENS = 512
"""...unless each then has fewer tokens than it can be told by."""
_ONE = torch.tensor(1.0)
_Pairs = Sequence[Sequence[torch.Tensor]]
"""The scales of K and V of each layer."""


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


def list_query_faults(candidates: Sequence[Candidate]) -> dict[str, Fault]:
    """List the candidates that quantize q with scales, at 1.0: they run beside the candidates."""
    return dict(_lose_scales(each, Role.Q, "") for each in candidates if _find_scaled(each, Role.Q))


def list_kv_faults(candidate: Candidate, geometry: ModelGeometry) -> dict[str, Fault]:
    """List the faults of the scales of K and V, by their names: of single layers, then of all."""
    faults = dict(_list_layer_faults(candidate, geometry))
    # Where only K or V has scales, nothing but scale 1.0 is left without them.
    if all(_find_scaled(candidate, role) for role in KV_ROLES):
        faults |= (_lose_scales(candidate, role, " in all layers") for role in KV_ROLES)
    return {**faults, **dict(_mix_up_scales(candidate, geometry))}


def has_scaled_kv(candidate: Candidate) -> bool:
    """Tell whether K or V of any layer has a scale other than 1.0."""
    return bool(_find_scaled(candidate, *KV_ROLES))


def _lose_scales(candidate: Candidate, role: Role, where: str) -> tuple[str, Fault]:
    lost = _rescale(candidate, dict.fromkeys(_find_scaled(candidate, role), _ONE))
    effect = f"{role} is quantized at scale 1.0{where}"
    fault = Fault(emulation=lost, effect=effect, is_lost=True)
    return f"{candidate.name} without its {role} scales", fault


def _list_layer_faults(
    candidate: Candidate, geometry: ModelGeometry
) -> Iterator[tuple[str, Fault]]:
    scaled = _find_scaled(candidate, *KV_ROLES)
    for layer, attention in geometry.attentions():
        own = {site: scale for site, scale in scaled.items() if site.module == attention.module}
        if not own:
            continue
        index, place = layer.index, f"{candidate.name} with layer {layer.index}"
        lost = _rescale(candidate, dict.fromkeys(own, _ONE))
        effect = f"the k/v scales of layer {index} are not in use"
        yield (
            f"{place} at scale 1.0",
            Fault(emulation=lost, effect=effect, layer=index, is_lost=True),
        )
        small = _rescale(candidate, {site: scale / CLIPPING for site, scale in own.items()})
        effect = f"values of layer {index} clip, as its scales are too small"
        yield (
            f"{place} at 1/{CLIPPING} of its scales",
            Fault(emulation=small, effect=effect, layer=index),
        )


_MIXUPS = (
    (
        "k and v scales swapped",
        "k is quantized with the scales of v, and v with those of k",
        lambda scales: [pair[::-1] for pair in scales],
    ),
    (  # as where one tool multiplies by what another divides by
        "reciprocals of its scales",
        "every k/v scale is 1 / scale",
        lambda scales: [[1 / scale for scale in pair] for pair in scales],
    ),
    (  # the last layer has its own
        "the scales of the next layer",
        "every layer has the k/v scales of the next one",
        lambda scales: [*scales[1:], *scales[-1:]],
    ),
    (  # the first layer has its own
        "the scales of the previous layer",
        "every layer has the k/v scales of the previous one",
        lambda scales: [*scales[:1], *scales[:-1]],
    ),
)
"""Name, effect, and how the pairs of scales change."""


def _mix_up_scales(candidate: Candidate, geometry: ModelGeometry) -> Iterator[tuple[str, Fault]]:
    """Give K and V the scales of other places of the same shape; leave out what changes nothing."""
    known = _find_static(candidate, *KV_ROLES)
    pairs = ([attention.site(role) for role in KV_ROLES] for _, attention in geometry.attentions())
    sites = [pair for pair in pairs if all(site in known for site in pair)]
    scales: _Pairs = [[known[site] for site in pair] for pair in sites]
    for mixup, effect, mix in _MIXUPS:
        given: _Pairs = mix(scales)
        changed = {
            site: scale
            for places, pair in zip(sites, given, strict=True)
            for site, scale in zip(places, pair, strict=True)
            if scale.shape == known[site].shape and not torch.equal(scale, known[site])
        }
        if changed:
            mixed_up = _rescale(candidate, changed)
            fault = Fault(emulation=mixed_up, effect=effect, is_mixup=True)
            yield f"{candidate.name} with {mixup}", fault


def _find_static(candidate: Candidate, *roles: Role) -> dict[Site, torch.Tensor]:
    """Find the static scales of some roles."""
    return {
        site: quantizer.scale
        for site, quantizer in candidate.quantizers.items()
        if site.role in roles and isinstance(quantizer.scale, torch.Tensor)
    }


def _find_scaled(candidate: Candidate, *roles: Role) -> dict[Site, torch.Tensor]:
    """Find the static scales other than 1.0."""
    found = _find_static(candidate, *roles)
    return {site: scale for site, scale in found.items() if bool((scale != 1).any())}


def _rescale(candidate: Candidate, scales: Mapping[Site, torch.Tensor]) -> Candidate:
    """Quantize some sites with other scales."""
    quantizers = candidate.quantizers
    changed = {site: replace(quantizers[site], scale=scale) for site, scale in scales.items()}
    return replace(candidate, quantizers={**quantizers, **changed})


def changes_of(compared: Scores, name: str) -> torch.Tensor:
    """Give what a candidate changes: fp64 [N]."""
    return (compared.candidates[name].logprobs - compared.reference.logprobs).double()


def choose_text(plan: DataPlan, batch_size: int, num_faults: int) -> list[Batch]:
    """Choose the first batches, as many as `_MOST_TIMES` allows for so many faults."""
    passes = max(count_in_rounds(num_faults), 1)
    most = max(_MOST_TIMES * plan.num_tokens // passes, _LEAST_TOKENS)
    chosen: list[Batch] = []
    for batch in batches(plan, batch_size):
        if batch.first >= SEQUENCES:
            break
        chosen.append(batch)
        if sum(each.num_tokens for each in chosen) >= most:
            break
    return chosen


def run_faults(
    model: PreparedModel | StreamedModel,
    text: Sequence[Batch],
    all_tokens: int,
    progress: Progress,
    faults: Mapping[str, Fault],
    what: str,
) -> dict[str, torch.Tensor]:
    """Emulate faults; give the changes of each: fp64 [N]."""
    tokens = sum(batch.num_tokens for batch in text) * count_in_rounds(len(faults))
    rounds = score_in_rounds(
        model,
        [replace(fault.emulation, name=name) for name, fault in faults.items()],
        text,
        progress=progress,
        stage=f"{what}, {tokens / all_tokens:.1f} times the text",
    )
    return {name: changes_of(compared, name) for compared in rounds for name in compared.candidates}
