"""The FP8 checkpoint that `gptq` wrote."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from fp8calib.commands.quantize import describe as describe_checkpoint
from fp8calib.errors import cut_list
from fp8calib.plugins.gptq.request import GptqRequest
from fp8calib.plugins.gptq.result import GptqResult
from fp8calib.text import Block, Line

_SHOWN = 5


def describe(result: GptqResult, request: GptqRequest) -> Iterator[Block]:
    """Describe how the weights were rounded, the checkpoint, and what engines do with it."""
    yield from map(Line, _describe_rounding(result))
    yield from describe_checkpoint(result, request)


def _describe_rounding(result: GptqResult) -> Iterator[str]:
    """Describe how many linears GPTQ rounded, how much it gained, and which it did not round."""
    rounded, chosen = result.rounded, result.by_gptq
    gains = [
        item.gptq_db - item.nearest_db
        for item in chosen
        if item.gptq_db is not None and item.nearest_db is not None
    ]
    gained = f": {median(gains):.1f} dB less output error in the median" if gains else ""
    yield f"{len(chosen)} of {len(rounded)} linears rounded by GPTQ{gained}"
    for why in dict.fromkeys(item.why for item in rounded if item.why):
        names = [item.module for item in rounded if item.why == why]
        yield f"  rounded to nearest ({why}): {cut_list(names, _SHOWN)}"
    if raised := [item.module for item in result.damped]:
        yield f"  more damping, for a Hessian that was not positive: {cut_list(raised, _SHOWN)}"
