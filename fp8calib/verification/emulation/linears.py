"""Emulate what an engine does with the weights and inputs of a scheme or an FP8 checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from fp8calib.dialects.fp8.checkpoint import Fp8Checkpoint
from fp8calib.dialects.fp8.quantization_config import Activation
from fp8calib.engines.numerics import Numerics
from fp8calib.errors import ModelError, UsageError, VerificationError
from fp8calib.fp8.formats import Fp8Format
from fp8calib.fp8.schemes import Granularity, InputScaling, Scheme
from fp8calib.geometry.model_geometry import Linear, ModelGeometry
from fp8calib.geometry.sites import Role, Site
from fp8calib.model.load import LoadedModel
from fp8calib.model.weight_source import WeightSource
from fp8calib.scales.compute import compute_linear_scales
from fp8calib.scales.scale_table import SMALLEST_SCALE, ScaleTable, scale_of
from fp8calib.stats.calibration_stats import CalibrationStats
from fp8calib.verification.emulation.coverage import list_embedding_and_head
from fp8calib.verification.emulation.fake_quantize import Quantizer, ScaleRange
from fp8calib.verification.emulation.selected import SelectedWeights
from fp8calib.verification.emulation.stored_weights import (
    ClipLimits,
    CopiedParameter,
    StoredWeights,
)
from fp8calib.verification.emulation.weights import (
    Requantized,
    WeightChange,
    WeightParameter,
    find_parameters,
    find_rounded,
    is_expert_down,
    is_of_decoder,
)

Linears = tuple[dict[Site, Quantizer], tuple[WeightChange, ...]]
"""Quantizers of inputs by site, and changes to weights."""


def emulate_scheme(
    scheme: Scheme,
    geometry: ModelGeometry,
    selected: SelectedWeights,
    numerics: Numerics,
    *,
    fmt: Fp8Format,
    stats: CalibrationStats | None,
) -> Linears:
    """Emulate the checkpoint that `quantize` would write with `scheme`.

    Raises:
        UsageError: the scheme has static input scales, and there are no stats.
        ExportError: the stats have no data for an input.
    """
    quantizer = Quantizer(fmt=fmt, scale=scheme.weights, block=scheme.block)
    is_rounded = find_rounded(geometry, numerics)
    blocks = replace(quantizer, power_of_two=True) if scheme.weights is Granularity.BLOCK else None
    passes_float16 = numerics.weights_through_float16 and scheme.weights is Granularity.TENSOR
    changes = tuple(
        Requantized(
            parameters=group,
            quantizer=quantizer,
            through_float16=passes_float16 and not is_expert_down(group),
            again=blocks if is_rounded(group[0].name) else None,
        )
        for group in (*selected.groups, *((parameter,) for parameter in selected.others))
    )
    covered = {site.module for group in selected.groups for p in group for site in p.sites}
    linears = [linear for _, linear in geometry.linears() if linear.module in covered]
    if scheme.has_static_inputs and not numerics.static_inputs_ignored:
        return _static_inputs(linears, stats, numerics, scheme, fmt), changes
    if scheme.inputs is InputScaling.NONE and not numerics.inputs_always_quantized:
        return {}, changes
    plain, powers = (
        _dynamic_quantizer(scheme.inputs, fmt, numerics, is_rounded=each) for each in (False, True)
    )
    return {
        Site(linear.module, Role.INPUT): powers if is_rounded(linear.weight_name) else plain
        for linear in linears
    }, changes


def _dynamic_quantizer(
    inputs: InputScaling,
    fmt: Fp8Format,
    numerics: Numerics,
    *,
    is_rounded: bool,
    largest_amax: float | None = None,
) -> Quantizer:
    """Quantize inputs by group, else by token, as engines do that ignore static scales."""
    is_group = inputs is InputScaling.GROUP
    smallest = numerics.smallest_group_scale if is_group else numerics.smallest_dynamic_scale
    return Quantizer(
        fmt=fmt,
        scale=Granularity.GROUP if is_group else Granularity.TOKEN,
        smallest_scale=max(smallest, SMALLEST_SCALE),
        largest_amax=largest_amax,
        by_reciprocal=numerics.token_by_reciprocal and not is_group,
        power_of_two=is_rounded and is_group,
    )


def _static_inputs(
    linears: list[Linear],
    stats: CalibrationStats | None,
    numerics: Numerics,
    scheme: Scheme,
    fmt: Fp8Format,
) -> dict[Site, Quantizer]:
    if stats is None:
        raise UsageError(
            f"--scheme {scheme.name}: its input scales come from calibration",
            hint="pass the stats.safetensors of `fp8calib calibrate --recipe w8a8-static`",
        )
    table = compute_linear_scales(stats, fmt)
    found = ((linear, _static_scale(linear, table, stats, fmt)) for linear in linears)
    return {
        Site(linear.module, Role.INPUT): _static_quantizer(scale, fmt, numerics)
        for linear, scale in found
    }


def _static_scale(
    linear: Linear, table: ScaleTable, stats: CalibrationStats, fmt: Fp8Format
) -> torch.Tensor:
    """Give the scale of a linear's input; experts share the largest in engines."""
    if linear.section == "other":
        site = Site(linear.module, Role.INPUT)
        if site not in stats.sites:
            raise VerificationError(f"the stats have no data for {site}")
        return scale_of(stats.sites[site].amax.max(), fmt)
    sites = (
        Site(linear.logical(part, expert), Role.INPUT)
        for part in linear.parts
        for expert in linear.experts
    )
    return torch.stack([table.scales[site].values.max() for site in sites]).max()


def _static_quantizer(scale: torch.Tensor | float, fmt: Fp8Format, numerics: Numerics) -> Quantizer:
    return Quantizer(
        fmt=fmt,
        scale=torch.as_tensor(scale, dtype=torch.float32),
        by_reciprocal=numerics.input_by_reciprocal,
    )


def emulate_checkpoint(
    checkpoint: Fp8Checkpoint,
    source: WeightSource,
    geometry: ModelGeometry,
    model: LoadedModel,
    numerics: Numerics,
    *,
    is_changed: Callable[[str], bool],
) -> Linears:
    """Emulate an FP8 checkpoint: its weights, and its inputs as its config describes them.

    Inputs of other FP8 weights in the text decoder stay unquantized, and FP8 weights outside the
    decoder are not emulated (`coverage` reports both). `is_changed` tells whether the tensor of a
    name differs from the unquantized model's.

    Raises:
        ModelError: the checkpoint quantizes no linear of the model, quantizes one in part,
            lacks one, or quantizes the output head or an embedding.
    """
    found = _Matched(checkpoint, source, model)
    parameters = find_parameters(geometry, dict(model.named_modules()))
    is_rounded = find_rounded(geometry, numerics)
    stored = [parameter for parameter in parameters if found.is_stored(parameter)]
    if not stored:
        raise ModelError(
            f"{checkpoint.folder}: none of its FP8 weights belongs to a linear of the model",
            hint="name the model that the checkpoint was made from",
        )
    others = found.list_others(stored)
    found.refuse_embeddings()
    plain = StoredWeights(
        parameters=(),
        source=source,
        fmt=checkpoint.fmt,
        clip_limits=WeightSource(model, ClipLimits(checkpoint)),
        scales={parameter.name: found.scales_of(parameter) for parameter in stored},
    )
    blocks = Quantizer(fmt=checkpoint.fmt, scale=Granularity.BLOCK, power_of_two=True)
    changes: list[WeightChange] = []
    inputs: dict[Site, Quantizer] = {}
    for parameter in stored:
        activations = found.activations_of(parameter)
        has_groups = any(each.kind is InputScaling.GROUP for each in activations)
        rounds = is_rounded(parameter.name)
        again = blocks if rounds and has_groups else None
        changes.append(replace(plain, parameters=(parameter,), again=again))
        quantizer = _input_quantizer(
            parameter, activations, checkpoint, numerics, is_rounded=rounds
        )
        if quantizer is not None:
            inputs |= {Site(site.module, Role.INPUT): quantizer for site in parameter.sites}
    for name, tensors in others.items():
        if any(map(is_changed, tensors)):
            parameter = WeightParameter(name=name, sites=(), is_transposed=False, num_experts=0)
            changes.append(CopiedParameter(parameters=(parameter,), source=source))
    return inputs, tuple(changes)


@dataclass(frozen=True, slots=True)
class _Matched:
    """An FP8 checkpoint, matched with the parameters of the model it was made from."""

    checkpoint: Fp8Checkpoint
    source: WeightSource
    model: LoadedModel

    def tensors_of(self, parameter: str) -> frozenset[str]:
        """Give the tensors that a parameter is made from; there must be one."""
        names = self.source.tensor_names([parameter])
        if not names:
            strangers = ", ".join(self.source.unused[:3]) or "none"
            raise ModelError(
                f"{self.checkpoint.folder}: there is no weight for {parameter}",
                hint=f"tensors there that the model does not have: {strangers}",
            )
        return names

    def is_stored(self, parameter: WeightParameter) -> bool:
        """Tell whether the weight is FP8 in the checkpoint, and refuse one that is in part."""
        names = self.tensors_of(parameter.name)
        unquantized = sorted(names - self.checkpoint.quantized)
        if unquantized and len(unquantized) < len(names):
            raise ModelError(
                f"{self.checkpoint.folder}: {parameter.name} is FP8 in part: {unquantized[0]} is "
                "not"
            )
        return not unquantized

    def list_others(self, stored: list[WeightParameter]) -> dict[str, frozenset[str]]:
        """Give the tensors of the unquantized parameters of the text decoder."""
        names = {name for name, _ in self.model.named_parameters()} - {p.name for p in stored}
        inside = sorted(name for name in names if is_of_decoder(name, self.model))
        return {name: self.tensors_of(name) for name in inside}

    def refuse_embeddings(self) -> None:
        names = self.source.tensor_names(list_embedding_and_head(self.model))
        if quantized := sorted(names & self.checkpoint.quantized):
            raise ModelError(
                f"{self.checkpoint.folder}: {quantized[0]} is an embedding or the output head, "
                "which are not emulated in FP8",
                hint="exclude lm_head and embeddings from quantization, as every tool does by "
                "default",
            )

    def scales_of(self, parameter: WeightParameter) -> ScaleRange:
        names = sorted(self.source.tensor_names([parameter.name]))
        scales = torch.cat([self.checkpoint.weight_scale(name).flatten() for name in names])
        return ScaleRange.of(scales, per=self.checkpoint.granularity(names[0]))

    def activations_of(self, parameter: WeightParameter) -> set[Activation]:
        """Give how the config quantizes the inputs of a weight's tensors."""
        names = self.source.tensor_names([parameter.name])
        return {self.checkpoint.activation(name) for name in names}


def _input_quantizer(
    parameter: WeightParameter,
    found: set[Activation],
    checkpoint: Fp8Checkpoint,
    numerics: Numerics,
    *,
    is_rounded: bool,
) -> Quantizer | None:
    kinds = {activation.kind for activation in found}
    if len(kinds) > 1:
        raise ModelError(
            f"{checkpoint.folder}: the inputs of {parameter.name} are quantized in "
            f"{len(kinds)} ways: {', '.join(sorted(kinds))}"
        )
    kind = kinds.pop()
    if kind is InputScaling.NONE and not numerics.inputs_always_quantized:
        return None
    if kind is InputScaling.STATIC and not numerics.static_inputs_ignored:
        # In engines experts share one input scale, the largest.
        largest = max(activation.scale or 0.0 for activation in found)
        return _static_quantizer(largest, checkpoint.fmt, numerics)
    bounds = [a.upper_bound for a in found if a.upper_bound is not None]
    return _dynamic_quantizer(
        kind,
        checkpoint.fmt,
        numerics,
        is_rounded=is_rounded,
        largest_amax=max(bounds) if bounds else None,
    )
