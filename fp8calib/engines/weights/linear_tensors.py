"""Compare the tensors that the linears of a checkpoint have to have with those it stores.

What the tensors of a known form are is in `expected.py`. Where a checkpoint differs, the engine
may stop, which only its own loader can tell; what it does without an error is judged here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from fp8calib.engines.replay.verdicts import Refusal, Unjudged
from fp8calib.engines.status import Status
from fp8calib.engines.weights.expected import (
    INPUT_SCALE,
    PLAIN_DTYPES,
    WEIGHT,
    WEIGHTS,
    Expected,
    Shape,
)
from fp8calib.engines.weights.finding import CUT, Finding, join_alike
from fp8calib.engines.weights.linears import GroupKind, LinearGroup, StoredLinear
from fp8calib.engines.weights.reader import LinearReader, Unquantized
from fp8calib.engines.weights.stored import ScaleValues
from fp8calib.formats.fp8.quantization_config import StoredScheme
from fp8calib.formats.fp8.weights import list_scale_shapes
from fp8calib.formats.kv.parse_names import parse_name
from fp8calib.numerics.schemes import BLOCK, find_nearest

_CONFIG_FIX = "use the config that the weights were quantized with"
_STRAY_FIX = f"remove these tensors, or {_CONFIG_FIX}"
_MISSING_FIX = "complete the download or the export"
_PLAIN_FIX = "exclude it in the config, or quantize it"
_VALUE_FIX = "quantize the model again: a scale is a finite number above zero"
_CAST = "its values are cast to another dtype"
_NO_NUMBERS = ("NaN", "infinity")
_TOLERANCE = 1e-5
_UNKNOWN = {
    "": "is a linear of which it is not known how the engine's class creates it",
    "maybe": "is a linear that the engine's class creates by the config in some cases",
    "refused": "has no place in the engine's class",
}
"""What only the engine's own loader can tell, by how the class creates a linear."""
_TWINS = {"gate_proj": "up_proj", "w1": "w3"}
"""Projections of an expert, and those that engines load into the same tensor after them."""


def compare_linears(
    reader: LinearReader,
    groups: Sequence[LinearGroup],
    values: ScaleValues,
    schemes: Mapping[str, StoredScheme],
) -> Iterator[Finding]:
    """List what differs from the form and the scheme of the config; alike findings are joined.

    Args:
        reader: the engine's.
        groups: the linears of the checkpoint.
        values: of scales.
        schemes: that the config gives to paths of linears.
    """
    split = (each for each in groups if _splits_experts(each, schemes))
    if (layer := next(split, None)) is not None:
        # vLLM 0.32.0 compressed_tensors_moe/compressed_tensors_moe.py (get_moe_method); SGLang
        # 0.5.23 compressed_tensors/compressed_tensors.py (get_moe_scheme)
        yield Finding(
            status=Status.MISREAD,
            why="it joins the experts of a layer, and only a part of them is quantized "
            f"({layer.path}): it stops, or its answers are wrong",
            fix="quantize all of them, or none",
        )
    yield from join_alike([each for p in groups for each in _compare_group(reader, p, values)])
    if len(set(schemes.values())) > 1:
        yield from join_alike(
            [each for p in groups for each in _compare_scheme(reader, p, schemes)]
        )


def count_unknown(reader: LinearReader, groups: Sequence[LinearGroup]) -> int:
    """Count the linears of which only the engine's own loader can tell how it creates them."""
    unknown = 0
    for group in groups:
        try:
            reader.find_scheme(group)
            is_unknown = group.state in _UNKNOWN
        except Refusal as refusal:
            is_unknown = isinstance(refusal, Unjudged)
        unknown += is_unknown * len(group.members)
    return unknown


def _splits_experts(group: LinearGroup, schemes: Mapping[str, StoredScheme]) -> bool:
    """Tell whether only some experts of a layer are quantized."""
    return (
        group.kind is GroupKind.EXPERTS
        and any(each.module in schemes for each in group.members)
        and any(
            WEIGHT in each.tensors and each.tensors[WEIGHT].dtype in PLAIN_DTYPES
            for each in group.members
        )
    )


def _compare_scheme(
    reader: LinearReader, group: LinearGroup, schemes: Mapping[str, StoredScheme]
) -> Iterator[Finding]:
    try:
        created = reader.find_scheme(group)
    except Refusal:  # a finding already
        return
    wanted = (schemes.get(each.module) for each in group.members)
    other = next((each for each in wanted if each not in (None, created)), None)
    if isinstance(created, StoredScheme) and other is not None:
        own, found = (find_nearest(each).name for each in (other, created))
        why = f"is {own} in the config, but the engine finds no such group for it: {found}"
        yield Finding(status=Status.USED, subject=group.path, why=why, fix=_CONFIG_FIX)


def _compare_group(
    reader: LinearReader, group: LinearGroup, values: ScaleValues
) -> Iterator[Finding]:
    if group.state == "skipped":
        return
    try:
        scheme = reader.find_scheme(group)
    except Refusal as refusal:
        yield Finding.of(refusal)
        return
    if group.state in _UNKNOWN:
        if not isinstance(scheme, Unquantized) or _find_codes(group):
            yield Finding.doubt(group.path, _UNKNOWN[group.state], fix="")
        return
    if isinstance(scheme, Unquantized):
        for linear in group.members:
            yield from _compare_unquantized(linear, scheme.why)
        return
    if twin := _find_unequal(group, values.numbers):
        what = f"has other input scales for gate and up ({twin})"
        yield Finding.doubt(group.path, what, fix="", if_loaded="one of them is lost")
    has_codes = _find_codes(group)
    for linear in group.members:
        expected = reader.list_expected(group, linear, scheme)
        yield from _list_strays(linear, expected, "the config")
        weight = linear.tensors.get(WEIGHT)
        if weight is not None and weight.dtype in PLAIN_DTYPES:
            if has_codes or group.is_by_config:
                why = "is not quantized, but the config quantizes it: it is cast without a scale"
                yield Finding(
                    status=Status.MISREAD,
                    subject=linear.module,
                    why=why,
                    fix=_PLAIN_FIX,
                    is_silent=True,
                )
        elif group.is_by_config or not linear.tensors.keys().isdisjoint(expected):
            for suffix, tensor in expected.items():
                yield from _compare_tensor(group, linear, suffix, tensor, values)


def _find_codes(group: LinearGroup) -> bool:
    return any(
        WEIGHT in each.tensors and each.tensors[WEIGHT].dtype not in PLAIN_DTYPES
        for each in group.members
    )


def _compare_unquantized(linear: StoredLinear, why: str) -> Iterator[Finding]:
    yield from _list_strays(linear, (WEIGHT,), f"{why}, and the engine")
    weight = linear.tensors.get(WEIGHT)
    if weight is not None and weight.dtype not in PLAIN_DTYPES:
        kind = "FP8" if weight.dtype.startswith("F8_E") else weight.dtype
        what = f"is {kind}, but {why}: the engine uses its codes as the weight"
        yield Finding(
            status=Status.MISREAD,
            subject=linear.module,
            why=what,
            fix=_CONFIG_FIX,
            is_silent=True,
        )


def _list_strays(linear: StoredLinear, wanted: Iterable[str], who: str) -> Iterator[Finding]:
    """List the scales beside a linear that are not expected; KV scales are judged elsewhere."""
    for suffix in linear.tensors:
        is_number = "scale" in suffix or "zero_point" in suffix
        if is_number and suffix not in wanted and parse_name(linear.name(suffix)) is None:
            why = f"is stored, but {who} has no place for it"
            if who == "the config":
                why = "has no place by the config"
            yield Finding.doubt(linear.name(suffix), why, fix=_STRAY_FIX)


def _compare_tensor(
    group: LinearGroup, linear: StoredLinear, suffix: str, expected: Expected, values: ScaleValues
) -> Iterator[Finding]:
    """Compare one tensor: whether it is there, its dtype, its shape, and its values."""
    name = linear.name(suffix)
    twin = _find_twin(group, linear) if suffix == INPUT_SCALE else None
    entry = linear.tensors.get(suffix)
    if entry is None:
        if twin is None:
            yield _judge_missing(group, name, suffix, expected, values)
    elif entry.dtype not in expected.dtypes:
        what = f"is {entry.dtype}, and the config means {expected.dtypes[0]}"
        yield Finding.doubt(name, what, fix=_CONFIG_FIX, if_loaded=_CAST)
    elif entry.shape not in expected.shapes:
        what = _describe_shape(linear, suffix, entry.shape, expected.shapes)
        yield Finding.doubt(name, what, fix=_CONFIG_FIX, if_loaded=CUT)
    elif (bad := values.bad.get(name)) is not None and (
        twin is None or linear.projection not in _TWINS
    ):
        if expected.may_be_zero and bad not in _NO_NUMBERS:
            return
        yield _judge_value(group, name, suffix, expected, bad, values)


def _judge_missing(
    group: LinearGroup, name: str, suffix: str, expected: Expected, values: ScaleValues
) -> Finding:
    is_expert = group.kind is GroupKind.EXPERTS
    others = _list_good(group, suffix, values) if expected.is_shared else []
    if others and not is_expert:
        what = f"is missing: the engine uses the largest of those of {', '.join(others)}"
        return Finding(status=Status.USED, subject=name, why=what)
    is_defaulted = is_expert and suffix not in WEIGHTS
    memory = "1.0" if is_defaulted else "uninitialised memory"
    return Finding(
        status=Status.DEFAULTED if is_defaulted else Status.MISREAD,
        subject=name,
        why=f"is missing: the engine uses {memory}",
        fix=_MISSING_FIX,
        is_silent=True,
    )


def _describe_shape(
    linear: StoredLinear, suffix: str, found: Shape, wanted: tuple[Shape, ...]
) -> str:
    """Say which shape a tensor has, in words where it is that of another kind of scale."""
    kinds = list_scale_shapes(linear.shape, BLOCK) if suffix != WEIGHT else {}
    is_kind, means = (
        next((kind for kind, shapes in kinds.items() if not each.isdisjoint(shapes)), None)
        for each in ({found}, set(wanted))
    )
    if is_kind is None or means is None or is_kind is means:
        return f"has shape {list(found)}, and the config means {list(wanted[-1])}"
    return f"has shape {list(found)}, which is per {is_kind}, and the config says per {means}"


def _judge_value(
    group: LinearGroup,
    name: str,
    suffix: str,
    expected: Expected,
    bad: str,
    values: ScaleValues,
) -> Finding:
    """Judge a scale that is no scale: the largest of several hides what is not above zero."""
    is_hidden = expected.is_shared and bad not in _NO_NUMBERS
    if is_hidden and _list_good(group, suffix, values):
        why = f"holds {bad}: the engine uses the largest of those of {group.path}"
        return Finding(status=Status.USED, subject=name, why=why)
    why = f"holds {bad}, and the engine computes with it"
    return Finding(status=Status.MISREAD, subject=name, why=why, fix=_VALUE_FIX)


def _list_good(group: LinearGroup, suffix: str, values: ScaleValues) -> list[str]:
    """List the linears of a group that store a valid scale of a kind."""
    return [
        each.projection
        for each in group.members
        if suffix in each.tensors and each.name(suffix) not in values.bad
    ]


def _find_twin(group: LinearGroup, linear: StoredLinear) -> StoredLinear | None:
    """Find the projection of the same expert whose input scale fills the same number, if stored.

    The number that is loaded last stays: that of the second projection.
    """
    names = _TWINS | {second: first for first, second in _TWINS.items()}
    twin = f"{linear.module.rpartition('.')[0]}.{names.get(linear.projection, '')}"
    if group.kind is not GroupKind.EXPERTS:
        return None
    members = (each for each in group.members if INPUT_SCALE in each.tensors)
    return next((each for each in members if each.module == twin), None)


def _find_unequal(group: LinearGroup, numbers: Mapping[str, float]) -> str:
    """Find an expert whose gate and up have unequal input scales; empty where there is none."""
    members = group.members if group.kind is GroupKind.EXPERTS else ()
    for linear in members:
        second = _TWINS.get(linear.projection)
        expert = linear.module.rpartition(".")[0]
        one = numbers.get(linear.name(INPUT_SCALE))
        other = numbers.get(f"{expert}.{second}.{INPUT_SCALE}")
        if one is not None and other is not None and abs(one - other) > _TOLERANCE:
            return expert
    return ""
