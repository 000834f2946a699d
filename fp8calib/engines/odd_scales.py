"""Name scales of K and V that are far from what they hold, such as reciprocals.

What K and V hold is known from the statistics of a calibration, else from the weights that make
them, else from the other layers, and from the models in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import median

from fp8calib.engines.outliers import find_outliers
from fp8calib.engines.reach import Reach, find_odd
from fp8calib.engines.replay.verdicts import EngineReport, LayerVerdict, LoadVerdict
from fp8calib.engines.scale_mixups import Slot, find_common_factor, find_mixup, find_swap
from fp8calib.engines.status import Status
from fp8calib.engines.weight_estimates import Estimates
from fp8calib.errors import format_ranges
from fp8calib.model.shapes import KV_ROLES, Role
from fp8calib.numerics.formats import E4M3FN

_LEAST_USUAL, _MOST_USUAL = 2.0**-20, 2.0
"""The median of the scales of K or of V that is not suspicious. K and V of the models in use reach
some 1 to 500, so their scales lie around 0.002 to 1."""
_MOST_FROM_ESTIMATE = 20.0
"""How far from what weights and the other layers suggest a scale may be. In SmolLM2-135M right
scales differ from it by at most 2.2 times."""
_UNCALIBRATED = 1.0
"""The scale that tools write without calibration. It costs little, and is only a problem."""
_ALL_UNCALIBRATED = (
    "every scale of K and V is 1.0, as in files that nobody calibrated; pass --stats to tell"
)
_FIX = "write the scales of these statistics (`fp8calib export`), or calibrate again"


def mark_odd_scales(
    report: EngineReport, factor: float = 1.0, *, reaches: Mapping[Slot, Reach]
) -> EngineReport:
    """Call scales of K and V bad that are far from statistics, or of another place.

    Args:
        report: what an engine does with them.
        factor: by what it multiplies them before it uses them.
        reaches: those of the statistics.
    """
    used = _list_used(report, factor)
    found = _list_odd(used, _match(used, reaches))
    amax = {slot: reach.amax for slot, reach in reaches.items()}
    mixup, mixed = find_mixup(used, amax)
    found |= dict.fromkeys(mixed, f"{mixup}: they fit the statistics there, not here")
    found |= find_common_factor(used, amax)
    layers = tuple(_mark(layer, found) for layer in report.layers)
    return report.model_copy(update={"layers": layers})


def suspect_odd_scales(
    report: EngineReport, estimate: Callable[[], Estimates], factor: float = 1.0
) -> EngineReport:
    """Suspect scales of K and V that no statistics are given for.

    The weights decide where they tell what K and V reach, with the scales of the other layers; else
    these, and what K and V reach in the models in use.

    Args:
        report: what an engine does with the scales.
        estimate: gives what the weights tell.
        factor: by what the engine multiplies the scales before it uses them.
    """
    used = _list_used(report, factor)
    estimates = estimate()
    reaches = _match(used, estimates.reaches)
    likely = {slot: reach.amax / E4M3FN.max for slot, reach in reaches.items()}
    found = dict(_list_outliers(used, reaches, likely)) | _list_odd(used, reaches)
    is_known = {slot: value != _UNCALIBRATED for slot, value in used.items()}
    suspected = {slot: text for slot, text in found.items() if is_known[slot]}
    noted = {slot: text for slot, text in found.items() if not is_known[slot]}
    report = report.suspect(*_summarize(suspected))
    report = report.add_problems(*_summarize(noted), *filter(None, [estimates.note]))
    if used and set(used.values()) == {_UNCALIBRATED}:
        report = report.add_problems(_ALL_UNCALIBRATED)
    if swap := find_swap(used, likely):
        report = report.suspect(f"{swap}: they fit the weights of the other of the two")
    estimated = {role for _, role in reaches}
    unusual = (_find_unusual(used, role) for role in KV_ROLES if role not in estimated)
    return report.suspect(*filter(None, unusual))


def _list_outliers(
    used: Mapping[Slot, float], reaches: Mapping[Slot, Reach], likely: Mapping[Slot, float]
) -> Iterator[tuple[Slot, str]]:
    """List the scales that are far from those of the other layers."""
    for role in KV_ROLES:
        scales = {layer: value for (layer, each), value in used.items() if each is role}
        known = {layer: value for layer, value in scales.items() if (layer, role) in reaches}
        expected = {layer: likely[layer, role] for layer in known}
        unlike = find_outliers(known, expected, most_factor=_MOST_FROM_ESTIMATE)
        others = {
            layer: text for layer, text in find_outliers(scales).items() if layer not in known
        }
        yield from (((layer, role), text) for layer, text in {**others, **unlike}.items())


def _list_used(report: EngineReport, factor: float) -> dict[Slot, float]:
    """List the scales of K and V that the engine uses."""
    return {
        (layer.layer, role): verdict.value * (1.0 if verdict.value == 1.0 else factor)
        for layer in report.layers
        for role, verdict in zip(KV_ROLES, (layer.k, layer.v), strict=True)
        if verdict.status is Status.USED and verdict.value
    }


def _list_odd(used: Mapping[Slot, float], reaches: Mapping[Slot, Reach]) -> dict[Slot, str]:
    """Say what is odd about scales that are far from what their tensors reach."""
    groups = (
        {slot: each for slot, each in reaches.items() if slot[1] is role} for role in KV_ROLES
    )
    return {slot: text for group in groups for slot, text in find_odd(used, group).items()}


def _match(used: Mapping[Slot, float], reaches: Mapping[Slot, Reach]) -> dict[Slot, Reach]:
    """Give what each scale has to suit: the larger of K and V where one was made for both."""
    found = {}
    for (layer, role), scale in used.items():
        other = (layer, Role.V if role is Role.K else Role.K)
        is_shared = scale == used.get(other) and scale != _UNCALIBRATED
        slots = [(layer, role), other] if is_shared else [(layer, role)]
        if reaches.keys() >= set(slots):
            found[layer, role] = max((reaches[slot] for slot in slots), key=lambda each: each.amax)
    return found


def _mark(layer: LayerVerdict, found: Mapping[Slot, str]) -> LayerVerdict:
    def mark(role: Role, verdict: LoadVerdict) -> LoadVerdict:
        text = found.get((layer.layer, role))
        if text is None:
            return verdict
        return verdict.model_copy(update={"status": Status.BAD, "why": text, "fix": _FIX})

    return LayerVerdict(layer=layer.layer, k=mark(Role.K, layer.k), v=mark(Role.V, layer.v))


def _summarize(found: Mapping[Slot, str]) -> Iterator[str]:
    """Describe the first odd scale of K and of V, and list the layers of the others."""
    for role in KV_ROLES:
        layers = sorted(layer for layer, each in found if each is role)
        if layers:
            others = f" (and those of layers {format_ranges(layers[1:])})" if layers[1:] else ""
            yield f"the {role} scale of layer {layers[0]} {found[layers[0], role]}{others}"


def _find_unusual(used: Mapping[Slot, float], role: Role) -> str:
    """Name scales as large as reciprocals are, or far too small for K or V of any model."""
    values = [value for (_, each), value in used.items() if each is role]
    if not values or _LEAST_USUAL <= median(values) <= _MOST_USUAL:
        return ""
    found = f"the {role} scales ({min(values):.4g} to {max(values):.4g}) stand for values of up to "
    found += f"{max(values) * E4M3FN.max:,.4g}"
    if median(values) > _MOST_USUAL:
        found += ": they look like reciprocals, or like amax; engines need amax / 448"
    return found
