"""Match an FP8 checkpoint with the parameters of the model it was made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from fp8calib.errors import ModelError
from fp8calib.formats.fp8.checkpoint import Fp8Checkpoint
from fp8calib.formats.fp8.quantization_config import Activation
from fp8calib.model.shapes import ModelGeometry
from fp8calib.model.weight_source import WeightSource
from fp8calib.verification.emulation.coverage import list_embedding_and_head
from fp8calib.verification.emulation.fake_quantize import ScaleRange
from fp8calib.verification.emulation.linears import Fp8Weights
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
) -> tuple[list[Fp8Weights], list[CopiedParameter]]:
    """Find the FP8 weights of a checkpoint, and what else differs from the unquantized model.

    FP8 weights of the text decoder that belong to no linear of a layer are only copied. Those
    outside the decoder are left out (`coverage` reports both). `source` reads the checkpoint;
    `is_changed` tells whether the tensor of a name differs from the unquantized model's.

    Raises:
        ModelError: the checkpoint quantizes no linear of the model, quantizes one in part,
            lacks one, or quantizes the output head or an embedding.
    """
    found = _Matched(checkpoint, source)
    linears = (linear for _, linear in geometry.linears())
    parameters = find_parameters(linears, dict(source.model.named_modules()))
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
        clip_limits=source.reading_from(ClipLimits(checkpoint)),
        scales={parameter.name: found.scales_of(parameter) for parameter in stored},
    )
    weights = [
        Fp8Weights(
            weights=replace(plain, parameters=(parameter,)),
            inputs={parameter.name: found.activation_of(parameter)},
        )
        for parameter in stored
    ]
    copied = [
        WeightParameter(name=name, sites=(), is_transposed=False, num_experts=0)
        for name, tensors in others.items()
        if any(map(is_changed, tensors))
    ]
    return weights, [CopiedParameter(parameters=(each,), source=source) for each in copied]


@dataclass(frozen=True, slots=True)
class _Matched:
    """An FP8 checkpoint, matched with the parameters of the model it was made from."""

    checkpoint: Fp8Checkpoint
    source: WeightSource

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
        """Give the tensors of the other parameters of the text decoder."""
        model = self.source.model
        names = {name for name, _ in model.named_parameters()} - {p.name for p in stored}
        inside = sorted(name for name in names if is_of_decoder(name, model))
        return {name: self.tensors_of(name) for name in inside}

    def refuse_embeddings(self) -> None:
        names = self.source.tensor_names(list_embedding_and_head(self.source.model))
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

    def activation_of(self, parameter: WeightParameter) -> Activation:
        """Give how the config quantizes the inputs of a weight; experts share the largest scale."""
        names = self.source.tensor_names([parameter.name])
        found = {self.checkpoint.activation(name) for name in names}
        kinds = {activation.kind for activation in found}
        if len(kinds) > 1:
            raise ModelError(
                f"{self.checkpoint.folder}: the inputs of {parameter.name} are quantized in "
                f"{len(kinds)} ways: {', '.join(sorted(kinds))}"
            )
        scales = [each.scale for each in found if each.scale is not None]
        bounds = [each.upper_bound for each in found if each.upper_bound is not None]
        return replace(
            next(iter(found)),
            scale=max(scales, default=None),
            upper_bound=max(bounds, default=None),
        )
