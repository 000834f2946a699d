"""Compare the scales that every rank of a running vLLM holds with what the replay expects there."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from fp8calib.engines.replay.verdicts import (
    EngineReport,
    LoadVerdict,
    Place,
    fingerprint_scales,
    is_scale,
    judge_number,
    take_rank,
)
from fp8calib.engines.scale_mistakes import list_moves
from fp8calib.engines.status import Status
from fp8calib.errors import cut_list, format_count, name_ranges, shorten
from fp8calib.model.geometry import KV_ROLES, Role
from fp8calib.plugins.vllm.live_scales import FP8_CACHES, ROLES
from fp8calib.plugins.vllm.rank_answer import LiveLayer, RankAnswer, Slot

_TOLERANCE = 2.0**-8
"""vLLM may round scales to bfloat16, and may be served in another dtype than the config names."""
_PLAIN = ("auto", "bfloat16", "float16", "float32")
_UNSCALED = ("turboquant", "ultraquant", "fp8_ds_mla")
_NAMES = {
    "device": "the device scale",
    "float": "the host float",
    "cpu": "the CPU copy",
    "factor": "the factor of the first forward pass",
}
_FIX = "load the checkpoint again, or write its scales with fp8calib.load_kv_scales"
_CACHE_FIX = "serve it with --kv-cache-dtype fp8"
_FNUZ = (
    "FP8 is e4m3fnuz here, and vLLM does not double the scales of compressed-tensors: they clip "
    "above 240/448 of the calibrated range"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    """A scale on one rank that differs, in some of its copies, from what the file means."""

    rank: int
    layer: LiveLayer
    role: Role
    meant: float
    """The largest number of the rank's heads."""
    wrong: tuple[str, ...]
    right: tuple[str, ...]
    number: float
    """The worst number of a wrong copy, of one that the backend reads if there is one."""
    is_used: bool
    """Whether the backend is known to compute K or V with a wrong number."""


def compare_ranks(answers: Sequence[RankAnswer], report: EngineReport) -> EngineReport:
    """Judge the scales of a running engine by what a replay says that they are.

    `report` is the replay of the checkpoint's loading; its verdict stays where the engine agrees.
    """
    first, layers = answers[0], [layer for answer in answers for layer in answer.layers]
    used: dict[Slot, dict[str, float]] = defaultdict(dict)
    suspicious = []
    for why, faults in _explain(answers, report):
        if not faults[0].is_used:
            suspicious.append(why)
            continue
        for fault in faults:
            used[fault.layer.index, fault.role][why] = fault.number
    caches = _judge_caches(layers, report)
    changed = {
        slot: _judge(verdict, used[slot], caches.get(slot[0]))
        for slot, verdict in report.slots.items()
    }
    if more := {layer.index for layer in layers}.difference(each.layer for each in report.layers):
        what = "of the engine: the checkpoint has no such layer"
        suspicious.append(f"{name_ranges(sorted(more))} {what}")
    size = first.tp * first.pp
    missing = size - len({(each.tp_rank, each.pp_rank) for each in answers})
    update = {
        "asks_for_kv": report.asks_for_kv or any(e.cache_dtype in FP8_CACHES for e in layers),
        "fingerprint": fingerprint_scales(dict(_list_read(answers))),
    }
    return (
        report.put(changed)
        .model_copy(update=update)
        .add(
            suspicious=suspicious,
            unknown=[f"{missing} of {size} ranks have not answered"] if missing else [],
            problems=_list_notes(answers, layers, report),
        )
    )


def _list_read(answers: Sequence[RankAnswer]) -> Iterator[tuple[Place, Sequence[float]]]:
    """List K's and V's numbers that each backend reads; if its copies differ, all of them."""
    for answer in answers:
        for layer, role in product(answer.layers, KV_ROLES):
            copies = layer.list_read(role) or tuple(layer.scales[role])
            different = dict.fromkeys(layer.scales[role][copy] for copy in copies)
            numbers = tuple(each for found in different for each in found)
            yield (layer.index, answer.tp_rank, role), numbers


# --- scales that differ from the file's -----------------------------------------------------------


def _explain(
    answers: Sequence[RankAnswer], report: EngineReport
) -> Iterator[tuple[str, Sequence[_Fault]]]:
    """Write one sentence for the same fault of several layers and ranks."""
    by_rank = defaultdict[tuple[Any, ...], list[_Fault]](list)
    for answer in answers:
        meant = {}
        for slot, held in report.held.items():
            factor = 2.0 if answer.is_fnuz and slot in report.doubled else 1.0
            own = take_rank(held, answer.tp_rank, answer.tp)
            meant[slot] = tuple(factor * number for number in own)
        faults = list(_find_faults(answer, meant))
        cause = _find_cause([each for each in faults if each.role in KV_ROLES], answer, meant)
        for each in faults:
            number = each.number if each.number in (0.0, 1.0) else None
            why = cause if each.role in KV_ROLES else ""
            key = (each.wrong, each.is_used, number, each.layer.backend, each.role, why)
            by_rank[answer.tp_rank, *key].append(each)
    alike = defaultdict[tuple[Any, ...], list[_Fault]](list)
    for (_, *kind), found in by_rank.items():
        alike[*kind, tuple(sorted({each.layer.index for each in found}))] += found
    for (*_, why, layers), same in alike.items():
        ranks = sorted({each.rank for each in same})
        place = f"{name_ranges(ranks, 'rank')}: " if answers[0].tp > 1 else ""
        yield f"{place}{name_ranges(layers)}: {_describe(same)}{why}", same


def _find_faults(answer: RankAnswer, meant: Mapping[Slot, Sequence[float]]) -> Iterator[_Fault]:
    layers = (each for each in answer.layers if each.cache_dtype in FP8_CACHES)
    for layer, role in product(layers, map(Role, ROLES)):
        own, copies = meant.get((layer.index, role)), layer.scales[role]
        if own is None:
            continue
        wrong = tuple(copy for copy, numbers in copies.items() if not _agrees(numbers, own))
        if not wrong:
            continue
        right = tuple(copy for copy in copies if copy not in wrong)
        read = [copy for copy in layer.list_read(role) if copy in wrong]
        numbers = copies[(read or wrong)[0]]
        yield _Fault(
            rank=answer.tp_rank,
            layer=layer,
            role=role,
            meant=_largest(own),
            wrong=wrong,
            right=right,
            number=next((each for each in numbers if not is_scale(each)), max(numbers)),
            is_used=role in KV_ROLES and (bool(read) or not (layer.reads or right)),
        )


def _agrees(numbers: Sequence[float], meant: Sequence[float]) -> bool:
    """Check a copy; one number stands for the heads of a rank if it is their largest."""
    if len(numbers) != len(meant):
        meant = (_largest(meant),) * len(numbers)
    return all(map(_is_close, numbers, meant))


def _is_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_TOLERANCE) or (math.isnan(one) and math.isnan(other))


def _largest(numbers: Sequence[float]) -> float:
    """Give the largest number as torch does: NaN is larger than all."""
    return max(numbers, key=lambda each: (math.isnan(each), each))


def _describe(same: Sequence[_Fault]) -> str:
    first = same[0]
    wrong, right = _join(first.wrong) if first.right else "all copies", ""
    verb = "is" if len(first.wrong) == 1 and first.right else "are"
    if first.right:
        right = f", {_join(first.right)} {'is' if len(first.right) == 1 else 'are'} right"
    backend, read = shorten(first.layer.backend), first.layer.list_read(first.role)
    use = f"{backend} reads {_join(read) if read else 'none of them'}"
    use = use if first.layer.reads else f"which copy {backend} reads is not known"
    held, meant = _span(each.number for each in same), _span(each.meant for each in same)
    return f"{wrong} of {first.role} {verb} {held}, the file means {meant}{right}: {use}"


def _find_cause(
    faults: Sequence[_Fault], answer: RankAnswer, meant: Mapping[Slot, Sequence[float]]
) -> str:
    """Find the mistake that explains all wrong numbers of a rank; empty where none does."""
    numbers = {(each.layer.index, each.role): each.number for each in faults}
    layers = sorted({layer.index for layer in answer.layers})
    largest = {
        slot: _largest(own)
        for slot, own in meant.items()
        if slot[0] in layers and slot[1] in KV_ROLES
    }
    if len(numbers) < 2 or not all(map(is_scale, largest.values())):
        return ""
    for text, moved in list_moves(layers):
        known = {slot: largest[moved[slot]] for slot in numbers if moved.get(slot) in largest}
        fits = all(_is_close(numbers[slot], known[slot]) for slot in known)
        if fits and 2 * len(known) >= max(len(numbers), 4):
            return f"; {text}"
    first, *ratios = (number / largest[slot] for slot, number in numbers.items())
    if first and all(_is_close(first, each) for each in ratios):
        return f"; each is {first:.4g} times the file's"
    is_other = len(numbers) == len(largest) and not {0.0, 1.0} & {*numbers.values()}
    return "; does the engine serve another checkpoint?" if is_other else ""


# --- verdicts -------------------------------------------------------------------------------------


def _judge_caches(layers: Iterable[LiveLayer], report: EngineReport) -> dict[int, LoadVerdict]:
    """Judge the layers whose KV cache is not FP8, by their indices."""
    absent = {each.layer for each in report.layers}.difference(layer.index for layer in layers)
    why = f"{name_ranges(sorted(absent))}: the engine has no such layer"
    verdict = LoadVerdict(status=Status.DROPPED, why=why, fix="name the checkpoint it serves")
    found = dict.fromkeys(absent, verdict)
    groups: dict[str, set[int]] = defaultdict(set)
    for layer in layers:
        groups[layer.cache_dtype].add(layer.index)
    for dtype in groups.keys() - FP8_CACHES:
        status, why = Status.DROPPED, "it takes no scale of a file"
        if dtype in _PLAIN:
            why = "a cache of 16 bits, which has no scale"
        elif not (dtype.startswith(_UNSCALED) or dtype.endswith("_per_token_head")):
            status, why = Status.UNKNOWN, "whether the scales fit it is not known"
        why = f"{name_ranges(groups[dtype])}: kv_cache_dtype is {shorten(dtype)}: {why}"
        verdict = LoadVerdict(status=status, value=1.0, why=why, fix=_CACHE_FIX)
        found |= dict.fromkeys(groups[dtype], verdict)
    return found


def _judge(
    verdict: LoadVerdict, faults: Mapping[str, float], cache: LoadVerdict | None
) -> LoadVerdict:
    if cache is not None:
        is_unscaled = verdict.status is Status.DEFAULTED and cache.value is not None
        return verdict if is_unscaled else cache
    if not faults:
        return verdict
    numbers, why = [*faults.values()], "; ".join(faults)
    number = next((each for each in numbers if not is_scale(each)), numbers[0])
    judged = judge_number(number, why, fault=why)
    status = Status.DEFAULTED if number == 1.0 else judged.status
    return judged.model_copy(update={"status": status, "fix": _FIX})


def _list_notes(
    answers: Sequence[RankAnswer], layers: Sequence[LiveLayer], report: EngineReport
) -> Iterator[str]:
    first = answers[0]
    backends = cut_list(sorted({layer.backend for layer in layers}))
    caches = cut_list(sorted({f"{each.cache_dtype} ({each.stored_dtype})" for each in layers}))
    yield (
        f"the running vLLM {shorten(first.version)} answered for "
        f"{format_count(len(answers), 'rank')}: backend {backends}, KV cache {caches}"
    )
    if first.others:
        yield f"not compared: scales of a drafter ({cut_list(first.others, 2)})"
    if first.dp > 1:
        yield f"only one of {first.dp} data-parallel engines answered"
    held = {slot for slot in report.held if slot[1] in KV_ROLES}
    if first.is_fnuz and held and held.isdisjoint(report.doubled):
        yield _FNUZ


def _join(copies: Sequence[str]) -> str:
    names = [_NAMES.get(copy, copy) for copy in copies]
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _span(numbers: Iterable[float]) -> str:
    shown = [f"{each:.4g}" for each in sorted(numbers)]
    return shown[0] if shown[0] == shown[-1] else f"{shown[0]} to {shown[-1]}"
