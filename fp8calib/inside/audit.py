"""Compare the scales that every rank of a running vLLM holds with what the replay expects there."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from fp8calib.engines.replay.verdicts import (
    EngineReport,
    HeldScale,
    LayerVerdict,
    LoadVerdict,
    is_scale,
    judge_number,
)
from fp8calib.engines.scale_mixups import list_moves
from fp8calib.engines.status import Status
from fp8calib.engines.vllm.run import list_indices
from fp8calib.errors import ServerError, cut_list, format_ranges, shorten
from fp8calib.geometry.sites import KV_ROLES, Role
from fp8calib.inside.live_scales import COPIES, ROLES

Slot = tuple[int, Role]
_TOLERANCE = 2.0**-8
"""vLLM may round scales to bfloat16, and may be served in another dtype than the config names."""
FP8_CACHES = ("fp8", "fp8_e4m3")
_UNSCALED = ("auto", "bfloat16", "float16", "float32")
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
class LiveLayer:
    """The attention of one layer on one rank."""

    name: str
    backend: str
    reads: tuple[str, ...]
    """The attributes with scales that the backend's source reads; empty where there is none."""
    cache_dtype: str
    """vLLM's name for it."""
    stored_dtype: str
    """That of the cache's tensor."""
    scales: Mapping[Role, Mapping[str, tuple[float, ...]]]
    """By role and copy, as in `COPIES`; `factor` where the backend keeps one."""

    @property
    def index(self) -> int:
        """The layer's number; -1 where the name has none."""
        return next(iter(list_indices(self.name)), -1)

    def list_read(self, role: Role) -> tuple[str, ...]:
        """List the copies that the backend reads."""
        read = [copy for copy in COPIES if COPIES[copy].format(role) in self.reads]
        return (*read, "factor") if "float" in read and "factor" in self.scales[role] else (*read,)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAnswer:
    """What one rank of a running vLLM says of itself (`LiveScales.fp8calib_read_scales`)."""

    version: str
    device: str
    is_fnuz: bool
    tp_rank: int
    tp: int
    pp_rank: int
    pp: int
    dp: int
    has_graphs: bool
    """Whole forward passes are CUDA graphs, which hold the host's numbers of their capture."""
    layers: tuple[LiveLayer, ...]
    others: tuple[str, ...]
    """Layers with scales that are not the model's, such as those of a drafter."""

    @classmethod
    def parse(cls, answer: Any) -> Self:
        """Read the answer of a worker.

        Raises:
            ServerError: it is none, or that of another version of fp8calib.
        """
        try:
            layers = tuple(_parse_layer(each) for each in answer["layers"])
            return cls(**{**answer, "layers": layers, "others": tuple(answer["others"])})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            hint = "serve with the same version of fp8calib"
            text = f"a rank's answer cannot be read: {type(error).__name__} {error}"
            raise ServerError(text, hint=hint) from error


def _parse_layer(layer: Mapping[str, Any]) -> LiveLayer:
    scales = {
        Role(role): {copy: tuple(map(float, numbers)) for copy, numbers in copies.items()}
        for role, copies in layer["scales"].items()
    }
    return LiveLayer(**{**layer, "scales": scales, "reads": tuple(layer["reads"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """The copies of one scale on one rank, and the numbers that they should be."""

    rank: int
    layer: LiveLayer
    role: Role
    meant: tuple[float, ...]
    wrong: tuple[str, ...]

    @property
    def copies(self) -> Mapping[str, tuple[float, ...]]:
        """The numbers by copy."""
        return self.layer.scales[self.role]

    @property
    def number(self) -> float:
        """The worst number of a wrong copy, one that the backend reads first."""
        read = self.layer.list_read(self.role)
        copy = next((each for each in self.wrong if each in read), self.wrong[0])
        numbers = self.copies[copy]
        return next((each for each in numbers if not is_scale(each)), max(numbers))

    @property
    def is_used(self) -> bool:
        """Whether the backend is known to compute with a wrong number."""
        read = set(self.layer.list_read(self.role))
        return bool(read & set(self.wrong)) or (not self.layer.reads and self.all_wrong)

    @property
    def all_wrong(self) -> bool:
        """Whether no copy is as the file means."""
        return len(self.wrong) == len(self.copies)

    def describe_use(self) -> str:
        """Say which copy the backend reads."""
        read = self.layer.list_read(self.role)
        backend = shorten(self.layer.backend)
        if not self.layer.reads:
            return f"which copy {backend} reads is not known"
        return f"{backend} reads {_join(read) if read else 'none of them'}"


def compare_ranks(answers: Sequence[RankAnswer], report: EngineReport) -> EngineReport:
    """Judge the scales of a running engine by what a replay says that they are.

    Args:
        answers: one a rank.
        report: the replay of the checkpoint's loading; its verdict stays where the engine agrees.
    """
    slots = [
        _hold(answer, layer, role, report.held[layer.index, role])
        for answer in answers
        for layer in answer.layers
        for role in map(Role, ROLES)
        if (layer.index, role) in report.held
    ]
    faults = [each for each in slots if each.wrong and each.layer.cache_dtype in FP8_CACHES]
    sentences = _describe_faults(faults, slots, has_ranks=answers[0].tp > 1)
    used: dict[Slot, list[tuple[float, str]]] = defaultdict(list)
    for fault in faults:
        if fault.is_used and fault.role in KV_ROLES:
            used[fault.layer.index, fault.role].append((fault.number, sentences[id(fault)]))
    unused = dict.fromkeys(
        sentences[id(each)] for each in faults if not each.is_used or each.role is Role.Q
    )
    caches = _judge_caches(answers, report)
    layers = tuple(
        LayerVerdict(
            layer=layer.layer,
            k=_judge(layer.k, (layer.layer, Role.K), used, caches),
            v=_judge(layer.v, (layer.layer, Role.V), used, caches),
        )
        for layer in report.layers
    )
    has_fp8 = any(layer.cache_dtype in FP8_CACHES for each in answers for layer in each.layers)
    update = {"layers": layers, "asks_for_kv": report.asks_for_kv or has_fp8}
    amended = report.model_copy(update=update).suspect(*unused, *_list_foreign(answers, report))
    return amended.doubt(*_list_absent(answers)).add_problems(*_list_notes(answers, report))


def _hold(answer: RankAnswer, layer: LiveLayer, role: Role, held: HeldScale) -> _Held:
    meant = held.of_rank(answer.tp_rank, answer.tp, is_fnuz=answer.is_fnuz)
    copies = layer.scales[role]
    wrong = tuple(copy for copy, numbers in copies.items() if not _agrees(numbers, meant))
    return _Held(rank=answer.tp_rank, layer=layer, role=role, meant=meant, wrong=wrong)


def _agrees(numbers: Sequence[float], meant: Sequence[float]) -> bool:
    """Check a copy; one number stands for the heads of a rank if it is their largest."""
    if len(numbers) != len(meant):
        meant = (_largest(meant),) * len(numbers)
    pairs = zip(numbers, meant, strict=True)
    return all(
        math.isclose(number, each, rel_tol=_TOLERANCE) or (math.isnan(number) and math.isnan(each))
        for number, each in pairs
    )


def _largest(numbers: Sequence[float]) -> float:
    """Give the largest number as torch does: NaN is larger than all."""
    return max(numbers, key=lambda each: (math.isnan(each), each))


def _describe_faults(
    faults: Sequence[_Held], slots: Sequence[_Held], *, has_ranks: bool
) -> dict[int, str]:
    """Write one sentence for the same fault of several layers and ranks."""
    causes = {
        rank: _find_cause([each for each in slots if each.rank == rank])
        for rank in {each.rank for each in faults}
    }
    groups: dict[tuple[object, ...], list[_Held]] = defaultdict(list)
    for each in faults:
        is_read = tuple(copy in each.layer.list_read(each.role) for copy in each.wrong)
        key = (each.role, each.wrong, is_read, each.number if each.number in (0.0, 1.0) else None)
        cause = causes[each.rank] if each.role in KV_ROLES else ""
        groups[(*key, each.layer.backend, cause)].append(each)
    sentences = {}
    for (*_, cause), same in groups.items():
        by_rank: dict[int, list[int]] = defaultdict(list)
        for each in same:
            by_rank[each.rank].append(each.layer.index)
        by_layers: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for rank, layers in by_rank.items():
            by_layers[tuple(sorted(set(layers)))].append(rank)
        for layers, ranks in by_layers.items():
            chosen = [each for each in same if each.rank in ranks]
            place = f"{_count('rank', ranks)}: " if has_ranks else ""
            text = f"{place}{_count('layer', layers)}: {_describe(chosen)}{cause}"
            sentences |= {id(each): text for each in chosen}
    return sentences


def _describe(same: Sequence[_Held]) -> str:
    first = same[0]
    wrong = "all copies" if first.all_wrong else _join(first.wrong)
    right = [copy for copy in first.copies if copy not in first.wrong]
    is_right = f", {_join(right)} {'is' if len(right) == 1 else 'are'} right" if right else ""
    verb = "is" if len(first.wrong) == 1 and right else "are"
    held, meant = _span(each.number for each in same), _span(_largest(each.meant) for each in same)
    return (
        f"{wrong} of {first.role} {verb} {held}, the file means {meant}{is_right}: "
        f"{first.describe_use()}"
    )


def _find_cause(slots: Sequence[_Held]) -> str:
    """Find the mistake that explains all wrong numbers of a rank; empty where none does."""
    wrong = {(each.layer.index, each.role): each for each in slots if each.wrong}
    meant = {(each.layer.index, each.role): _largest(each.meant) for each in slots}
    pairs = {slot: each.number for slot, each in wrong.items() if slot[1] in KV_ROLES}
    if len(pairs) < 2:
        return ""
    for text, moved in list_moves(sorted({layer for layer, _ in meant})):
        known = {slot: meant[moved[slot]] for slot in pairs if slot in moved}
        fits = all(math.isclose(pairs[slot], known[slot], rel_tol=_TOLERANCE) for slot in known)
        if fits and 2 * len(known) >= max(len(pairs), 4):
            return f"; {text}"
    ratios = [number / meant[slot] for slot, number in pairs.items()]
    if ratios[0] and all(math.isclose(each, ratios[0], rel_tol=_TOLERANCE) for each in ratios):
        return f"; each is {ratios[0]:.4g} times the file's"
    is_other = all(number not in (0.0, 1.0) for number in pairs.values())
    if is_other and len(pairs) == sum(slot[1] in KV_ROLES for slot in meant):
        return "; does the engine serve another checkpoint?"
    return ""


def _judge_caches(
    answers: Sequence[RankAnswer], report: EngineReport
) -> dict[int, LoadVerdict | None]:
    """Judge the layers by their KV cache: None for FP8."""
    groups: dict[str, set[int]] = defaultdict(set)
    for layer in (layer for answer in answers for layer in answer.layers):
        groups[layer.cache_dtype].add(layer.index)
    found: dict[int, LoadVerdict | None] = {}
    for dtype, layers in groups.items():
        where = f"{_count('layer', sorted(layers))}: kv_cache_dtype is {shorten(dtype)}"
        if dtype in _UNSCALED:
            why, status = f"{where}: a cache of 16 bits, which has no scale", Status.DROPPED
        elif dtype.endswith("_per_token_head"):
            why, status = f"{where}: the engine computes a scale for each token", Status.DROPPED
        else:
            why, status = f"{where}: whether the scales fit it is not known", Status.UNKNOWN
        verdict = LoadVerdict(status=status, value=1.0, why=why, fix=_CACHE_FIX)
        found |= dict.fromkeys(layers, None if dtype in FP8_CACHES else verdict)
    indices = {layer.layer for layer in report.layers} - found.keys()
    absent = f"{_count('layer', sorted(indices))}: the engine has no such layer"
    verdict = LoadVerdict(status=Status.DROPPED, why=absent, fix="name the checkpoint it serves")
    return found | dict.fromkeys(indices, verdict)


def _judge(
    verdict: LoadVerdict,
    slot: Slot,
    used: Mapping[Slot, Sequence[tuple[float, str]]],
    caches: Mapping[int, LoadVerdict | None],
) -> LoadVerdict:
    cache = caches[slot[0]]
    if cache is not None:
        is_unscaled = verdict.status is Status.DEFAULTED and cache.value is not None
        return verdict if is_unscaled else cache
    if slot not in used:
        return verdict
    number = next((each for each, _ in used[slot] if not is_scale(each)), used[slot][0][0])
    why = "; ".join(dict.fromkeys(why for _, why in used[slot]))
    if number == 1.0:
        return LoadVerdict(status=Status.DEFAULTED, value=1.0, why=why, fix=_FIX)
    judged = judge_number(number, why, fault=why)
    return judged.model_copy(update={"fix": _FIX})


def _list_foreign(answers: Sequence[RankAnswer], report: EngineReport) -> Iterator[str]:
    known = {layer.layer for layer in report.layers}
    live = {layer.index for answer in answers for layer in answer.layers}
    if more := sorted(live - known):
        yield f"{_count('layer', more)} of the engine: the checkpoint has no such layer"


def _list_absent(answers: Sequence[RankAnswer]) -> Iterator[str]:
    first = answers[0]
    missing = first.tp * first.pp - len({(each.tp_rank, each.pp_rank) for each in answers})
    if missing:
        yield f"{missing} of {first.tp * first.pp} ranks have not answered"


def _list_notes(answers: Sequence[RankAnswer], report: EngineReport) -> Iterator[str]:
    first = answers[0]
    layers = [layer for answer in answers for layer in answer.layers]
    backends = cut_list(sorted({layer.backend for layer in layers}))
    caches = cut_list(sorted({f"{each.cache_dtype} ({each.stored_dtype})" for each in layers}))
    yield (
        f"the running vLLM {shorten(first.version)} answered for {len(answers)} "
        f"{'rank' if len(answers) == 1 else 'ranks'}: backend {backends}, KV cache {caches}"
    )
    if first.others:
        yield f"not compared: scales of a drafter ({cut_list(first.others, 2)})"
    if first.dp > 1:
        yield f"only one of {first.dp} data-parallel engines answered"
    factors = {each.fnuz_factor for slot, each in report.held.items() if slot[1] in KV_ROLES}
    if first.is_fnuz and factors == {1.0}:
        yield _FNUZ


def _count(what: str, numbers: Sequence[int]) -> str:
    return f"{what}{'s' if len(numbers) > 1 else ''} {format_ranges(sorted(numbers))}"


def _join(copies: Sequence[str]) -> str:
    names = [_NAMES.get(copy, copy) for copy in copies]
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _span(numbers: Iterator[float]) -> str:
    shown = [f"{each:.4g}" for each in sorted(numbers)]
    return shown[0] if shown[0] == shown[-1] else f"{shown[0]} to {shown[-1]}"
