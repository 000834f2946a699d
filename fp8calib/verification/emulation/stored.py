"""Emulate an FP8 checkpoint: it is matched with the parameters of the model it was made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import repeat
from types import SimpleNamespace

import torch

from fp8calib.engines.numerics import Numerics
from fp8calib.errors import ModelError, cut_list
from fp8calib.formats.fp8.checkpoint import Fp8Checkpoint
from fp8calib.formats.fp8.quantization_config import Activation
from fp8calib.model.load import LoadedModel
from fp8calib.model.shapes import ModelGeometry
from fp8calib.model.weight_source import WeightSource
from fp8calib.numerics.formats import Fp8Format
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.damage import measure_damage, sum_damage
from fp8calib.verification.emulation.fake_quantize import FakeQuantized
from fp8calib.verification.emulation.linears import emulate_linears
from fp8calib.verification.emulation.weights import (
    Changed,
    ScaleRange,
    WeightChange,
    WeightParameter,
    explain_inputs,
    find_parameters,
    is_of_decoder,
)

_SLACK = 2.0**-10


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
    weights: list[StoredWeight] = []
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
            StoredWeight(
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
        StoredWeight(parameters=(WeightParameter(name=name),), source=source, fmt=checkpoint.fmt)
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


# --- changes --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeight(WeightChange):
    """A weight of an FP8 checkpoint, dequantized, with what `Fp8Checkpoint` does for an engine.

    Or an unquantized tensor that differs from the original model's: some tools fold factors into
    norms and embeddings before they quantize (SmoothQuant).
    """

    source: WeightSource
    fmt: Fp8Format
    clip_limits: WeightSource | None = None
    """The largest magnitude that the checkpoint can store for each element; None: it is in 16 bits,
    as in the next."""
    scales: ScaleRange | None = None
    """The range of the checkpoint's scales."""

    def apply(self, values: Mapping[str, torch.Tensor]) -> Iterator[Changed]:
        """Copy the stored weight over the values, expert by expert; tell of it if it is FP8."""
        (parameter,), damage = self.parameters, []
        limits: Iterator[torch.Tensor | None] = repeat(None)
        if self.clip_limits is not None:
            limits = iter(parameter.read_pieces(self.clip_limits))
        pieces = parameter.pieces(values[parameter.name])
        for piece, stored in zip(pieces, parameter.read_pieces(self.source), strict=True):
            if piece.shape != stored.shape:
                raise ModelError(
                    f"{parameter.name} is {list(stored.shape)} in the FP8 checkpoint and "
                    f"{list(piece.shape)} in the model",
                    hint="name the model that the checkpoint was made from",
                )
            found = became = stored.to(piece.device)
            if (limit := next(limits)) is not None:
                became = found.float() if self.again is None else self.again.fake(found).values
                clipped = find_clipped(piece, found, limit.to(piece.device), self.fmt)
                damage.append(measure_damage(piece, FakeQuantized(became, clipped)))
            piece.copy_(became)
        if self.scales is not None:
            yield parameter, sum_damage(damage), self.scales

    def read_rows(self, start: int, stop: int) -> torch.Tensor:
        """Read some rows, for callers that hold only part of an embedding."""
        return self.source.read_rows(self.parameters[0].name, start, stop)


def find_clipped(
    exact: torch.Tensor, found: torch.Tensor, limits: torch.Tensor, fmt: Fp8Format
) -> torch.Tensor | None:
    """Find the elements that an FP8 checkpoint clipped: too large, and stored as its largest code.

    Args:
        exact: the unquantized weight, which may have been rounded to its dtype from a finer one.
        found: the same weight in the checkpoint; a shared scale may have moved it by half a step.
        limits: the largest magnitude that the checkpoint can store for each element.
        fmt: the format.

    Returns:
        As `FakeQuantized.clips`: bool; None if nothing is clipped.
    """
    rounding = 1 + torch.finfo(exact.dtype).eps / 2
    beyond = exact.abs().float() > limits * rounding
    if not bool(beyond.any()):
        return None
    at_the_end = 1 - 2.0 ** -(fmt.mantissa_bits + 1) - _SLACK
    return beyond & (found.abs() >= limits * at_the_end)
