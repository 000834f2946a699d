"""Match an FP8 checkpoint with the parameters of the model it was made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from fp8calib.errors import ModelError, cut_list
from fp8calib.formats.fp8.checkpoint import Fp8Checkpoint
from fp8calib.formats.fp8.quantization_config import Activation
from fp8calib.model.load import LoadedModel
from fp8calib.model.shapes import ModelGeometry
from fp8calib.model.weight_source import WeightSource
from fp8calib.verification.emulation.fake_quantize import ScaleRange
from fp8calib.verification.emulation.linears import Fp8Linears, explain_inputs
from fp8calib.verification.emulation.stored_weights import (
    ClipLimits,
    CopiedParameter,
    StoredWeights,
)
from fp8calib.verification.emulation.weights import (
    WeightParameter,
    find_parameters,
    is_of_decoder,
)


def find_stored(
    checkpoint: Fp8Checkpoint,
    geometry: ModelGeometry,
    source: WeightSource,
    *,
    is_changed: Callable[[str], bool],
) -> Fp8Linears:
    """Find the FP8 weights of a checkpoint, and what else differs from the unquantized model.

    FP8 weights of the text decoder that belong to no linear of a layer are only copied. Those
    outside the decoder are left out. `source` reads the checkpoint; `is_changed` tells whether the
    tensor of a name differs from the unquantized model's.

    Raises:
        ModelError: the checkpoint quantizes no linear of the model, quantizes one in part,
            lacks one, or quantizes the output head or an embedding.
    """
    model, folder = source.model, checkpoint.folder
    parameters = find_parameters(geometry, model)
    tensors = {each.name: _list_tensors(each.name, source) for each in parameters}
    stored = [each for each in parameters if _is_fp8(each.name, tensors[each.name], checkpoint)]
    if not stored:
        raise ModelError(
            f"{folder}: none of its FP8 weights belongs to a linear of the model",
            hint="name the model that the checkpoint was made from",
        )
    others = {name for name, _ in model.named_parameters()} - {each.name for each in stored}
    inside = sorted(name for name in others if is_of_decoder(name, model))
    tensors |= {name: _list_tensors(name, source) for name in inside}
    ends = source.tensor_names(list_embedding_and_head(model))
    if quantized := sorted(ends & checkpoint.quantized):
        raise ModelError(
            f"{folder}: {quantized[0]} is an embedding or the output head, which are not emulated "
            "in FP8",
            hint="exclude lm_head and embeddings from quantization, as every tool does by default",
        )
    limits = source.reading_from(ClipLimits(checkpoint))
    weights = [
        StoredWeights(
            parameters=(parameter,),
            source=source,
            fmt=checkpoint.fmt,
            clip_limits=limits,
            scales=_measure_scales(sorted(tensors[parameter.name]), checkpoint),
            inputs={parameter.name: _join_inputs(parameter.name, tensors, checkpoint)},
        )
        for parameter in stored
    ]
    copied = [
        WeightParameter(name=name, sites=(), is_transposed=False, num_experts=0)
        for name in inside
        if any(map(is_changed, tensors[name]))
    ]
    notes = []
    quantized = sorted(
        each for each in others if source.tensor_names([each]) & checkpoint.quantized
    )
    if unseen := [name for name in quantized if name in tensors]:
        notes.append(explain_inputs(unseen))
    if beside := [name for name in quantized if name not in tensors]:
        notes.append(f"not compared, as it is outside the text decoder: {cut_list(beside, 1)}")
    return Fp8Linears(
        weights=weights,
        copied=[CopiedParameter(parameters=(each,), source=source) for each in copied],
        notes=notes,
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


def _is_fp8(parameter: str, names: frozenset[str], checkpoint: Fp8Checkpoint) -> bool:
    """Tell whether a weight is FP8 in the checkpoint, and refuse one that is in part."""
    unquantized = sorted(names - checkpoint.quantized)
    if unquantized and len(unquantized) < len(names):
        raise ModelError(
            f"{checkpoint.folder}: {parameter} is FP8 in part: {unquantized[0]} is not"
        )
    return not unquantized


def _measure_scales(names: list[str], checkpoint: Fp8Checkpoint) -> ScaleRange:
    scales = torch.cat([checkpoint.weight_scale(name).flatten() for name in names])
    return ScaleRange.of(scales, per=checkpoint.granularity(names[0]))


def _join_inputs(
    parameter: str, tensors: dict[str, frozenset[str]], checkpoint: Fp8Checkpoint
) -> Activation:
    """Give how the config quantizes the inputs of a weight; experts share the largest scale."""
    found = {checkpoint.activation(name) for name in tensors[parameter]}
    kinds = {activation.kind for activation in found}
    if len(kinds) > 1:
        raise ModelError(
            f"{checkpoint.folder}: the inputs of {parameter} are quantized in {len(kinds)} ways: "
            f"{', '.join(sorted(kinds))}"
        )
    scales = [each.scale for each in found if each.scale is not None]
    bounds = [each.upper_bound for each in found if each.upper_bound is not None]
    return replace(
        next(iter(found)),
        scale=max(scales, default=None),
        upper_bound=max(bounds, default=None),
    )
