"""Name scales that are far from what their tensors hold, such as reciprocals.

What K and V hold is known from the statistics of a calibration, else from the weights that make
them, else from the other layers, and from
the models in use.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch.nn.functional import interpolate

from fp8calib.checkpoint.header import TensorEntry
from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.dialects.fp8.weights import WEIGHT_FORMATS, name_companions
from fp8calib.engines.outliers import find_outliers
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.verdicts import EngineReport, LayerVerdict, LoadVerdict
from fp8calib.engines.status import Status
from fp8calib.engines.weights.expected import PLAIN_DTYPES
from fp8calib.errors import format_ranges, shorten
from fp8calib.fp8.formats import E4M3FN, Fp8Format
from fp8calib.geometry.model_geometry import Attention, ModelGeometry
from fp8calib.geometry.sites import KV_ROLES, Role, Site
from fp8calib.stats.calibration_stats import CalibrationStats

_TOLERANCE = 16.0
"""How far above the statistics a scale may be: other text and headroom give less. It may be four
times as far below, because rules like `percentile` clip."""
_LEAST_USUAL, _MOST_USUAL = 2.0**-20, 2.0
"""The median of the scales of K or of V that is not suspicious. K and V of the models in use reach
some 1 to 500, so their scales lie around 0.002 to 1."""
_UNCALIBRATED = 1.0
"""The scale that tools write without calibration. It costs little, and is only a problem."""
_MOST_WEIGHT = 448.0
"""The median of the largest weights of linears that is no reason for a note."""
_NUM_LAYERS = 8
"""Of so many layers the weights are read."""
_SHIFTED_NORMS = (
    *("gemma", "gemma2", "gemma3_text", "nemotron", "qwen3_next", "qwen3_5_text"),
    *("qwen3_5_moe_text", "recurrent_gemma", "vaultgemma"),
)
"""Model types whose norms multiply by 1 + weight (transformers 5.23 `models/*/modeling_*.py`,
read)."""
_WEIGHTLESS_NORMS = ("gemma3n_text", "gemma4_text", "llama4_text")
"""Model types that norm K or V without a weight, which no tensor shows (transformers 5.23
`models/*/modeling_*.py`, read)."""

_RECIPROCAL = ": {} like {}; engines need amax / 448, not 448 / amax"
_FIX = "write the scales of these statistics (`fp8calib export`), or calibrate again"
_WEIGHT_FIX = "quantize the model again"


@dataclass(frozen=True, slots=True)
class Range:
    """The magnitudes that the largest value of a tensor may have."""

    least: float
    most: float
    source: str
    """What says so, as the end of a sentence."""

    def join(self, other: Range) -> Range:
        """Give the range of the larger of two tensors."""
        least, most = max(self.least, other.least), max(self.most, other.most)
        return Range(least, most, self.source if self.most > other.most else other.source)

    def judge(self, scale: float, fmt: Fp8Format = E4M3FN) -> str:
        """Say what is odd about a scale; empty where nothing is."""
        reach = scale * fmt.max
        if self.least <= reach <= self.most:
            return ""
        text = f"stands for values of up to {reach:,.4g}, but {self.source}"
        is_reciprocal = self.least <= fmt.max / scale <= self.most
        return f"{text}{_RECIPROCAL.format('it looks', 'a reciprocal')}" if is_reciprocal else text


Ranges = Mapping[tuple[int, Role], Range]
"""By layer and role; not every layer is known."""


def measure_ranges(stats: CalibrationStats) -> Ranges:
    """Give the ranges of K and V by statistics."""
    found = {}
    for layer, attention in stats.geometry.attentions():
        for role in KV_ROLES:
            amax = _read_amax(stats, attention.site(role))
            if amax > 0:
                found[layer.index, role] = _allow(amax)
    return found


def _read_amax(stats: CalibrationStats, site: Site) -> float:
    """Give the largest magnitude at a site; 0 where it was not observed."""
    found = stats.sites.get(site)
    return 0.0 if found is None or not found.amax.numel() else float(found.amax.max())


def _allow(amax: float) -> Range:
    return Range(amax / _TOLERANCE / 4, amax * _TOLERANCE, f"calibration saw up to {amax:,.4g}")


def estimate_ranges(
    folder: ScaleFolder, geometry: ModelGeometry, *, also: Collection[int] = ()
) -> Ranges:
    """Estimate the ranges of K and V of some layers by the weights that make them of a norm.

    A norm's output has the length sqrt(hidden size) before its weight g, whatever the text. Hence
    no channel i of K exceeds sqrt(hidden size) * |W_i * g|; RoPE adds a factor of at most sqrt(2).
    In SmolLM2-135M the largest value of K and V was 2.8 to 7.4 times the largest |W_i * g|.

    Args:
        folder: the weights.
        geometry: the shape of the model.
        also: layers to look at beside a sample of all.
    """
    if geometry.model_type in _WEIGHTLESS_NORMS:
        return {}
    located = {name: file for file, held in folder.tensors.items() for name in held}
    attentions = list(geometry.attentions())
    step = max(1, (len(attentions) - 1) // (_NUM_LAYERS - 1))
    found = {}
    for position, (layer, attention) in enumerate(attentions):
        if position % step and layer.index not in also:
            continue
        for role in KV_ROLES:
            estimated = _estimate(folder, located, geometry, attention, role)
            if estimated is not None:
                found[layer.index, role] = estimated
    return found


def _estimate(
    folder: ScaleFolder,
    located: Mapping[str, str],
    geometry: ModelGeometry,
    attention: Attention,
    role: Role,
) -> Range | None:
    """Estimate the range of one tensor; None where it is not made by a norm and one weight."""
    path = attention.checkpoint_module
    parent, _, name = path.rpartition(".")
    projection = f"{path}.{role}_proj"
    names = (f"{projection}.weight", f"{parent}.input_layernorm.weight")
    beside = (each.removeprefix(f"{path}.") for each in located if each.startswith(f"{path}."))
    is_normed = any("norm" in each and each.startswith(role) for each in beside)
    if name == "cross_attn" or attention.producer is not None or is_normed:
        return None
    weight, norm = (_read(folder, located, each) for each in names)
    if weight is None or norm is None or weight.ndim != 2 or not weight.numel():
        return None
    beta = _read_bias(folder, located, f"{parent}.input_layernorm.bias", len(weight[0]))
    bias = _read_bias(folder, located, f"{projection}.bias", len(weight))
    if norm.shape != weight.shape[1:] or beta is None or bias is None:
        return None
    shift = (weight @ beta).abs() + bias.abs()
    if geometry.model_type in _SHIFTED_NORMS:
        norm += 1
    length = float((weight * norm).norm(dim=1).max())
    bound = 2**0.5 * (weight.shape[1] ** 0.5 * length + float(shift.max()))
    if not 0 < bound < float("inf"):
        return None
    usual = f"{role} reaches {length:,.4g} to {bound:,.4g} in this model"
    return Range(length / 8, bound * 8, usual)


def _read(folder: ScaleFolder, located: Mapping[str, str], name: str) -> torch.Tensor | None:
    """Read floats or FP8 with its scale; None where a tensor is missing or has another dtype."""
    entry = folder.tensors[located[name]][name] if name in located else None
    if entry is None or entry.dtype not in (*PLAIN_DTYPES, *WEIGHT_FORMATS):
        return None
    values = _read_floats(folder, located[name], name)
    if entry.dtype in PLAIN_DTYPES:
        return values
    scales = [each for each in name_companions(name).scales if each in located]
    if len(scales) != 1 or values.ndim != 2 or not values.numel():
        return None
    scale = _read_floats(folder, located[scales[0]], scales[0])
    if not scale.numel():
        return None
    rows, columns = (scale.numel(), 1) if scale.ndim < 2 else (scale.shape[0], scale[0].numel())
    # Where blocks do not divide a weight, this moves their borders a little: good for an estimate.
    return values * interpolate(scale.reshape(1, 1, rows, columns), values.shape)[0, 0]


def _read_floats(folder: ScaleFolder, file: str, name: str) -> torch.Tensor:
    with TensorFile(folder.path / file) as opened:
        return opened.read(name).float()


def _read_bias(
    folder: ScaleFolder, located: Mapping[str, str], name: str, length: int
) -> torch.Tensor | None:
    """Read a bias, zeros where the model has none; None where it has another shape or dtype."""
    if name not in located:
        return torch.zeros(length)
    bias = _read(folder, located, name)
    return bias if bias is not None and bias.shape == (length,) else None


def mark_odd_scales(report: EngineReport, ranges: Ranges) -> EngineReport:
    """Call scales of K and V misread that are far from statistics.

    Args:
        report: what an engine does with them.
        ranges: those of the statistics.
    """
    layers = tuple(_mark(layer, _list_odd(report, ranges)) for layer in report.layers)
    return report.model_copy(update={"layers": layers})


def suspect_odd_scales(
    report: EngineReport, estimate: Callable[[frozenset[int]], Ranges]
) -> EngineReport:
    """Suspect scales of K and V that no statistics are given for.

    The weights decide where they tell what K and V reach; else the scales of the other layers, and
    what K and V reach in the models in use.

    Args:
        report: what an engine does with the scales.
        estimate: gives the ranges by the weights: of a sample of layers and those that it gets.
    """
    outliers = {
        (layer, role): text
        for role in KV_ROLES
        for layer, text in find_outliers(_list_used(report, role)).items()
    }
    ranges = estimate(frozenset(layer for layer, _ in outliers))
    found = _list_odd(report, ranges)
    found |= {slot: text for slot, text in outliers.items() if slot not in ranges}
    uncalibrated = {
        (layer, role)
        for role in KV_ROLES
        for layer, value in _list_used(report, role).items()
        if value == _UNCALIBRATED
    }
    suspected = {slot: text for slot, text in found.items() if slot not in uncalibrated}
    noted = {slot: text for slot, text in found.items() if slot in uncalibrated}
    report = report.suspect(*_summarize(suspected))
    report = report.add_problems(*_summarize(noted))
    estimated = {role for _, role in ranges}
    unusual = (_find_unusual(report, role) for role in KV_ROLES if role not in estimated)
    return report.suspect(*filter(None, unusual))


def _list_used(report: EngineReport, role: Role) -> dict[int, float]:
    """List the scales of K or of V that the engine uses, by layer."""
    verdicts = ((layer.layer, _find(layer, role)) for layer in report.layers)
    return {
        index: each.value for index, each in verdicts if each.status is Status.USED and each.value
    }


def _list_odd(report: EngineReport, ranges: Ranges) -> dict[tuple[int, Role], str]:
    return {
        (layer.layer, role): text
        for layer in report.layers
        for role in KV_ROLES
        if (text := _judge(layer, role, ranges))
    }


def _judge(layer: LayerVerdict, role: Role, ranges: Ranges) -> str:
    verdict, own = _find(layer, role), ranges.get((layer.layer, role))
    if verdict.status is not Status.USED or not verdict.value or own is None:
        return ""
    other = Role.V if role is Role.K else Role.K
    partner = ranges.get((layer.layer, other))
    if verdict.value != _find(layer, other).value:
        return own.judge(verdict.value)
    # One scale for both: it has to suit the larger.
    return "" if partner is None else own.join(partner).judge(verdict.value)


def _find(layer: LayerVerdict, role: Role) -> LoadVerdict:
    return layer.k if role is Role.K else layer.v


def _mark(layer: LayerVerdict, found: Mapping[tuple[int, Role], str]) -> LayerVerdict:
    def mark(role: Role) -> LoadVerdict:
        verdict, text = _find(layer, role), found.get((layer.layer, role))
        if text is None:
            return verdict
        return verdict.model_copy(update={"status": Status.MISREAD, "why": text, "fix": _FIX})

    return LayerVerdict(layer=layer.layer, k=mark(Role.K), v=mark(Role.V))


def _summarize(found: Mapping[tuple[int, Role], str]) -> Iterator[str]:
    """Describe the first odd scale of K and of V, and list the layers of the others."""
    for role in KV_ROLES:
        layers = sorted(layer for layer, each in found if each is role)
        if layers:
            others = f" (and those of layers {format_ranges(layers[1:])})" if layers[1:] else ""
            yield f"the {role} scale of layer {layers[0]} {found[layers[0], role]}{others}"


def _find_unusual(report: EngineReport, role: Role) -> str:
    """Name scales as large as reciprocals are, or far too small for K or V of any model."""
    values = list(_list_used(report, role).values())
    if not values or _LEAST_USUAL <= median(values) <= _MOST_USUAL:
        return ""
    found = f"the {role} scales ({min(values):.4g} to {max(values):.4g}) stand for values of up to "
    found += f"{max(values) * E4M3FN.max:,.4g}"
    if median(values) > _MOST_USUAL:
        found += _RECIPROCAL.format("they look", "reciprocals, or like amax")
    return found


def judge_weight_scales(
    tensors: Mapping[str, TensorEntry], largest: Mapping[str, float], stats: CalibrationStats
) -> LoadVerdict | None:
    """Find a scale of an FP8 weight, or of its input, that is far from the statistics.

    Input scales that are small are not judged: rules may clip inputs by any factor.

    Args:
        tensors: of the checkpoint, by name.
        largest: the largest number of each scale, by name.
        stats: of the unquantized model.
    """
    for _, linear in stats.geometry.linears():
        entry = tensors.get(linear.checkpoint_name or "")
        if entry is None or entry.dtype not in WEIGHT_FORMATS or linear.num_experts:
            continue
        companions = name_companions(str(linear.checkpoint_name))
        roles = {Role.WEIGHT: companions.scales, Role.INPUT: companions.input_scales}
        for role, name in ((role, name) for role, names in roles.items() for name in names):
            amax = _read_amax(stats, Site(linear.module, role))
            if name not in largest or amax == 0:
                continue
            allowed = _allow(amax)
            if role is Role.INPUT:
                allowed = replace(allowed, least=0.0)
            if text := allowed.judge(largest[name], WEIGHT_FORMATS[entry.dtype]):
                why = f"{shorten(name)} ({largest[name]:.4g}) {text}"
                return LoadVerdict(status=Status.MISREAD, why=why, fix=_WEIGHT_FIX)
    return None


def note_unusual_weights(tensors: Mapping[str, TensorEntry], largest: Mapping[str, float]) -> str:
    """Say where the scales of FP8 weights are as large as reciprocals; empty where they are not."""
    reach = [
        largest[scale] * WEIGHT_FORMATS[entry.dtype].max
        for name, entry in tensors.items()
        if entry.dtype in WEIGHT_FORMATS
        for scale in name_companions(name).scales
        if scale in largest
    ]
    if not reach or median(reach) <= _MOST_WEIGHT:
        return ""
    found = f"their scales stand for weights of up to {max(reach):,.4g}"
    return found + _RECIPROCAL.format("they look", "reciprocals")
