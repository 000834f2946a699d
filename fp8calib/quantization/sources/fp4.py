"""Decode FP4 weights: NVFP4 of compressed-tensors and ModelOpt, MXFP4 of these and of gpt_oss.

Two e2m1 numbers are in a byte, the first in its low bits. Each group of 16 or 32 columns of a row
has a scale; a second scale is for the whole weight. ModelOpt multiplies by it (`weight_scale_2`),
compressed-tensors 0.20 divides by it (`weight_global_scale`, `compressors/nvfp4`; `mxfp4`).
gpt_oss stores its experts as `X_blocks` [experts, out, in / 32, 16] and `X_scales`, and its
unquantized form `X` is [experts, in, out] (transformers 5.23, `integrations/mxfp4.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.errors import ModelError, shorten

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)])
_GROUPS: Mapping[str, int] = {"F8_E4M3": 16, "U8": 32}
"""The dtype of the scales -> how many columns share one: NVFP4, and MXFP4, of powers of two."""
_EXPONENT_BIAS = 127
_COMPANIONS = (
    *("weight_scale", "weight_scale_2", "weight_global_scale", "input_scale"),
    "input_global_scale",
)
_BLOCKS = "_blocks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp4Weight:
    """An FP4 weight [out, in] and its scales."""

    stored: str
    shape: tuple[int, int]
    scale: str
    group: int
    factor: float = 1.0
    """The scales of groups are multiplied by it."""
    divisor: float = 1.0
    """The scales of groups are divided by it."""

    @property
    def form(self) -> str:
        """The name of the format."""
        return "NVFP4" if self.group == _GROUPS["F8_E4M3"] else "MXFP4"

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of all tensors it may be stored as."""
        module = self.stored.rpartition(".")[0]
        return (self.stored, *(f"{module}.{leaf}" for leaf in _COMPANIONS))

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> torch.Tensor:
        """Decode rows: fp32.

        Raises:
            ModelError: a scale is not valid, or a file cannot be read.
        """
        values = _decode(checkpoint.read_rows(self.stored, start, stop))
        stored = checkpoint.read_rows(self.scale, start, stop)
        if stored.dtype is torch.uint8:
            scale = _decode_powers(stored)
        else:
            scale = stored.float() * self.factor / self.divisor
        if not bool((scale.isfinite() & (scale >= 0)).all()):
            raise ModelError(
                f"{checkpoint.folder}: {shorten(self.scale)} holds what is not a scale",
                hint="download the checkpoint again",
            )
        return values * scale.repeat_interleave(self.group, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp4Experts:
    """Stacked experts of gpt_oss, decoded as [experts, in, out]."""

    stored: str
    shape: tuple[int, int, int]
    scale: str
    form: str = "MXFP4"

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the tensors it is stored as."""
        return (self.stored, self.scale)

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> torch.Tensor:
        """Decode experts: fp32."""
        values = _decode(checkpoint.read_rows(self.stored, start, stop))
        scale = _decode_powers(checkpoint.read_rows(self.scale, start, stop))
        return (values * scale.unsqueeze(-1)).flatten(2).transpose(1, 2).contiguous()


def find_fp4(checkpoint: Checkpoint) -> Iterator[tuple[str, Fp4Weight | Fp4Experts]]:
    """Find the FP4 weights of a checkpoint, by the name of the weight.

    Raises:
        ModelError: shapes do not fit, or a scale is missing.
    """
    for stored in checkpoint.tensors:
        if stored.endswith(_BLOCKS):
            yield stored.removesuffix(_BLOCKS), _find_experts(checkpoint, stored)
        if not _is_stored(checkpoint, stored):
            continue
        module = stored.rpartition(".")[0]
        rows, octets = checkpoint.tensors[stored].shape
        shape, name = (rows, 2 * octets), f"{module}.weight_scale"
        scale = checkpoint.tensors.get(name)
        group = 0 if scale is None else _GROUPS.get(scale.dtype, 0)
        if scale is None or not group or scale.shape != (rows, shape[1] // group):
            found = "missing" if scale is None else f"{scale.dtype} {list(scale.shape)}"
            raise ModelError(
                f"{checkpoint.folder}: {shorten(name)} is {found} for an FP4 weight {list(shape)}",
                hint="the scales of NVFP4 are e4m3 for 16 columns, those of MXFP4 uint8 for 32",
            )
        weight = Fp4Weight(
            stored=stored,
            shape=shape,
            scale=name,
            group=group,
            factor=_read_number(checkpoint, f"{module}.weight_scale_2"),
            divisor=_read_number(checkpoint, f"{module}.weight_global_scale"),
        )
        yield f"{module}.weight", weight


def _find_experts(checkpoint: Checkpoint, stored: str) -> Fp4Experts:
    name = f"{stored.removesuffix(_BLOCKS)}_scales"
    blocks, scale = checkpoint.tensors[stored], checkpoint.tensors.get(name)
    is_stored = blocks.dtype == "U8" and len(blocks.shape) == 4 and blocks.shape[3] == 16
    if not is_stored or scale is None or (scale.dtype, scale.shape) != ("U8", blocks.shape[:3]):
        found = "missing" if scale is None else f"{scale.dtype} {list(scale.shape)}"
        raise ModelError(
            f"{checkpoint.folder}: {shorten(stored)} is {blocks.dtype} {list(blocks.shape)}, and "
            f"{shorten(name)} is {found}",
            hint="gpt_oss has 16 bytes and a scale for 32 columns, both uint8",
        )
    experts, rows, groups, _ = blocks.shape
    return Fp4Experts(stored=stored, shape=(experts, 32 * groups, rows), scale=name)


def _decode(octets: torch.Tensor) -> torch.Tensor:
    """Decode the two numbers of every byte: twice as many columns, fp32."""
    return _VALUES[torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2).long()]


def _decode_powers(exponents: torch.Tensor) -> torch.Tensor:
    return torch.exp2(exponents.float() - _EXPONENT_BIAS)


def _is_stored(checkpoint: Checkpoint, name: str) -> bool:
    entry = checkpoint.tensors[name]
    if entry.dtype != "U8" or len(entry.shape) != 2:
        return False
    module = name.rpartition(".")[0]
    is_modelopt = name.endswith(".weight") and f"{module}.weight_scale_2" in checkpoint.tensors
    return is_modelopt or name.endswith(".weight_packed")


def _read_number(checkpoint: Checkpoint, name: str) -> float:
    """Read the scale of a whole weight; 1 if there is none."""
    if name not in checkpoint.tensors:
        return 1.0
    stored = checkpoint.read(name).float()
    value = float(stored) if stored.numel() == 1 else 0.0
    if not 0 < value < float("inf"):
        raise ModelError(
            f"{checkpoint.folder}: {shorten(name)} is not one number above zero",
            hint="download the checkpoint again",
        )
    return value
