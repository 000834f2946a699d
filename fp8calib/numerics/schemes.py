"""The FP8 schemes, one record each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from fp8calib.errors import UsageError, suggest

BLOCK = (128, 128)
"""Rows and columns of a weight that share a scale, in every block scheme that engines run."""
GROUP_SIZE = 128
"""Channels of a token that share a scale, in every group scheme but MXFP8."""
MX_BLOCK = (1, 32)
"""Rows and columns of a weight that share an exponent (OCP Microscaling Formats 1.0)."""


class Granularity(StrEnum):
    """What shares one scale, in the words of compressed-tensors."""

    TENSOR = "tensor"
    CHANNEL = "channel"
    """One output channel: a row of a weight [out, in]."""
    TOKEN = "token"  # noqa: S105 -- of text
    """One row of inputs [..., channels]."""
    GROUP = "group"
    """Consecutive channels of one token."""
    BLOCK = "block"
    """A rectangle of rows and columns of a weight."""


class InputScaling(StrEnum):
    """How the inputs of a linear are scaled."""

    NONE = "none"
    """Inputs are not quantized."""
    STATIC = "static"
    """By one scale that calibration computed and the checkpoint stores."""
    TOKEN = "token"  # noqa: S105 -- of text
    """By a scale per token, computed while serving. Also what configs call dynamic per tensor:
    vLLM 0.32.0 runs both per token (`compressed_tensors_w8a8_fp8.py`, `fp8.py`)."""
    GROUP = "group"
    """By a scale per token and `GROUP_SIZE` channels, or as many as MXFP8's blocks have, computed
    while serving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How the weight and the inputs of a linear are quantized, and what shares a scale."""

    name: str = ""
    """Empty where a config describes it."""
    description: str = ""
    weights: Granularity
    block: tuple[int, int] = BLOCK
    """Rows and columns that share a weight scale, where `weights` is `BLOCK`."""
    inputs: InputScaling
    has_power_of_two_scales: bool = False
    """Weight scales are rounded up to powers of two; only of blocks."""

    @property
    def is_mx(self) -> bool:
        """Tell whether it is MXFP8: all scales are powers of two, stored as their exponents."""
        return self.weights is Granularity.BLOCK and self.block == MX_BLOCK

    @property
    def has_static_inputs(self) -> bool:
        """Tell whether the scales of inputs come from calibration."""
        return self.inputs is InputScaling.STATIC


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme(
            name="fp8-static",
            description="weights and inputs per tensor, static",
            weights=Granularity.TENSOR,
            inputs=InputScaling.STATIC,
        ),
        Scheme(
            name="fp8-dynamic",
            description="weights per output channel, inputs per token, dynamic",
            weights=Granularity.CHANNEL,
            inputs=InputScaling.TOKEN,
        ),
        Scheme(
            name="w8a16",
            description="weights per output channel, inputs not quantized",
            weights=Granularity.CHANNEL,
            inputs=InputScaling.NONE,
        ),
        Scheme(
            name="fp8-block",
            description="weights per block of 128 x 128, inputs per 128 channels, dynamic",
            weights=Granularity.BLOCK,
            inputs=InputScaling.GROUP,
        ),
        Scheme(
            name="mxfp8",
            description="weights and inputs per 32 channels, by powers of two, dynamic",
            weights=Granularity.BLOCK,
            block=MX_BLOCK,
            inputs=InputScaling.GROUP,
            has_power_of_two_scales=True,
        ),
        Scheme(
            name="mxfp8-a16",
            description="weights per 32 channels, by powers of two, inputs not quantized",
            weights=Granularity.BLOCK,
            block=MX_BLOCK,
            inputs=InputScaling.NONE,
            has_power_of_two_scales=True,
        ),
    )
}


def find_scheme(name: str, *, option: str = "") -> Scheme:
    """Give the scheme called `name`; `option` is what named it, if not `--scheme`.

    Raises:
        UsageError: there is none; the message lists them.
    """
    if name not in SCHEMES:
        raise UsageError(
            f"{option or f'--scheme {name}'}: unknown scheme",
            hint=suggest(name, SCHEMES, what="schemes"),
        )
    return SCHEMES[name]


def name_mixed(scheme: str, *, is_mixed: bool) -> str:
    """Name a checkpoint of this scheme, in which some linears may have another."""
    return f"{scheme}-mixed" if is_mixed else scheme


def round_block_scales(scheme: Scheme) -> Scheme:
    """Let the scales of weights be powers of two, if they are of blocks."""
    return replace(scheme, has_power_of_two_scales=scheme.weights is Granularity.BLOCK)


def find_nearest(stored: Scheme) -> Scheme:
    """Give the scheme that engines treat most like a linear of a checkpoint.

    Engines choose their code by whether it is MXFP8, then by whether inputs are quantized, then by
    whether weights have blocks, then by whether inputs are static; the exact granularities decide
    between what remains.
    """
    weights, inputs = stored.weights, stored.inputs

    def agreement(scheme: Scheme) -> tuple[bool, ...]:
        return (
            scheme.is_mx is stored.is_mx,
            (scheme.inputs is InputScaling.NONE) is (inputs is InputScaling.NONE),
            (scheme.weights is Granularity.BLOCK) is (weights is Granularity.BLOCK),
            scheme.has_static_inputs is stored.has_static_inputs,
            scheme.inputs is inputs,
            scheme.weights is weights,
        )

    return max(SCHEMES.values(), key=agreement)


def list_without_calibration() -> list[str]:
    """List the schemes that need no calibration, by name; those of blocks do not fit all models."""
    return [
        name
        for name, each in SCHEMES.items()
        if each.weights is not Granularity.BLOCK and not each.has_static_inputs
    ]


def count_blocks(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Count the blocks of a weight, those at the edges included: [..., rows, columns]."""
    rows, columns = shape[-2:]
    return (*shape[:-2], -(-rows // block[0]), -(-columns // block[1]))


def count_parts(shape: tuple[int, int], scheme: Scheme) -> tuple[int, ...]:
    """Give the shape of the scales of a whole weight: (), rows or blocks."""
    if scheme.weights is Granularity.BLOCK:
        return count_blocks(shape, scheme.block)
    return shape[:1] if scheme.weights is Granularity.CHANNEL else ()
