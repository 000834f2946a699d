"""Replace a model's weights by what an engine would hold in FP8."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import NamedTuple, Self

import torch
from torch import nn

from fp8calib.errors import ModelError, VerificationError, cut_list
from fp8calib.formats.fp8.quantization_config import Activation
from fp8calib.model.geometry import ModelGeometry, Role, Site
from fp8calib.model.load import LoadedModel
from fp8calib.model.topology import find_text_decoder, is_transposed
from fp8calib.model.weight_source import WeightSource
from fp8calib.numerics.amax import tensor_amax
from fp8calib.numerics.encode import scale_of
from fp8calib.numerics.formats import Fp8Format
from fp8calib.numerics.schemes import Granularity
from fp8calib.verification.emulation.damage import measure_damage, sum_damage
from fp8calib.verification.emulation.fake_quantize import FakeQuantized, Quantizer

_SLACK = 2.0**-10


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightParameter:
    """A parameter that holds the weight of one linear, or of one projection of all experts."""

    name: str
    sites: tuple[Site, ...] = ()
    """One, or gate's and up's of experts, which share a parameter; none if no hook sees inputs."""
    is_transposed: bool = False
    """[in, out] (Conv1D, some experts) where Linear has [out, in]."""
    num_experts: int = 0
    num_parts: int = 1
    """How many matrices of the checkpoint its rows hold (gate and up of an expert), each with
    blocks of its own."""

    def pieces(self, parameter: torch.Tensor) -> torch.Tensor:
        """Give a view of the parameter as a stack: of experts, or of one."""
        return parameter if self.num_experts else parameter.unsqueeze(0)

    def read_pieces(self, source: WeightSource) -> Iterator[torch.Tensor]:
        """Read the `pieces`, one at a time."""
        if self.num_experts:
            yield from source.read_experts(self.name)
        else:
            yield source.read(self.name)


class ScaleRange(NamedTuple):
    """The granularity of a weight's scales, and their extremes."""

    per: Granularity
    smallest: float
    largest: float

    @classmethod
    def of(cls, scale: torch.Tensor, *, per: Granularity) -> Self:
        """Take the extremes of scales in any shape."""
        return cls(per, *torch.stack(torch.aminmax(scale)).tolist())  # a GPU is waited for once


Changed = tuple[WeightParameter, torch.Tensor, ScaleRange]
"""A parameter, the sums of `measure_damage`, and the scales that the unquantized weight has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightChange:
    """A change to weights that are replaced together."""

    parameters: tuple[WeightParameter, ...]
    """The replaced parameters."""
    inputs: Mapping[str, Activation] = field(default_factory=dict)
    """By parameter in FP8: how its inputs are scaled."""
    again: Quantizer | None = None
    """How the engine quantizes the quantized weights again at load; None: it does not."""
    through_float16: bool = False
    """At load the engine dequantizes to fp16, and quantizes again with the same scale."""

    def apply(self, values: Mapping[str, torch.Tensor]) -> Iterator[Changed]:
        """Replace `values` (by parameter name) in place; tell of each that is quantized."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Requantized(WeightChange):
    """A fused group that is quantized here, as an engine's loader would do it.

    Per-tensor scales are shared by the whole group.
    """

    quantizer: Quantizer
    stored: WeightSource | None = None
    """Reads the weights in the checkpoint's dtype, if the model's rounds them; else None."""

    def apply(self, values: Mapping[str, torch.Tensor]) -> Iterator[Changed]:
        """Quantize in place, expert by expert."""
        per = self.quantizer.scale
        parts: list[tuple[list[torch.Tensor], list[torch.Tensor]]]
        parts = [([], []) for _ in self.parameters]
        assert isinstance(per, Granularity)  # noqa: S101 -- a scheme's always is
        pieces = zip(*(self._list_pieces(p, values[p.name]) for p in self.parameters), strict=True)
        for group in pieces:
            quantizer = self.quantizer
            if per is Granularity.TENSOR:
                amax = torch.stack([tensor_amax(exact) for _, exact in group]).amax()
                quantizer = replace(quantizer, scale=scale_of(amax, quantizer.fmt))
            for parameter, both, told in zip(self.parameters, group, parts, strict=True):
                chunks = (each.chunk(parameter.num_parts) for each in both)
                for weight, exact in zip(*chunks, strict=True):
                    fake = quantizer.fake(exact)
                    became, scale = fake.values, fake.scale
                    if self.through_float16:
                        became = quantizer.fake(became.half()).values
                    if self.again is not None:
                        became, scale = self.again.fake(became).values, self.again.scale_for(exact)
                    assert scale is not None  # noqa: S101 -- no cache type stores weights
                    told[0].append(measure_damage(weight, fake._replace(values=became)))
                    told[1].append(torch.stack(torch.aminmax(scale)))
                    weight.copy_(became)
        for parameter, (damage, scales) in zip(self.parameters, parts, strict=True):
            yield parameter, sum_damage(damage), ScaleRange.of(torch.stack(scales), per=per)

    def _list_pieces(
        self, parameter: WeightParameter, value: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """List views [out, in] of a parameter and what `quantize` reads: one, or one per expert."""
        pieces = parameter.pieces(value)
        exact: Iterable[torch.Tensor] = pieces
        if self.stored is not None:
            read = parameter.read_pieces(self.stored)
            exact = (piece.to(value.device, torch.float32) for piece in read)
        for one, other in zip(pieces, exact, strict=True):
            yield (one.T, other.T) if parameter.is_transposed else (one, other)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldWeight(WeightChange):
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


def explain_inputs(parameters: Sequence[str]) -> str:
    """Note that the inputs of some parameters are not quantized."""
    return (
        f"{cut_list(parameters, 1)}: only the weights are quantized here, not the inputs: not a "
        "linear of a decoder layer"
    )


def find_parameters(geometry: ModelGeometry, model: nn.Module) -> list[WeightParameter]:
    """List the weights of linears and experts."""
    found: dict[str, WeightParameter] = {}
    for _, linear in geometry.linears():
        name, site = linear.weight_name, Site(linear.module, Role.WEIGHT)
        runner = model.get_submodule(linear.runner)
        found[name] = WeightParameter(
            name=name,
            sites=(*found[name].sites, site) if name in found else (site,),
            is_transposed=bool(getattr(runner, "is_transposed", False))
            if linear.num_experts
            else is_transposed(runner),
            num_experts=linear.num_experts,
        )
    return list(found.values())


def is_of_decoder(parameter: str, model: LoadedModel) -> bool:
    """Tell whether a parameter belongs to the text decoder (tokens to last hidden state)."""
    path = find_text_decoder(model)[0]
    return not path or parameter.startswith(f"{path}.")


@contextmanager
def changed_weights(
    model: nn.Module,
    changes: Sequence[WeightChange],
    originals: WeightSource,
    damage: dict[Site, torch.Tensor],
    scales: dict[Site, ScaleRange],
    *,
    keeps: bool = False,
) -> Iterator[None]:
    """Apply `changes` to the model while the context is open.

    At the end, the unquantized weights are read again from `originals`; with `keeps` they are
    copied on their device before. `damage` and `scales` receive those of each weight (`Changed`).
    """
    values = {name: parameter.data for name, parameter in model.named_parameters()}
    touched: list[WeightParameter] = []
    kept: dict[str, torch.Tensor] = {}
    try:
        for change in changes:
            for parameter in change.parameters:
                if values[parameter.name].is_meta:
                    raise VerificationError(
                        f"{parameter.name} is offloaded, so it cannot be replaced by FP8 values",
                        hint="leave out --device-map: the model is then streamed layer by layer",
                    )
            touched += change.parameters
            if keeps:
                kept |= {each.name: values[each.name].clone() for each in change.parameters}
            for parameter, sums, extremes in change.apply(values):
                damage.update(dict.fromkeys(parameter.sites, sums))
                scales.update(dict.fromkeys(parameter.sites, extremes))
        yield
    finally:
        for parameter in touched:
            if parameter.name in kept:
                values[parameter.name].copy_(kept.pop(parameter.name))
                continue
            pieces = parameter.pieces(values[parameter.name])
            for piece, original in zip(pieces, parameter.read_pieces(originals), strict=True):
                piece.copy_(original)
