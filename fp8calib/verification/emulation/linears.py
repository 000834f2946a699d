"""Emulate what an engine does with linears in FP8: those of a checkpoint, and planned ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

from fp8calib.checkpoint.torch_dtypes import TORCH_DTYPES
from fp8calib.engines.numerics import Numerics
from fp8calib.errors import ModelError, VerificationError, cut_list
from fp8calib.formats.fp8.quantization_config import Activation
from fp8calib.model.geometry import Linear, ModelGeometry, Role, Site
from fp8calib.model.load import LoadedModel
from fp8calib.model.module_paths import name_fused_group
from fp8calib.model.topology import is_linear, is_transposed
from fp8calib.model.weight_source import WeightSource
from fp8calib.numerics.formats import E4M3FN, SMALLEST_EXPONENT, SMALLEST_SCALE, Fp8Format
from fp8calib.numerics.schemes import MX_BLOCK, Granularity, InputScaling, Scheme
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.fake_quantize import Quantizer
from fp8calib.verification.emulation.weights import (
    HeldWeight,
    Requantized,
    ScaleRange,
    WeightChange,
    WeightParameter,
    explain_inputs,
    find_parameters,
    is_of_decoder,
)

if TYPE_CHECKING:  # a candidate is of one kind
    from fp8calib.formats.fp8.checkpoint import Fp8Checkpoint
    from fp8calib.quantization.matrices import Matrix
    from fp8calib.quantization.select import Selection
    from fp8calib.quantization.settings import PlanSettings


def emulate_linears(
    linears: Iterable[WeightChange],
    fmt: Fp8Format,
    geometry: ModelGeometry,
    numerics: Numerics,
    *,
    copied: Iterable[WeightChange] = (),
    notes: Iterable[str] = (),
) -> Candidate:
    """Emulate an engine that loads FP8 weights of one format, and tensors `copied` beside them.

    The inputs of a weight without a site stay in 16 bits, as no hook sees them.
    """
    is_rounded = _find_rounded(geometry, numerics)
    changes: list[WeightChange] = []
    quantizers: dict[Site, Quantizer] = {}
    for change in linears:
        first = change.parameters[0]
        kinds = {each.kind for each in change.inputs.values() if not each.is_mx}
        again, passes = None, False
        if InputScaling.GROUP in kinds and is_rounded(first.name):
            again = Quantizer(fmt=fmt, scale=Granularity.BLOCK, power_of_two=True)
        if isinstance(change, Requantized):  # `Fp8Checkpoint` does this for stored weights
            is_expert_down = first.num_experts > 0 and len(first.sites) == 1
            is_per_tensor = change.quantizer.scale is Granularity.TENSOR
            passes = numerics.weights_through_float16 and is_per_tensor and not is_expert_down
        changes.append(replace(change, again=again, through_float16=passes))
        for parameter in (each for each in change.parameters if each.sites):
            quantizer = _quantize_inputs(
                *(change.inputs[parameter.name], fmt, numerics),
                is_rounded=is_rounded(parameter.name),
            )
            if quantizer is not None:
                sites = (Site(site.module, Role.INPUT) for site in parameter.sites)
                quantizers |= dict.fromkeys(sites, quantizer)
    is_mx = any(each.power_of_two and each.block == MX_BLOCK for each in quantizers.values())
    if is_mx and numerics.mx_inputs_always_quantized:
        about_mx = "inputs of MXFP8 are quantized as on Blackwell and gfx95x; on other GPUs "
        notes = (f"{about_mx}{numerics.name} leaves them in 16 bits", *notes)
    return Candidate(quantizers=quantizers, weights=(*changes, *copied), notes=tuple(notes))


def _find_rounded(geometry: ModelGeometry, numerics: Numerics) -> Callable[[str], bool]:
    """Find for which parameters the engine rounds scales of blocks and groups to powers of two.

    A parameter that is not of a linear of the geometry is assumed to have sizes that fit.
    """
    if not numerics.group_scales_power_of_two or geometry.checkpoint_dtype == "float16":
        return lambda _name: False
    fused: dict[str, list[Linear]] = defaultdict(list)
    for _, linear in geometry.linears():
        if not linear.num_experts:
            fused[name_fused_group(linear.module)].append(linear)
    rows_of, columns_of = numerics.power_of_two_sizes
    kept = {
        linear.weight_name
        for members in fused.values()
        for linear in members
        if sum(each.out_features for each in members) % rows_of or linear.in_features % columns_of
    }
    return lambda name: name not in kept


def _quantize_inputs(
    activation: Activation, fmt: Fp8Format, numerics: Numerics, *, is_rounded: bool
) -> Quantizer | None:
    """Quantize inputs as the engine does."""
    kind = activation.kind
    if ("mxfp8" if activation.is_mx else "fp8") in numerics.unmultiplied:
        return None
    if activation.is_mx:
        is_quantized = kind is InputScaling.GROUP or numerics.mx_inputs_always_quantized
        mx = Quantizer(fmt=fmt, scale=Granularity.GROUP, block=MX_BLOCK, power_of_two=True)
        return mx if is_quantized else None
    if kind is InputScaling.NONE:
        return None
    if kind is InputScaling.STATIC:
        assert activation.scale is not None  # noqa: S101 -- refused where it is missing
        return Quantizer(
            fmt=fmt,
            scale=torch.tensor(activation.scale),
            by_reciprocal=numerics.input_by_reciprocal,
        )
    is_group = kind is InputScaling.GROUP
    smallest = numerics.smallest_group_scale if is_group else numerics.smallest_dynamic_scale
    return Quantizer(
        fmt=fmt,
        scale=Granularity.GROUP if is_group else Granularity.TOKEN,
        smallest_scale=max(smallest, SMALLEST_SCALE),
        largest_amax=activation.upper_bound,
        by_reciprocal=numerics.token_by_reciprocal and not is_group,
        scale_by_reciprocal=numerics.token_scale_by_reciprocal and not is_group,
        power_of_two=is_rounded and is_group,
    )


# --- planned: matched with the parameters of a model ------------------------------------------


def emulate_planned(
    settings: PlanSettings,
    selection: Selection,
    geometry: ModelGeometry,
    source: WeightSource,
    numerics: Numerics,
    *,
    fmt: Fp8Format = E4M3FN,
    scale_input: Callable[[Linear], torch.Tensor] | None = None,
) -> Candidate:
    """Emulate the parameters of a model that are made from the tensors that a plan quantizes.

    Fused groups of the decoder layers come first, then what no hook sees the inputs of: linears
    outside the layers, experts that multiply by their weights themselves. Weights that engines fuse
    share their scales. `selection`, made for the checkpoint of `source`, may also be one that
    `quantize` refuses; `scale_input` gives the static scale of a linear's input.
    """
    if selection.refusal is not None and not (selection.quantized or selection.unsplit):
        raise selection.refusal
    model = source.model
    matrices: dict[str, list[Matrix]] = defaultdict(list)
    for matrix in selection.quantized:
        matrices[matrix.source].append(matrix)
    selected = {*matrices, *selection.unsplit}
    linears = {linear.module: linear for _, linear in geometry.linears()}
    groups = defaultdict[str, list[WeightParameter]](list)
    schemes: dict[str, Scheme] = {}
    missed: dict[str, None] = {}
    known = {parameter.name: parameter for parameter in find_parameters(geometry, model)}
    others = (n for n, _ in model.named_parameters() if n not in known and is_of_decoder(n, model))
    for name in (*known, *others):
        tensors = source.tensor_names([name])
        if not (chosen := tensors & selected):
            continue
        if chosen != tensors:
            raise VerificationError(
                f"{name} would be FP8 in part: `quantize` writes {min(chosen)} in FP8, and not "
                f"{min(tensors - chosen)}"
            )
        parameter = known.get(name) or _describe_other(name, source, matrices)
        if parameter is None:
            missed[name.rpartition(".")[0]] = None
            continue
        # all matrices of a weight have one scheme, as engines need it
        first = matrices.get(min(chosen), ())
        schemes[name] = settings.scheme_of(first[0].module if first else min(chosen))
        inside = [matrix for tensor in chosen for matrix in matrices.get(tensor, ())]
        parts = max(1, len(inside) // max(1, parameter.num_experts))
        # A per-tensor scale is shared by what is fused; experts have their own, and projections
        # that the checkpoint stores in one tensor share that of the tensor.
        is_whole = name in known and len(inside) == 1 and not parameter.num_experts
        group = inside[0].fused_group if is_whole else name
        groups[group].append(replace(parameter, num_parts=parts))

    def quantize(group: Sequence[WeightParameter]) -> Requantized:
        scheme, inputs = schemes[group[0].name], {}
        for parameter in group:
            scales = []
            if scale_input is not None and scheme.has_static_inputs:
                scales = [float(scale_input(linears[site.module])) for site in parameter.sites]
            # experts share the largest
            scale = max(scales, default=None)
            inputs[parameter.name] = Activation(kind=scheme.inputs, is_mx=scheme.is_mx, scale=scale)
        return Requantized(
            parameters=tuple(group),
            quantizer=Quantizer(
                fmt=fmt,
                scale=scheme.weights,
                block=scheme.block,
                power_of_two=scheme.has_power_of_two_scales,
                smallest_scale=SMALLEST_EXPONENT if scheme.is_mx else SMALLEST_SCALE,
            ),
            stored=source if any(_is_rounded(each.name, source) for each in group) else None,
            inputs=inputs,
        )

    weights = [quantize(group) for group in groups.values()]
    unseen = sorted(
        parameter.name
        for group in groups.values()
        for parameter in group
        if not parameter.sites and schemes[parameter.name].inputs is not InputScaling.NONE
    )
    notes = []
    if selection.refusal is not None:
        notes.append(f"`quantize` does not write this model: {selection.refusal.message}")
    if unseen:
        notes.append(explain_inputs(unseen))
    if missed:
        notes.append(f"not quantized here, though an engine may: {cut_list(list(missed), 1)}")
    return emulate_linears(weights, fmt, geometry, numerics, notes=notes)


def _describe_other(
    name: str, source: WeightSource, matrices: dict[str, list[Matrix]]
) -> WeightParameter | None:
    """Describe a parameter that belongs to no linear of a layer; None if that is not known."""
    module = source.model.get_submodule(name.rpartition(".")[0])
    plain = WeightParameter(name=name)
    if is_linear(module):
        return replace(plain, is_transposed=is_transposed(module))
    inside = matrices.get(source.single_tensors.get(name, ""), ())
    positions = [matrix.position for matrix in inside if matrix.position is not None]
    if not positions:
        return None
    num_experts = 1 + max(position.expert for position in positions)
    return replace(plain, is_transposed=positions[0].is_transposed, num_experts=num_experts)


def _is_rounded(name: str, source: WeightSource) -> bool:
    """Tell whether the dtype of the model lacks numbers of the checkpoint's."""
    own = source.model.get_parameter(name).dtype
    entries = (source.source.tensors[each] for each in source.tensor_names([name]))
    return any(torch.promote_types(TORCH_DTYPES[entry.dtype], own) != own for entry in entries)


# --- stored: a checkpoint is matched with the model that it was made from ---------------------


def emulate_stored(
    checkpoint: Fp8Checkpoint,
    geometry: ModelGeometry,
    source: WeightSource,
    numerics: Numerics,
    *,
    is_changed: Callable[[str], bool],
) -> Candidate:
    """Emulate the FP8 weights of a checkpoint, and what else differs from the unquantized model.

    FP8 weights of the text decoder that belong to no linear of a layer are only copied. Those
    outside the decoder are left out. `source` reads the checkpoint; `is_changed` tells whether the
    tensor of a name differs from the unquantized model's.
    """
    model, folder, others = source.model, checkpoint.folder, dict(source.model.named_parameters())
    read = checkpoint.read_clip_limits  # merged and renamed as the weights are
    limits = source.reading_from(
        SimpleNamespace(folder=folder, tensors=checkpoint.tensors, read=read, read_rows=read)
    )
    weights: list[HeldWeight] = []
    for parameter in find_parameters(geometry, model):
        tensors = sorted(_list_tensors(parameter.name, source))
        unquantized = [name for name in tensors if name not in checkpoint.quantized]
        if unquantized and len(unquantized) < len(tensors):
            raise ModelError(f"{folder}: {parameter.name} is FP8 in part: {unquantized[0]} is not")
        if unquantized:
            continue
        others.pop(parameter.name, None)
        scales = torch.cat([checkpoint.weight_scale(name).flatten() for name in tensors])
        weights.append(
            HeldWeight(
                parameters=(parameter,),
                source=source,
                fmt=checkpoint.fmt,
                clip_limits=limits,
                scales=ScaleRange.of(scales, per=checkpoint.granularity(tensors[0])),
                inputs={parameter.name: _join_inputs(parameter.name, tensors, checkpoint)},
            )
        )
    if not weights:
        raise ModelError(
            f"{folder}: none of its FP8 weights belongs to a linear of the model",
            hint="name the model that the checkpoint was made from",
        )
    inside = sorted(name for name in others if is_of_decoder(name, model))
    ends = source.tensor_names(list_embedding_and_head(model))
    if quantized := sorted(ends & checkpoint.quantized):
        raise ModelError(
            f"{folder}: {quantized[0]} is an embedding or the output head, which are not emulated "
            "in FP8",
            hint="exclude lm_head and embeddings from quantization, as every tool does by default",
        )
    changed = [name for name in inside if any(map(is_changed, _list_tensors(name, source)))]
    copied = [
        HeldWeight(parameters=(WeightParameter(name=name),), source=source, fmt=checkpoint.fmt)
        for name in changed
    ]
    notes = []
    quantized = sorted(
        name for name in others if source.tensor_names([name]) & checkpoint.quantized
    )
    if unseen := [name for name in quantized if name in inside]:
        notes.append(explain_inputs(unseen))
    if beside := [name for name in quantized if name not in inside]:
        notes.append(f"not compared, as it is outside the text decoder: {cut_list(beside, 1)}")
    return emulate_linears(
        *(weights, checkpoint.fmt, geometry, numerics), copied=copied, notes=notes
    )


def list_embedding_and_head(model: LoadedModel) -> list[str]:
    """List the parameters of the embedding and of the output head."""
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    weights = [module.weight for module in modules if module is not None]
    return [name for name, value in model.named_parameters() if any(value is w for w in weights)]


def _list_tensors(parameter: str, source: WeightSource) -> frozenset[str]:
    """List the tensors that a parameter is made from; there must be one."""
    if names := source.tensor_names([parameter]):
        return names
    strangers = ", ".join(source.unused[:3]) or "none"
    raise ModelError(
        f"{source.source.folder}: there is no weight for {parameter}",
        hint=f"tensors there that the model does not have: {strangers}",
    )


def _join_inputs(parameter: str, tensors: Iterable[str], checkpoint: Fp8Checkpoint) -> Activation:
    """Give how the config quantizes the inputs of a weight; experts share the largest scale."""
    found = {checkpoint.activation(name) for name in tensors}
    kinds = {activation.kind for activation in found}
    if len(kinds) > 1:
        raise ModelError(
            f"{checkpoint.folder}: the inputs of {parameter} are quantized in {len(kinds)} ways: "
            f"{', '.join(sorted(kinds))}"
        )
    scales = [each.scale for each in found if each.scale is not None]
    bounds = [each.upper_bound for each in found if each.upper_bound is not None]
    one, bound = next(iter(found)), max(bounds, default=None)
    return replace(one, scale=max(scales, default=None), upper_bound=bound)
