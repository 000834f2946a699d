"""The rule: the tensors that a checkpoint stores for a linear, beside what the engine creates.

What the tensors of a known form are is in `forms.py`. Where a checkpoint differs, the engine
may stop, which only its own loader can tell; what it does without an error is judged here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from fp8calib.engines.replay.verdicts import Refusal, Unjudged
from fp8calib.engines.status import Status
from fp8calib.engines.weights.finding import CUT, Finding, join_alike
from fp8calib.engines.weights.forms import INPUT_SCALE, WEIGHTS, Expected, OtherScheme
from fp8calib.engines.weights.linears import WEIGHT, GroupKind, LinearGroup, Shape, StoredLinear
from fp8calib.engines.weights.reader import Found, LinearReader, Unquantized
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
Created = Sequence[tuple[LinearGroup, Found | Refusal]]
"""What an engine creates: its groups of linears, and the scheme of each or why there is none."""


def list_created(reader: LinearReader, groups: Iterable[LinearGroup]) -> Created:
    """Find the scheme by which an engine creates each group."""
    created: list[tuple[LinearGroup, Found | Refusal]] = []
    for group in groups:
        try:
            created.append((group, reader.find_scheme(group)))
        except Refusal as refusal:
            created.append((group, refusal))
    return created


def count_unknown(created: Created) -> int:
    """Count the linears of which only the engine's own loader can tell how it creates them."""
    return sum(
        len(group.members)
        for group, found in created
        if isinstance(found, Unjudged)
        or (group.state in _UNKNOWN and not isinstance(found, Refusal))
    )


def compare_linears(
    reader: LinearReader,
    created: Created,
    values: ScaleValues,
    schemes: Mapping[str, StoredScheme],
) -> Iterator[Finding]:
    """List what differs from the form and the scheme of the config; alike findings are joined.

    Args:
        reader: the engine's.
        created: the linears of the checkpoint.
        values: of scales.
        schemes: that the config gives to paths of linears.
    """
    split = (group.path for group, _ in created if _splits_experts(group, schemes))
    if (layer := next(split, None)) is not None:
        # vLLM 0.32.0 compressed_tensors_moe/compressed_tensors_moe.py (get_moe_method); SGLang
        # 0.5.23 compressed_tensors/compressed_tensors.py (get_moe_scheme)
        yield Finding(
            status=Status.MISREAD,
            why="it joins the experts of a layer, and only a part of them is quantized "
            f"({layer}): it stops, or its answers are wrong",
            fix="quantize all of them, or none",
        )
    yield from join_alike(
        [each for group, found in created for each in _compare_group(reader, group, found, values)]
    )
    if len(set(schemes.values())) > 1:
        yield from join_alike(list(_compare_schemes(created, schemes)))


def _splits_experts(group: LinearGroup, schemes: Mapping[str, StoredScheme]) -> bool:
    """Tell whether only some experts of a layer are quantized."""
    is_expert = group.kind is GroupKind.EXPERTS
    has_fp8 = is_expert and any(each.module in schemes for each in group.members)
    return has_fp8 and any(each.is_plain for each in group.members)


def _compare_schemes(created: Created, schemes: Mapping[str, StoredScheme]) -> Iterator[Finding]:
    """List linears that the engine finds in another config group than the config means."""
    for group, scheme in created:
        wanted = (schemes.get(each.module) for each in group.members)
        other = next((each for each in wanted if each not in (None, scheme)), None)
        if isinstance(scheme, StoredScheme) and other is not None:
            own, found = (find_nearest(each).name for each in (other, scheme))
            why = f"is {own} in the config, but the engine finds no such group for it: {found}"
            yield Finding(status=Status.USED, subject=group.path, why=why, fix=_CONFIG_FIX)


def _compare_group(
    reader: LinearReader, group: LinearGroup, found: Found | Refusal, values: ScaleValues
) -> Iterator[Finding]:
    if group.state == "skipped":
        return
    if isinstance(found, Refusal):
        yield Finding.of(found)
    elif group.state in _UNKNOWN:
        has_codes = any(each.has_codes for each in group.members)
        if has_codes or not isinstance(found, Unquantized):
            yield Finding.doubt(group.path, _UNKNOWN[group.state], fix="")
    elif isinstance(found, Unquantized):
        for linear in group.members:
            yield from _list_strays(
                linear, (WEIGHT,), f"is stored, but {found.why}, and the engine has no place for it"
            )
            if linear.has_codes:
                dtype = linear.tensors[WEIGHT].dtype
                kind = "FP8" if dtype.startswith("F8_E") else dtype
                why = f"is {kind}, but {found.why}: the engine uses its codes as the weight"
                yield _misread(linear.module, why, _CONFIG_FIX)
    else:
        yield from _compare_quantized(reader, group, found, values)


def _compare_quantized(
    reader: LinearReader,
    group: LinearGroup,
    scheme: StoredScheme | OtherScheme,
    values: ScaleValues,
) -> Iterator[Finding]:
    if expert := _find_unequal(group, values.numbers):
        why = f"has other input scales for gate and up ({expert})"
        yield Finding.doubt(group.path, why, fix="", if_loaded="one of them is lost")
    # Two projections of an expert have one number: the one loaded last stays, the second's.
    is_expert = group.kind is GroupKind.EXPERTS
    scaled = {each.module for each in group.members if is_expert and INPUT_SCALE in each.tensors}
    twins = _TWINS | {second: first for first, second in _TWINS.items()}
    is_cast = group.is_by_config or any(each.has_codes for each in group.members)
    for linear in group.members:
        expected = reader.list_expected(group, linear, scheme)
        yield from _list_strays(linear, expected, "has no place by the config")
        if linear.is_plain and is_cast:
            why = "is not quantized, but the config quantizes it: it is cast without a scale"
            yield _misread(linear.module, why, _PLAIN_FIX)
        is_created = group.is_by_config or not linear.tensors.keys().isdisjoint(expected)
        if linear.is_plain or not is_created:
            continue
        twin = f"{linear.module.rpartition('.')[0]}.{twins.get(linear.projection)}"
        for suffix, tensor in expected.items():
            has_twin = suffix == INPUT_SCALE and twin in scaled
            yield from _compare_tensor(group, linear, suffix, tensor, values, has_twin=has_twin)


def _misread(subject: str, why: str, fix: str) -> Finding:
    return Finding(status=Status.MISREAD, subject=subject, why=why, fix=fix, is_silent=True)


def _list_strays(linear: StoredLinear, wanted: Collection[str], why: str) -> Iterator[Finding]:
    """List the scales beside a linear that are not expected; KV scales are judged elsewhere."""
    for suffix in linear.tensors:
        name, is_number = f"{linear.module}.{suffix}", "scale" in suffix or "zero_point" in suffix
        if is_number and suffix not in wanted and parse_name(name) is None:
            yield Finding.doubt(name, why, fix=_STRAY_FIX)


def _compare_tensor(
    group: LinearGroup,
    linear: StoredLinear,
    suffix: str,
    expected: Expected,
    values: ScaleValues,
    *,
    has_twin: bool,
) -> Iterator[Finding]:
    """Compare one tensor: whether it is there, its dtype, its shape, and its values."""
    name, entry = f"{linear.module}.{suffix}", linear.tensors.get(suffix)
    is_expert = group.kind is GroupKind.EXPERTS
    if entry is None:
        others = [] if is_expert else _list_good(group, suffix, expected, values)
        is_defaulted = is_expert and suffix not in WEIGHTS
        if others:
            what = f"is missing: the engine uses the largest of those of {', '.join(others)}"
            yield Finding(status=Status.USED, subject=name, why=what)
        elif not has_twin:
            memory = "1.0" if is_defaulted else "uninitialised memory"
            yield Finding(
                status=Status.DEFAULTED if is_defaulted else Status.MISREAD,
                subject=name,
                why=f"is missing: the engine uses {memory}",
                fix=_MISSING_FIX,
                is_silent=True,
            )
    elif entry.dtype not in expected.dtypes:
        what = f"is {entry.dtype}, and the config means {expected.dtypes[0]}"
        cast = "its values are cast to another dtype"
        yield Finding.doubt(name, what, fix=_CONFIG_FIX, if_loaded=cast)
    elif entry.shape not in expected.shapes:
        what = _describe_shape(linear, suffix, entry.shape, expected.shapes)
        yield Finding.doubt(name, what, fix=_CONFIG_FIX, if_loaded=CUT)
    elif (bad := values.bad.get(name)) is not None:
        is_number = bad not in _NO_NUMBERS
        if (has_twin and linear.projection in _TWINS) or (expected.may_be_zero and is_number):
            return
        if is_number and _list_good(group, suffix, expected, values):
            why = f"holds {bad}: the engine uses the largest of those of {group.path}"
            yield Finding(status=Status.USED, subject=name, why=why)
        else:
            why = f"holds {bad}, and the engine computes with it"
            yield Finding(status=Status.MISREAD, subject=name, why=why, fix=_VALUE_FIX)


def _list_good(
    group: LinearGroup, suffix: str, expected: Expected, values: ScaleValues
) -> list[str]:
    """List the linears of a group whose valid scales an engine takes the largest of."""
    return [
        each.projection
        for each in (group.members if expected.is_shared else ())
        if suffix in each.tensors and f"{each.module}.{suffix}" not in values.bad
    ]


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


def _find_unequal(group: LinearGroup, numbers: Mapping[str, float]) -> str:
    """Find an expert whose gate and up have unequal input scales; empty where there is none."""
    for linear in group.members if group.kind is GroupKind.EXPERTS else ():
        expert = linear.module.rpartition(".")[0]
        one = numbers.get(f"{linear.module}.{INPUT_SCALE}")
        other = numbers.get(f"{expert}.{_TWINS.get(linear.projection)}.{INPUT_SCALE}")
        if one is not None and other is not None and abs(one - other) > _TOLERANCE:
            return expert
    return ""
