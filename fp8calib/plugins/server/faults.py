"""The faults that a server may have: scales that are lost, too small or mixed up, as emulations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

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
_MIXUPS: tuple[tuple[str, str, Callable[[_Pairs], _Pairs]], ...] = (
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
    return {
        f"{each.name} without its {Role.Q} scales": Fault(
            emulation=_rescale(each, dict.fromkeys(scaled, _ONE)),
            effect=f"{Role.Q} is quantized at scale 1.0",
            is_lost=True,
        )
        for each in candidates
        if (scaled := _find_scaled(each, Role.Q))
    }


def list_kv_faults(candidate: Candidate, geometry: ModelGeometry) -> dict[str, Fault]:
    """List the faults of the scales of K and V, by their names: of single layers, then of all."""
    scaled = _find_scaled(candidate, *KV_ROLES)
    found: dict[str, Fault] = {}

    def add(name: str, effect: str, scales: Mapping[Site, torch.Tensor], **kind: Any) -> None:
        emulation = _rescale(candidate, scales)
        found[f"{candidate.name} {name}"] = Fault(emulation=emulation, effect=effect, **kind)

    for layer, attention in geometry.attentions():
        own = {site: scale for site, scale in scaled.items() if site.module == attention.module}
        if not own:
            continue
        index, lost = layer.index, dict.fromkeys(own, _ONE)
        small = {site: scale / CLIPPING for site, scale in own.items()}
        what, name = f"the k/v scales of layer {index} are not in use", f"with layer {index} at"
        add(f"{name} scale 1.0", what, lost, layer=index, is_lost=True)
        what = f"values of layer {index} clip, as its scales are too small"
        add(f"{name} 1/{CLIPPING} of its scales", what, small, layer=index)
    lost_roles = [[site for site in scaled if site.role is role] for role in KV_ROLES]
    # Where only K or V has scales, nothing but scale 1.0 is left without them.
    for role, sites in zip(KV_ROLES, lost_roles, strict=True) if all(lost_roles) else ():
        what = f"{role} is quantized at scale 1.0 in all layers"
        add(f"without its {role} scales", what, dict.fromkeys(sites, _ONE), is_lost=True)
    known = _find_static(candidate, *KV_ROLES)
    pairs = ([attention.site(role) for role in KV_ROLES] for _, attention in geometry.attentions())
    places = [pair for pair in pairs if all(site in known for site in pair)]
    for mixup, effect, mix in _MIXUPS:
        given = mix([[known[site] for site in pair] for pair in places])
        changed = {
            site: scale
            for site, scale in zip(chain(*places), chain(*given), strict=True)
            if scale.shape == known[site].shape and not torch.equal(scale, known[site])
        }
        if changed:
            add(f"with {mixup}", effect, changed, is_mixup=True)
    return found


def has_scaled_kv(candidate: Candidate) -> bool:
    """Tell whether K or V of any layer has a scale other than 1.0."""
    return bool(_find_scaled(candidate, *KV_ROLES))


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
