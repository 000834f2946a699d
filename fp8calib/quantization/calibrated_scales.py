"""Compute scales of inputs, K and V from statistics, by the checkpoint's own names.

Statistics name modules of the loaded model. A checkpoint may use other names, and may have one
tensor per expert if the model stacks them. No model is built to translate the names: for most
linears the statistics name the tensor that the weight was read from, and other tensors of the layer
have the same prefix.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

import torch

from fp8calib.calibration.calibration_stats import RunStats
from fp8calib.calibration.fingerprint import fingerprint_model
from fp8calib.calibration.origin import calibrate_first, explain_difference
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.errors import ExportError, ModelError, join_or
from fp8calib.formats.compute import compute_kv_scales, compute_linear_scales
from fp8calib.formats.fp8.dialect import Fp8Dialect
from fp8calib.formats.kv.kv_scales import make_scale_tensors
from fp8calib.formats.table import ScaleTable
from fp8calib.model.geometry import Attention, Layer, Linear, ModelGeometry, Role, Site
from fp8calib.model.module_paths import list_paths, span_experts, split_expert
from fp8calib.numerics.clip_range import find_clip_range
from fp8calib.numerics.encode import scale_of
from fp8calib.numerics.formats import E4M3FN
from fp8calib.numerics.rules import PLAIN_RULES, Rule, ScaleRules
from fp8calib.numerics.schemes import list_without_calibration
from fp8calib.quantization.ignored import span_layers, spell_options
from fp8calib.quantization.matrices import Matrix
from fp8calib.quantization.plan import CalibratedScales
from fp8calib.quantization.select import Selection
from fp8calib.quantization.settings import PlanSettings

_PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
"""Mixtral's names of projections -> the names in all other families."""


def check_stats_model(stats: RunStats, checkpoint: Checkpoint) -> None:
    """Refuse statistics of another model."""
    found = fingerprint_model(checkpoint.load_config(), checkpoint)
    measured = stats.header.model_fingerprint
    if found != measured:
        raise ModelError(
            f"{checkpoint.folder} is not the model these statistics were calibrated on, which had "
            f"{explain_difference(measured, found)}",
            hint="pass the model that was calibrated",
        )


def find_kv_scales(
    stats: RunStats,
    checkpoint: Checkpoint,
    dialect: Fp8Dialect,
    rules: ScaleRules = PLAIN_RULES,
) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
    """Compute the scales of K and V, with notes; none if the statistics do not have them."""
    if not any(each.site(Role.K) in stats.sites for _, each in stats.geometry.attentions()):
        return {}, ()
    table = compute_kv_scales(stats, E4M3FN, rules=rules)

    def name(geometry: ModelGeometry, attention: Attention, role: Role) -> tuple[str, ...]:
        has_projections = f"{attention.checkpoint_module}.k_proj.weight" in checkpoint.tensors
        return dialect.name_kv(geometry, attention, role, has_projections)

    return make_scale_tensors(table, name=name), _explain_substitutes(table)


def find_scales(
    stats: RunStats,
    checkpoint: Checkpoint,
    settings: PlanSettings,
    selection: Selection,
    rules: ScaleRules = PLAIN_RULES,
) -> CalibratedScales:
    """Compute the scales of K, V and static inputs of a checkpoint from statistics."""
    kv, kv_notes = find_kv_scales(stats, checkpoint, settings.dialect, rules)
    static, others = split_static(settings, selection)
    inputs, notes = find_input_scales(stats, static, others=others, rules=rules)
    return CalibratedScales(
        inputs=inputs,
        kv=kv,
        origin=stats.origin if inputs or kv else None,
        geometry=stats.geometry,
        notes=(*notes, *kv_notes),
    )


def find_input_scales(
    stats: RunStats,
    quantized: Collection[Matrix],
    *,
    others: Collection[Matrix] = (),
    rules: ScaleRules = PLAIN_RULES,
) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
    """Compute a static scale for the inputs of linears, whose weights are `quantized`, with notes.

    All experts of a layer share one for each fused projection, as in engines. `others` are the
    weights of linears without a static scale.
    """
    if not quantized:
        return {}, ()
    table = compute_linear_scales(stats, E4M3FN, rules=rules)
    linears = _find_linears(stats, quantized)
    if missing := [matrix.module for matrix in quantized if matrix.module not in linears]:
        outside = list_unmeasured(stats, quantized, others)
        inside = [each for each in missing if not any(p in outside for p in list_paths(each))]
        layers = (span_layers((split_expert(each) or (each,))[0]) for each in inside)
        raise ExportError(
            f"the stats have no input of {missing[0]}",
            hint=f"add {spell_options(dict.fromkeys([*outside, *layers]))}, which calibrate does "
            "not measure in this model, or use --scheme "
            f"{join_or(list_without_calibration())}",
        )
    largest: dict[str, torch.Tensor] = defaultdict(lambda: torch.tensor(0.0))
    for matrix in quantized:
        linear, expert = linears[matrix.module]
        group = span_experts(matrix.fused_group)
        scale = find_input_scale(stats, table, rules.rule, linear, expert=expert)
        largest[group] = torch.maximum(largest[group], scale)
    inputs = {matrix.module: largest[span_experts(matrix.fused_group)] for matrix in quantized}
    return inputs, _explain_substitutes(table)


def split_static(settings: PlanSettings, selection: Selection) -> tuple[list[Matrix], list[Matrix]]:
    """List the weights of linears that have a static input scale, and of those that have none."""
    static: list[Matrix] = []
    others: list[Matrix] = []
    for matrix in selection.quantized:
        is_static = settings.scheme_of(matrix.module).has_static_inputs
        (static if is_static else others).append(matrix)
    return static, others


def list_unmeasured(
    stats: RunStats, quantized: Collection[Matrix], others: Collection[Matrix] = ()
) -> list[str]:
    """Name the outermost modules that hold only linears outside the decoder layers.

    Calibration measures inputs in decoder layers. `others` need no measurement.
    """
    layers = {prefix for layer in stats.geometry.layers for prefix in _find_prefixes(layer)}
    measured = {linear.checkpoint_name for _, linear in stats.geometry.linears()}
    outside = {
        matrix.module
        for matrix in quantized
        if matrix.tensor not in measured and layers.isdisjoint(list_paths(matrix.module))
    }
    modules = [matrix.module for matrix in (*quantized, *others)]
    inside = {path for name in modules if name not in outside for path in list_paths(name)}
    outermost = (
        next((path for path in list_paths(name) if path not in inside), name)
        for name in modules
        if name in outside
    )
    return list(dict.fromkeys(outermost))


def find_input_scale(
    stats: RunStats,
    table: ScaleTable,
    rule: Rule,
    linear: Linear,
    *,
    expert: int | None = None,
) -> torch.Tensor:
    """Find the static scale of a linear's input: fp32 [].

    `table` is what `compute_linear_scales` makes of `stats`; other linears are scaled by `rule`.
    For stacked experts it is their largest scale, unless one `expert` is named.
    """
    if linear.section != "other":
        experts = linear.experts if expert is None else (expert,)
        sites = (linear.logical(part, each) for part in linear.parts for each in experts)
        scales = (table.scales[Site(module, Role.INPUT)] for module in sites)
        return torch.stack([scale.values[0] for scale in scales]).max()
    site = Site(linear.module, Role.INPUT)
    if site not in stats.sites:
        raise ExportError(
            f"the stats have no data for {site}",
            hint=f"{calibrate_first('--stats', recipe='w8a8-static')}, or add "
            f"{spell_options([linear.module])} to leave it unquantized",
        )
    measured, fmt = stats.sites[site], table.fmt
    amax = measured.amax.max()
    clip_range = find_clip_range(rule, amax=float(amax), histogram=measured.histogram, fmt=fmt)
    return scale_of(clip_range.apply(amax), fmt) if amax > 0 else torch.tensor(1.0)


def _find_linears(
    stats: RunStats, matrices: Collection[Matrix]
) -> dict[str, tuple[Linear, int | None]]:
    """Find the linears of statistics by weights of the checkpoint, whose modules are the keys.

    For a weight in stacked experts these are found, with its number.
    """
    linears = {linear.checkpoint_name: linear for _, linear in stats.geometry.linears()}
    experts = {
        (prefix, linear.module.rpartition(".")[2]): linear
        for layer in stats.geometry.layers
        for prefix in _find_prefixes(layer)
        for linear in layer.linears
        if linear.num_experts
    }
    found: dict[str, tuple[Linear, int | None]] = {}
    for matrix in matrices:
        if (linear := linears.get(matrix.tensor)) is not None:
            found[matrix.module] = linear, None
        elif expert := split_expert(matrix.module):
            _, number, projection = expert
            stacked = experts.get((matrix.layer, _PROJECTIONS.get(projection, projection)))
            if stacked and number < stacked.num_experts:
                found[matrix.module] = stacked, number
    return found


def _find_prefixes(layer: Layer) -> Iterator[str]:
    """Name the layer as the checkpoint does: the prefix of its linears' tensors."""
    prefixes: set[str] = set()
    for linear in layer.linears:
        name = (linear.checkpoint_name or "").removesuffix(".weight")
        inner = linear.module.removeprefix(f"{layer.module}.")
        if name.endswith(f".{inner}"):
            prefixes.add(name.removesuffix(f".{inner}"))
    return iter(prefixes or {layer.module})


def _explain_substitutes(table: ScaleTable) -> tuple[str, ...]:
    return tuple(f"{site}: {scale.why_not_observed}" for site, scale in table.not_observed())
