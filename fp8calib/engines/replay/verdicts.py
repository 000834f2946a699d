"""The verdicts of `check`: what each engine does with the k and v scale of every layer."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import Field, computed_field

from fp8calib.engines.status import Status
from fp8calib.errors import shorten
from fp8calib.model.geometry import Frozen, ModelGeometry, Role
from fp8calib.model.tensor_parallel import rank_range
from fp8calib.numerics.formats import SMALLEST_SCALE

MEASURE_AGAIN = (
    "measure all KV scales again: `fp8calib calibrate MODEL --replace-scales --out DIR`; of an "
    "overlay, MODEL is what it was made from"
)
"""Helps where a scale is missing, zero or no number."""


Slot = tuple[int, Role]
"""The k, the v or the q of a layer: its index, and the role."""


class LoadVerdict(Frozen):
    """What an engine does with one scale, and why."""

    status: Status
    value: float | None = None
    """What the engine multiplies by; None if it does not start, or if that is not a number."""
    why: str
    fix: str = ""


class LayerVerdict(Frozen):
    """What an engine does with the scales of one layer."""

    layer: int
    k: LoadVerdict
    v: LoadVerdict

    @property
    def ok(self) -> bool:
        """Whether both scales are used."""
        return self.k.status is Status.USED and self.v.status is Status.USED


class LinearCount(Frozen):
    """How many linears of an FP8 checkpoint an engine was asked about."""

    judged: int
    """Linears that the engine's class is known to create in a certain way."""
    unknown: int


class EngineReport(Frozen):
    """What one engine does with every layer that has a KV cache, and with FP8 weights."""

    engine: str = ""
    """Its name in `check --engine`; empty until the report is finished, as `version`."""
    version: str = ""
    """The release whose rules were replayed."""
    layers: tuple[LayerVerdict, ...]
    problems: tuple[str, ...] = ()
    """What the engine ignores without an error, and conditions; they do not affect `ok`."""
    suspicious: tuple[str, ...] = ()
    """Scales that the engine uses, but that are most likely wrong."""
    unknown: tuple[str, ...] = ()
    """What cannot be judged, and why."""
    weights: LoadVerdict | None = None
    """The verdict on the FP8 weights, where the engine does not use them as the file means."""
    linears: LinearCount | None = None
    """None without FP8 weights, and where the engine does not start."""
    only_on: str = ""
    """The one kind of device where scales that `layers` calls misread are used as meant."""
    if_loaded: LoadVerdict | None = Field(default=None, exclude=True, repr=False)
    """What becomes of the weights if the engine starts, where that is unknown."""
    held: Mapping[Slot, tuple[float, ...]] = Field(default_factory=dict, exclude=True, repr=False)
    """What a running engine holds, by layer and role, where the replay knows it: one number, or
    one for each KV head of the model."""
    doubled: frozenset[Slot] = Field(default=frozenset(), exclude=True, repr=False)
    """What of `held` the engine doubles on devices whose FP8 is e4m3fnuz."""
    fingerprint: str = ""
    """Hash of the KV scales as loaded (`fingerprint_scales`); empty if they are not known."""
    asks_for_kv: bool = True
    """Whether the checkpoint asks for an FP8 KV cache; otherwise it is no fault to have none."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ok(self) -> bool:
        """Whether scales and weights are used as the file means, and no scale is suspicious."""
        is_served = bool(self.layers) and all(layer.ok for layer in self.layers)
        is_loaded = (is_served or self.loads_without_kv) and self.weights is None
        return is_loaded and not self.suspicious and not self.unknown

    @computed_field  # type: ignore[prop-decorator]
    @property
    def status(self) -> Status | None:
        """UNKNOWN where only something that cannot be judged keeps the report from being ok."""
        is_unread = all(each.k.status is Status.UNKNOWN for each in self.layers)
        if self.unknown and is_unread and self.weights is None:
            return Status.UNKNOWN
        judged = self.model_copy(update={"unknown": ()})
        return Status.UNKNOWN if self.unknown and judged.ok else None

    @property
    def verdict(self) -> str:
        """Whether it is ok in words: `ok`, `not ok` or `unknown`."""
        return "ok" if self.ok else self.status or "not ok"

    @property
    def summary(self) -> str:
        """The verdict, with the number of layers whose KV scales are used."""
        if self.loads_without_kv:
            loads = "ok, loads" if self.ok else self.verdict
            return f"{loads}; the KV cache is not quantized (an FP8 cache would use scale 1.0)"
        used = sum(layer.ok for layer in self.layers)
        served = f"{self.verdict}, {used} of {len(self.layers)} layers served"
        if self.status is Status.UNKNOWN or not self.layers:
            return f"{served} if the engine loads it" if used else self.verdict
        if used == len(self.layers) and not self.ok:  # something else is wrong
            return f"{self.verdict}; KV scales are used in {used} of {used} layers"
        return served

    @property
    def loads_without_kv(self) -> bool:
        """Whether the engine loads a checkpoint that asks for no FP8 KV cache."""
        is_unscaled = all(verdict.status is Status.DEFAULTED for verdict in self.slots.values())
        return not self.asks_for_kv and bool(self.layers) and is_unscaled

    @property
    def load_fault(self) -> str:
        """Why the engine cannot load the weights; empty if it can."""
        if self.weights is not None:
            return shorten(self.weights.why)
        refused = (each.why for each in self.slots.values() if each.status is Status.REFUSED)
        return shorten(next(refused, ""))

    @property
    def fault(self) -> str:
        """Why it is not sure to load the weights and to use the KV scales; empty if ok."""
        if self.ok:
            return ""
        unused = (each.why for each in self.slots.values() if each.status is not Status.USED)
        faults = () if self.status is Status.UNKNOWN else (*self.suspicious, *unused)
        doubts = (*faults, *self.unknown, *unused)
        return self.load_fault or shorten(next(iter(doubts), ""))

    @property
    def slots(self) -> dict[Slot, LoadVerdict]:
        """The verdicts on k and v of every layer."""
        return {
            (layer.layer, role): verdict
            for layer in self.layers
            for role, verdict in ((Role.K, layer.k), (Role.V, layer.v))
        }

    def give_names(self, other: EngineReport) -> EngineReport:
        """Return another report with what does not depend on what the engine does."""
        kept = {name: getattr(self, name) for name in ("engine", "version", "asks_for_kv")}
        return other.model_copy(update=kept)

    def put(self, changed: Mapping[Slot, LoadVerdict]) -> EngineReport:
        """Return the same report with other verdicts on some of its k and v."""
        slots = {**self.slots, **changed}
        numbers = (layer.layer for layer in self.layers)
        layers = (LayerVerdict(layer=n, k=slots[n, Role.K], v=slots[n, Role.V]) for n in numbers)
        return self.model_copy(update={"layers": tuple(layers)})

    def mark(
        self, whys: Mapping[Slot, str], fix: str, status: Status = Status.MISREAD
    ) -> EngineReport:
        """Return the same report with another status of scales that are used, for these reasons."""
        slots, update = self.slots, {"status": status, "fix": fix}
        return self.put(
            {
                slot: slots[slot].model_copy(update={**update, "why": why})
                for slot, why in whys.items()
                if slots[slot].status is Status.USED
            }
        )

    def add(
        self,
        *,
        problems: Iterable[str] = (),
        suspicious: Iterable[str] = (),
        unknown: Iterable[str] = (),
    ) -> EngineReport:
        """Return the same report with more texts in these fields."""
        update = {
            "problems": (*self.problems, *problems),
            "suspicious": (*self.suspicious, *suspicious),
            "unknown": (*self.unknown, *unknown),
        }
        return self.model_copy(update=update)

    def allow_suspicious(self) -> EngineReport:
        """Return the same report with suspicious scales as problems, which do not affect `ok`."""
        return self.add(problems=self.suspicious).model_copy(update={"suspicious": ()})


Reports = Mapping[str, EngineReport]
"""By engine, as it was asked for: `vllm`, `vllm==0.32`."""


class Refusal(Exception):  # noqa: N818 -- an engine's refusal to start, no error of ours
    """An engine does not start: why, and how to fix it; `is_final` whatever the files hold."""

    def __init__(self, why: str, *, fix: str, is_final: bool = False) -> None:
        super().__init__(why)
        self.why = why
        self.fix = fix
        self.is_final = is_final


class Unjudged(Refusal):
    """Only the engine's own loader can tell what it does: why."""

    def __init__(self, why: str, *, fix: str = "") -> None:
        super().__init__(why, fix=fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What an engine does with a subject, and why.

    The status USED is for a condition: the engine serves the subject, but in another way.
    """

    status: Status
    subject: str = ""
    """The tensor, linear or module; empty where `why` names it."""
    why: str
    """In words, to follow the subject."""
    fix: str = ""
    is_silent: bool = False
    """The engine raises no error for it alone. With a finding that is unknown beside it, whether
    the engine starts is unknown too."""
    if_loaded: str = ""
    """What the engine does if it starts, where it is unknown whether it stops; empty if it then
    serves the subject."""

    @classmethod
    def of(cls, refusal: Refusal) -> Finding:
        """Make the finding that an engine does not start, or that this cannot be told."""
        status = Status.UNKNOWN if isinstance(refusal, Unjudged) else Status.REFUSED
        return cls(status=status, why=refusal.why, fix=refusal.fix)

    @classmethod
    def doubt(cls, subject: str, why: str, *, fix: str, if_loaded: str = "") -> Finding:
        """Make the finding that it is unknown whether the engine stops at a subject."""
        return cls(status=Status.UNKNOWN, subject=subject, why=why, fix=fix, if_loaded=if_loaded)

    @property
    def text(self) -> str:
        """The subject and the reason."""
        return f"{shorten(self.subject)} {self.why}".strip() if self.subject else self.why

    def judge(self) -> LoadVerdict:
        """Make the verdict on the weights."""
        return LoadVerdict(status=self.status, why=self.text, fix=self.fix)


CUT = "it is cut, or fills a part"
"""What becomes of a tensor whose shape is not that of its parameter, if the engine starts."""


def join_alike(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Join findings of one kind into one, which names the first and says how many there are."""
    kinds: dict[tuple[Status, str, str], list[Finding]] = {}
    for each in findings:
        kinds.setdefault((each.status, each.fix, each.if_loaded), []).append(each)
    for first, *others in kinds.values():
        names = dict.fromkeys(each.subject or each.text for each in others)
        more = [name for name in names if name not in (first.subject, first.text)]
        end = f"; {len(more)} more likewise, such as {shorten(more[0])}" if more else ""
        yield replace(first, why=f"{first.why}{end}")


def is_scale(value: float) -> bool:
    """Check whether a number can be a scale: finite, above zero, its reciprocal finite in fp32.

    Some kernels multiply by the reciprocal: vLLM 0.32.0 `models/kimi_k3/nvidia/mla.py`, SGLang
    0.5.23 `kernels/ops/attention/fused_qk_rope_reshape_and_cache.py` (both read).
    """
    return SMALLEST_SCALE <= value < math.inf


def judge_number(value: float, why: str, *, fault: str = "") -> LoadVerdict:
    """Judge a number that an engine uses as a scale; `why` says where it comes from.

    `fault` is why it is not what the file means; empty if it is.
    """
    finite = value if math.isfinite(value) else None
    if not is_scale(value):
        status = Status.MISREAD if fault else Status.BAD
        what = "too small for a scale" if 0 < value < 1 else "not a scale"
        text = f"{value:g} is {what}, but the engine uses it ({why})"
        return LoadVerdict(status=status, value=finite, why=text, fix=MEASURE_AGAIN)
    if fault:
        fix = "serve it with another engine, or without scales"
        return LoadVerdict(status=Status.MISREAD, value=finite, why=fault, fix=fix)
    return LoadVerdict(status=Status.USED, value=finite, why=why)


def report_alike(geometry: ModelGeometry, verdict: LoadVerdict) -> EngineReport:
    """Report the same verdict for every layer with a KV cache."""
    layers = (
        LayerVerdict(layer=layer.index, k=verdict, v=verdict) for layer, _ in geometry.attentions()
    )
    return EngineReport(layers=tuple(layers))


def report_refusal(geometry: ModelGeometry, refusal: Refusal) -> EngineReport:
    """Report for every layer that the engine does not start, or that nothing can be told."""
    if isinstance(refusal, Unjudged):
        report = report_alike(geometry, LoadVerdict(status=Status.UNKNOWN, why=refusal.why))
        return report.add(unknown=[refusal.why])
    verdict = LoadVerdict(status=Status.REFUSED, why=refusal.why, fix=refusal.fix)
    report = report_alike(geometry, verdict)
    # without layers, as of a model that is not understood, the weights have the reason
    return report if report.layers else report.model_copy(update={"weights": verdict})


# --- a fingerprint of KV scales as an engine holds them: a stored cache can be keyed by it --------

_DIGITS = 16
Place = tuple[int, int, Role]
"""A layer, a rank, and K or V."""


def take_rank(numbers: Sequence[float], rank: int, tp: int) -> Sequence[float]:
    """Take the numbers on a rank of `tp`: those of its heads, or the one that there is."""
    heads = rank_range(len(numbers), tp, rank)
    return numbers[heads.start : heads.stop] if len(numbers) > 1 else numbers


def fingerprint_scales(scales: Mapping[Place, Sequence[float]]) -> str:
    """Hash layer, rank, role and numbers: hexadecimal digits.

    Heads with the same number are as one number for all of them. Numbers are those of float32.
    """
    import numpy as np  # noqa: PLC0415 -- the parser imports the verdicts

    digest = hashlib.sha256()
    for (layer, rank, role), numbers in sorted(scales.items()):
        found = numbers[:1] if len(set(numbers)) == 1 else numbers
        digest.update(f"{layer} {rank} {role} {len(found)}\n".encode())
        with np.errstate(over="ignore"):
            digest.update(np.array(found, dtype=np.float64).astype("<f4").tobytes())
    return digest.hexdigest()[:_DIGITS]


def add_fingerprint(report: EngineReport, tp: int) -> EngineReport:
    """Add the fingerprint of what an engine holds on `tp` ranks, where all of it is known."""
    found: dict[Place, Sequence[float]] = {}
    for (layer, role), verdict in report.slots.items():
        value = () if verdict.value is None else (verdict.value,)  # not known where it is empty
        held = report.held.get((layer, role), value)
        for rank in range(tp):
            found[layer, rank, role] = take_rank(held, rank, tp)
    is_known = bool(found) and all(found.values())
    return report.model_copy(update={"fingerprint": fingerprint_scales(found) if is_known else ""})
