"""How vLLM's and SGLang's `BaseKVCacheMethod` turn what was loaded into k and v.

Both begin at -1.0 for "not loaded" and compare (vLLM 0.32.0 `quantization/kv_cache.py`, run; SGLang
0.5.23 `srt/layers/quantization/kv_cache.py`, read: there zero counts as not loaded too).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fp8calib.engines.replay.folder import HeldScale, LoadContext, Slot
from fp8calib.engines.replay.verdicts import (
    LayerVerdict,
    LoadVerdict,
    Refusal,
    Status,
    judge_number,
)
from fp8calib.geometry.sites import Role

_SINGLE = ".kv_scale"
_BOTH_MEND = "store a k_scale and a v_scale for the layer, both above zero"

Unset = Callable[[float], bool]


@dataclass(frozen=True, slots=True)
class PairRules:
    """Which engine, and which numbers it takes for "not loaded" when both are."""

    engine: str
    is_unset: Unset
    absent_why: str
    absent_fix: str


def is_negative(value: float) -> bool:
    """VLLM's test."""
    return value < 0


def is_not_positive(value: float) -> bool:
    """SGLang's test."""
    return value <= 0


def require_scalar(held: HeldScale, engine: str) -> float:
    """Give the one number of a scale.

    Raises:
        Refusal: it holds more or fewer.
    """
    if held.numel != 1:
        why = f"{held} has shape {list(held.shape)}, and {engine} loads one number"
        raise Refusal(why, fix="store one number for the layer (kv-overlay, not kv-overlay-head)")
    return held.values[0]


def judge_pair(
    scene: LoadContext, index: int, loaded: dict[Slot, HeldScale], rules: PairRules
) -> LayerVerdict:
    """Say what a layer's k and v become.

    Raises:
        Refusal: the engine's assertion fails.
    """
    held = {role: loaded.get((index, role)) for role in (Role.K, Role.V)}
    k, v = (
        -1.0 if (one := held[role]) is None else require_scalar(one, rules.engine)
        for role in (Role.K, Role.V)
    )
    if k > 0 and v > 0:
        return LayerVerdict(
            layer=index,
            k=judge_number(k, str(held[Role.K])),
            v=judge_number(v, str(held[Role.V])),
        )
    if rules.is_unset(k) and rules.is_unset(v):
        return LayerVerdict(
            layer=index,
            k=_unset(scene, (index, Role.K), held[Role.K], k, rules),
            v=_unset(scene, (index, Role.V), held[Role.V], v, rules),
        )
    if not k > 0:
        found = f"k {_spell(held[Role.K], k)}, v {_spell(held[Role.V], v)}"
        why = f"layer {index}: {rules.engine} asserts k_scale > 0 and fails: {found}"
        raise Refusal(why, fix=_BOTH_MEND)
    return _copied(index, held, k, v, rules)


def _unset(
    scene: LoadContext, slot: Slot, held: HeldScale | None, value: float, rules: PairRules
) -> LoadVerdict:
    if held is None:
        return scene.absent(slot, why=rules.absent_why, fix=rules.absent_fix)
    why = f"{held} is {value:g}, which {rules.engine} takes for no scale: 1.0"
    fix = "calibrate the layer again; a scale is a finite number above zero"
    return LoadVerdict(status=Status.DEFAULTED, value=1.0, why=why, fix=fix)


def _copied(
    index: int, held: dict[Role, HeldScale | None], k: float, v: float, rules: PairRules
) -> LayerVerdict:
    """Judge the last case: k is a number above zero, v is none, and gets k's."""
    source = held[Role.K]
    one = judge_number(k, str(source))
    if held[Role.V] is None and source is not None and source.name.endswith(_SINGLE):
        return LayerVerdict(layer=index, k=one, v=one)
    why = f"v {_spell(held[Role.V], v)}, so {rules.engine} gives it k_scale's number"
    wrong = LoadVerdict(status=Status.MISREAD, value=one.value, why=why, fix=_BOTH_MEND)
    return LayerVerdict(layer=index, k=one, v=wrong)


def _spell(held: HeldScale | None, value: float) -> str:
    return "has no scale" if held is None else f"is {value:g}"
