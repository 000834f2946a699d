"""The FP8 weight schemes as data: what a scale of the weights covers, and one of the inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from fp8calib.errors import UsageError


class Dynamic(StrEnum):
    """What a scale covers that is computed from the tensor itself."""

    TENSOR = "tensor"
    TOKEN = "token"  # noqa: S105 -- of text
    """One row of the last dimension; of a weight: an output channel."""
    GROUP = "group"
    """128 channels of a row."""
    BLOCK = "block"
    """128 x 128 of the last two dimensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How weights and the inputs of linears are quantized."""

    name: str
    weights: Dynamic
    inputs: Dynamic | None
    """What a dynamic scale covers; None where inputs are static or not quantized."""
    has_static_inputs: bool = False
    """Input scales come from calibration."""
    description: str


SCHEMES: Mapping[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme(
            name="fp8-static",
            weights=Dynamic.TENSOR,
            inputs=None,
            has_static_inputs=True,
            description="weights and inputs per tensor, static",
        ),
        Scheme(
            name="fp8-dynamic",
            weights=Dynamic.TOKEN,
            inputs=Dynamic.TOKEN,
            description="weights per output channel, inputs per token, dynamic",
        ),
        Scheme(
            name="w8a16",
            weights=Dynamic.TOKEN,
            inputs=None,
            description="weights per output channel, inputs as they are",
        ),
        Scheme(
            name="fp8-block",
            weights=Dynamic.BLOCK,
            inputs=Dynamic.GROUP,
            description="weights per block of 128 x 128, inputs per 128 channels, dynamic",
        ),
    )
}


def find_scheme(name: str) -> Scheme:
    """Give the scheme called `name`.

    Raises:
        UsageError: there is none; the message lists them.
    """
    if name not in SCHEMES:
        raise UsageError(
            f"--scheme {name}: unknown scheme", hint=f"known schemes: {', '.join(SCHEMES)}"
        )
    return SCHEMES[name]
