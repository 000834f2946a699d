"""Weights as an FP8 checkpoint holds them, in the place of the unquantized ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from fp8calib.dialects.fp8.checkpoint import Fp8Checkpoint
from fp8calib.errors import VerificationError
from fp8calib.fp8.formats import Fp8Format
from fp8calib.model.weight_source import WeightSource
from fp8calib.verification.emulation.fake_quantize import Fake, Quantizer, measure_damage
from fp8calib.verification.emulation.scale_range import ScaleRange
from fp8calib.verification.emulation.weights import Originals, WeightParameter, sum_damage

_SLACK = 2.0**-10


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Weights taken from an FP8 checkpoint, dequantized."""

    parameters: tuple[WeightParameter, ...]
    source: Originals
    quantizer: Quantizer
    """Tells the format; scales are those of the checkpoint."""
    reach: Originals
    """The largest magnitude that each element of a weight could have in the checkpoint."""
    scales: Mapping[str, ScaleRange]
    """Those of the checkpoint, by parameter."""
    again: Quantizer | None = None
    """How the engine quantizes them once more at load; None: it does not."""

    def apply(
        self, values: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[WeightParameter, torch.Tensor]]:
        """Copy the stored weights over the values, expert by expert."""
        for parameter in self.parameters:
            target = values[parameter.name]
            pieces = target if parameter.num_experts else target.unsqueeze(0)
            damage = [
                self._copy(piece, found.to(piece.device), reach, parameter.name)
                for piece, found, reach in zip(
                    pieces, _read(self.source, parameter), _read(self.reach, parameter), strict=True
                )
            ]
            yield parameter, sum_damage(damage)

    def find_scales(
        self,
        values: Mapping[str, torch.Tensor],  # noqa: ARG002 -- the protocol's
    ) -> Iterator[tuple[WeightParameter, ScaleRange]]:
        """Give those of the checkpoint."""
        yield from ((parameter, self.scales[parameter.name]) for parameter in self.parameters)

    def _copy(
        self, piece: torch.Tensor, found: torch.Tensor, reach: torch.Tensor, name: str
    ) -> torch.Tensor:
        _require_shape(name, piece, found)
        values = found.float() if self.again is None else self.again.fake(found).values
        clipped = find_clipped(piece, found, reach.to(piece.device), self.quantizer.fmt)
        damage = measure_damage(piece, Fake(values, clipped), self.quantizer.fmt)
        piece.copy_(values)
        return damage


def find_clipped(
    exact: torch.Tensor, found: torch.Tensor, reach: torch.Tensor, fmt: Fp8Format
) -> torch.Tensor | None:
    """Find what an FP8 checkpoint has clipped: beyond its reach, and stored as its largest code.

    Args:
        exact: the unquantized weight, which may have been rounded to its dtype from a finer one.
        found: what the checkpoint has for it; a shared scale may have moved it by half a step.
        reach: the largest magnitude each element could have in the checkpoint.
        fmt: the format.

    Returns:
        As `Fake.scaled`: beyond `fmt.max` where it clips, zero elsewhere; None where nothing does.
    """
    rounding = 1 + torch.finfo(exact.dtype).eps / 2
    beyond = exact.abs().float() > reach * rounding
    if not bool(beyond.any()):
        return None
    at_the_end = 1 - 2.0 ** -(fmt.mantissa_bits + 1) - _SLACK
    beyond &= found.abs() >= reach * at_the_end
    return beyond.float() * (2 * fmt.max)


def _read(source: Originals, parameter: WeightParameter) -> Iterator[torch.Tensor]:
    if parameter.num_experts:
        yield from source.read_experts(parameter.name)
    else:
        yield source.read(parameter.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedParameter:
    """A tensor that is not quantized, taken from an FP8 checkpoint that holds another one.

    Some tools fold factors into norms and embeddings before they quantize (SmoothQuant).
    """

    parameters: tuple[WeightParameter, ...]
    source: WeightSource

    def apply(
        self, values: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[WeightParameter, torch.Tensor]]:
        """Copy it; nothing is measured, for nothing is quantized."""
        for parameter in self.parameters:
            found = self.source.read(parameter.name)
            _require_shape(parameter.name, values[parameter.name], found)
            values[parameter.name].copy_(found)
        return iter(())

    def read_rows(self, start: int, stop: int) -> torch.Tensor:
        """Read rows of it, for those who hold no more than some (of an embedding)."""
        return self.source.read_rows(self.parameters[0].name, start, stop)

    def find_scales(
        self,
        values: Mapping[str, torch.Tensor],  # noqa: ARG002 -- the protocol's
    ) -> Iterator[tuple[WeightParameter, ScaleRange]]:
        """Give none: nothing is quantized."""
        return iter(())


def _require_shape(name: str, own: torch.Tensor, found: torch.Tensor) -> None:
    if own.shape != found.shape:
        raise VerificationError(
            f"{name} is {list(found.shape)} in the FP8 checkpoint and {list(own.shape)} in the "
            "model",
            hint="name the model that the checkpoint was made from",
        )


class StoredReach:
    """Gives `Fp8Checkpoint.read_reach` where the checkpoint gives a weight.

    What merges and renames the checkpoint's tensors for a model does the same to these.
    """

    def __init__(self, checkpoint: Fp8Checkpoint) -> None:
        self.folder = checkpoint.folder
        self.tensors = checkpoint.tensors
        self._checkpoint = checkpoint

    def read(self, name: str) -> torch.Tensor:
        """Give the reach of every element of an FP8 weight: fp32."""
        return self._checkpoint.read_reach(name)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Give that of some rows of the leading dimension."""
        return self._checkpoint.read_reach(name, start, stop)
