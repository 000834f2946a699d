"""Notes on what an engine may quantize but the emulation does not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8calib.errors import cut_list
from fp8calib.formats.fp8.checkpoint import Fp8Checkpoint
from fp8calib.model.load import LoadedModel
from fp8calib.model.weight_source import WeightSource
from fp8calib.numerics.schemes import InputScaling
from fp8calib.verification.emulation.planned import PlannedWeights
from fp8calib.verification.emulation.weights import WeightChange, is_of_decoder


def find_plan_gaps(name: str, planned: PlannedWeights) -> Iterator[str]:
    """Note what `quantize` would write otherwise than its plan is emulated."""
    if planned.refusal:
        yield f"{name}: `quantize` does not write this model: {planned.refusal}"
    unseen = sorted(
        parameter.name
        for each in planned.weights
        for parameter in each.weights.parameters
        if not parameter.sites and each.inputs[parameter.name].kind is not InputScaling.NONE
    )
    if unseen:
        yield _explain_inputs(name, unseen)
    if planned.missed:
        yield f"{name}: not quantized here, though an engine may: {cut_list(planned.missed, 1)}"


def find_checkpoint_gaps(
    name: str,
    changes: Sequence[WeightChange],
    checkpoint: Fp8Checkpoint,
    source: WeightSource,
) -> Iterator[str]:
    """Note what a checkpoint quantizes outside the linears of decoder layers.

    `source` reads the checkpoint by the model's parameter names.
    """
    changed = [parameter for change in changes for parameter in change.parameters]
    linears = {parameter.name for parameter in changed if parameter.sites}
    copied = {parameter.name for parameter in changed if not parameter.sites}
    others = {parameter for parameter, _ in source.model.named_parameters()} - linears
    quantized = {p for p in others if source.tensor_names([p]) & checkpoint.quantized}
    inside = {p for p in quantized if p in copied or is_of_decoder(p, source.model)}
    if inside:
        yield _explain_inputs(name, sorted(inside))
    if quantized - inside:
        beside = cut_list(sorted(quantized - inside), 1)
        yield f"{name}: not compared, as it is outside the text decoder: {beside}"


def _explain_inputs(name: str, parameters: Sequence[str]) -> str:
    return (
        f"{name}: {cut_list(parameters, 1)}: only the weights are quantized here, not the "
        "inputs: not a linear of a decoder layer"
    )


def list_embedding_and_head(model: LoadedModel) -> list[str]:
    """List the parameters of the embedding and of the output head."""
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    weights = [module.weight for module in modules if module is not None]
    return [name for name, value in model.named_parameters() if any(value is w for w in weights)]
