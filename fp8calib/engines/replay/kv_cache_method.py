"""How `BaseKVCacheMethod` of vLLM and SGLang turns the loaded scales of a layer into k and v.

A scale that was not loaded is -1.0 (vLLM 0.32.0 `quantization/kv_cache.py`, run; SGLang 0.5.23
`srt/layers/quantization/kv_cache.py`, read: there a scale of zero counts as not loaded too).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fp8calib.engines.replay.folder import FoundScale
from fp8calib.engines.replay.load_context import LoadContext, Slot
from fp8calib.engines.replay.verdicts import (
    MEASURE_AGAIN,
    LayerVerdict,
    LoadVerdict,
    Refusal,
    judge_number,
)
from fp8calib.engines.status import Status
from fp8calib.model.shapes import Role
from fp8calib.numerics.arrays import round_number

_SINGLE = ".kv_scale"


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRules:
    """What differs between the two engines, and the verdict on scales that are absent."""

    engine: str
    zero_is_unset: bool
    """Whether k and v that are both zero count as not loaded, as negative numbers do."""
    absent_why: str
    absent_fix: str
    dtype: str = "float32"
    """That of the parameters, to which stored numbers are rounded."""


def require_scalar(stored: FoundScale, engine: str) -> float:
    """Return the number of a per-tensor scale.

    Raises:
        Refusal: the tensor has more elements, or none.
    """
    if stored.numel != 1:
        why = f"{stored} has shape {list(stored.shape)}, and {engine} loads one number"
        raise Refusal(why, fix="store one number for the layer (kv-overlay, not kv-overlay-head)")
    return stored.values[0]


def judge_pair(
    context: LoadContext, index: int, loaded: dict[Slot, FoundScale], rules: PairRules
) -> LayerVerdict:
    """Judge the k and v of a layer.

    Raises:
        Refusal: the engine's assertion fails.
    """
    stored = {role: loaded.get((index, role)) for role in (Role.K, Role.V)}
    k, v = (
        -1.0 if one is None else _round(context, require_scalar(one, rules.engine), rules.dtype)
        for one in stored.values()
    )
    if k > 0 and v > 0:
        return LayerVerdict(
            layer=index,
            k=judge_number(k, str(stored[Role.K])),
            v=judge_number(v, str(stored[Role.V])),
        )
    if all(one < 0 or (one == 0 and rules.zero_is_unset) for one in (k, v)):
        return LayerVerdict(
            layer=index,
            k=_unset(context, (index, Role.K), stored[Role.K], k, rules),
            v=_unset(context, (index, Role.V), stored[Role.V], v, rules),
        )
    found = f"v {_describe_scale(stored[Role.V], v)}"
    if not k > 0:
        found = f"k {_describe_scale(stored[Role.K], k)}, {found}"
        why = f"layer {index}: {rules.engine} asserts k_scale > 0 and fails: {found}"
        raise Refusal(why, fix=MEASURE_AGAIN)
    # a v that is not above zero beside a k that is: the engine copies k's number
    source = stored[Role.K]
    one = judge_number(k, str(source))
    if stored[Role.V] is None and source is not None and source.name.endswith(_SINGLE):
        return LayerVerdict(layer=index, k=one, v=one)
    why = f"{found}, so {rules.engine} uses k_scale's number"
    wrong = LoadVerdict(status=Status.MISREAD, value=one.value, why=why, fix=MEASURE_AGAIN)
    return LayerVerdict(layer=index, k=one, v=wrong)


def _round(context: LoadContext, value: float, dtype: str) -> float:
    rounded = round_number(value, dtype)
    if rounded != value and not math.isnan(value):
        context.problems.append(f"scales are rounded to the model's {dtype}")
    return rounded


def _unset(
    context: LoadContext, slot: Slot, stored: FoundScale | None, value: float, rules: PairRules
) -> LoadVerdict:
    if stored is None:
        return context.judge_absent(slot, why=rules.absent_why, fix=rules.absent_fix)
    why = f"{stored} is {value:g}, which {rules.engine} treats as not loaded, so it uses 1.0"
    return LoadVerdict(status=Status.DEFAULTED, value=1.0, why=why, fix=MEASURE_AGAIN)


def _describe_scale(stored: FoundScale | None, value: float) -> str:
    return "has no scale" if stored is None else f"is {value:g}"
