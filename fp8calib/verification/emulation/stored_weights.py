"""Replace unquantized weights by those of an FP8 checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from fp8calib.errors import ModelError
from fp8calib.formats.fp8.checkpoint import Fp8Checkpoint
from fp8calib.formats.fp8.quantization_config import Activation
from fp8calib.model.weight_source import WeightSource
from fp8calib.numerics.formats import Fp8Format
from fp8calib.verification.emulation.damage import measure_damage, sum_damage
from fp8calib.verification.emulation.fake_quantize import (
    FakeQuantized,
    Quantizer,
    ScaleRange,
)
from fp8calib.verification.emulation.weights import (
    ChangedWeight,
    ParameterReader,
    WeightParameter,
)

_SLACK = 2.0**-10


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """Weights read from an FP8 checkpoint, dequantized."""

    parameters: tuple[WeightParameter, ...]
    """One."""
    source: ParameterReader
    fmt: Fp8Format
    clip_limits: ParameterReader
    """The largest magnitude that the checkpoint can store for each element of a weight."""
    scales: ScaleRange
    """Those of the checkpoint."""
    inputs: Mapping[str, Activation] = field(default_factory=dict)
    """By parameter: how its inputs are scaled."""
    again: Quantizer | None = None
    """How the engine quantizes the weights again at load; None: it does not. `Fp8Checkpoint` does
    the rest of what it does."""

    def apply(self, values: Mapping[str, torch.Tensor]) -> Iterator[ChangedWeight]:
        """Copy the stored weights over the values, expert by expert."""
        for parameter in self.parameters:
            damage = []
            for piece, stored, limits in zip(
                parameter.pieces(values[parameter.name]),
                parameter.read_pieces(self.source),
                parameter.read_pieces(self.clip_limits),
                strict=True,
            ):
                found = stored.to(piece.device)
                _require_shape(parameter.name, piece, found)
                became = found.float() if self.again is None else self.again.fake(found).values
                clipped = find_clipped(piece, found, limits.to(piece.device), self.fmt)
                damage.append(measure_damage(piece, FakeQuantized(became, clipped), self.fmt))
                piece.copy_(became)
            yield ChangedWeight(parameter, sum_damage(damage), self.scales)


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
        As `FakeQuantized.scaled`: beyond `fmt.max` where clipped, zero elsewhere; None where
        nothing is clipped.
    """
    rounding = 1 + torch.finfo(exact.dtype).eps / 2
    beyond = exact.abs().float() > limits * rounding
    if not bool(beyond.any()):
        return None
    at_the_end = 1 - 2.0 ** -(fmt.mantissa_bits + 1) - _SLACK
    beyond &= found.abs() >= limits * at_the_end
    return beyond.float() * (2 * fmt.max)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedParameter:
    """An unquantized tensor of an FP8 checkpoint that differs from the original model's.

    Some tools fold factors into norms and embeddings before they quantize (SmoothQuant).
    """

    parameters: tuple[WeightParameter, ...]
    source: WeightSource

    def apply(self, values: Mapping[str, torch.Tensor]) -> Iterator[ChangedWeight]:
        """Copy the tensor, which is not quantized: there is nothing to tell."""
        for parameter in self.parameters:
            found = self.source.read(parameter.name)
            _require_shape(parameter.name, values[parameter.name], found)
            values[parameter.name].copy_(found)
        return iter(())

    def read_rows(self, start: int, stop: int) -> torch.Tensor:
        """Read some rows, for callers that hold only part of an embedding."""
        return self.source.read_rows(self.parameters[0].name, start, stop)


def _require_shape(name: str, own: torch.Tensor, found: torch.Tensor) -> None:
    if own.shape != found.shape:
        raise ModelError(
            f"{name} is {list(found.shape)} in the FP8 checkpoint and {list(own.shape)} in the "
            "model",
            hint="name the model that the checkpoint was made from",
        )


class ClipLimits:
    """A tensor source that reads `Fp8Checkpoint.read_clip_limits` in place of weights.

    So a `WeightSource` merges and renames the limits as it does the weights.
    """

    def __init__(self, checkpoint: Fp8Checkpoint) -> None:
        self.folder = checkpoint.folder
        self.tensors = checkpoint.tensors
        self._checkpoint = checkpoint

    def read(self, name: str) -> torch.Tensor:
        """Read the limit of every element of an FP8 weight: fp32."""
        return self._checkpoint.read_clip_limits(name)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read the limits of some rows."""
        return self._checkpoint.read_clip_limits(name, start, stop)
