"""How many tokens the experts of each layer got, and what becomes of those that got none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from fp8calib.scales.compute import Fallback
from fp8calib.stats.calibration_stats import CalibrationStats

_SHOWN = 20
_FALLBACKS: Mapping[Fallback, str] = {
    Fallback.LAYER_MAX: "they take the largest scale of the same role in their layer",
    Fallback.ONE: "they take scale 1.0",
    Fallback.REFUSE: "--fallback refuse: no scales are made of them",
}


def count_experts(stats: CalibrationStats, fallback: Fallback | None) -> dict[str, Any] | None:
    """Say for every layer how its tokens went to its experts; None where there are none.

    Of a shard nothing is said: what it did not reach others may.
    """
    if stats.part is not None:
        return None
    counts = {
        site.module.rpartition(".")[0]: found.expert_counts.tolist()
        for site, found in sorted(stats.sites.items())
        if found.expert_counts is not None and site.module.endswith(".up_proj")
    }
    if not counts:
        return None
    return {
        "fallback": fallback or Fallback.LAYER_MAX,
        "layers": [
            {
                "module": module,
                "min": min(tokens),
                "median": median(tokens),
                "max": max(tokens),
                "never_reached": [expert for expert, count in enumerate(tokens) if count == 0],
            }
            for module, tokens in counts.items()
        ],
    }


def describe_experts(experts: Mapping[str, Any] | None) -> Iterator[str]:
    """Say the same in lines for people."""
    if experts is None:
        return
    layers: Sequence[Mapping[str, Any]] = experts["layers"]
    least, middle, most = (
        pick(layer[key] for layer in layers)
        for pick, key in ((min, "min"), (median, "median"), (max, "max"))
    )
    yield (
        f"tokens per expert: {least:,} to {most:,}, median {middle:,.0f}, in {len(layers)} layers"
    )
    unreached = [layer for layer in layers if layer["never_reached"]]
    if not unreached:
        return
    total = sum(len(layer["never_reached"]) for layer in unreached)
    yield f"{total} experts were never reached: {_FALLBACKS[Fallback(experts['fallback'])]}"
    for layer in unreached[:_SHOWN]:
        yield f"  {layer['module']}: {', '.join(map(str, layer['never_reached']))}"
    if len(unreached) > _SHOWN:
        yield f"  and in {len(unreached) - _SHOWN} more layers, see report.json"
