"""The rule for linears: a stored tensor beside what an engine's class creates under the config.

Where a checkpoint differs from the form that its config means, the engine may stop, which only its
own loader can tell; what it does if it does not stop is judged here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from fp8calib.engines.engine import Engine
from fp8calib.engines.facts.classes import BY_CONFIG, ClassMap
from fp8calib.engines.replay.verdicts import (
    CUT,
    Finding,
    LinearCount,
    Refusal,
    Unjudged,
    join_alike,
)
from fp8calib.engines.status import Status
from fp8calib.engines.weights.blocks import apply_rules, list_block_findings
from fp8calib.engines.weights.forms import (
    INPUT_SCALE,
    WEIGHTS,
    CompressedGroup,
    Expected,
    list_expected,
)
from fp8calib.engines.weights.layers import WEIGHT, find_decoder, find_layer_index
from fp8calib.engines.weights.linears import UNKNOWN, LinearGroup, StoredLinear, list_groups
from fp8calib.engines.weights.reader import Found, LinearReader, Unquantized
from fp8calib.engines.weights.rules import read_weight_rules
from fp8calib.engines.weights.stored import OpenedWeights
from fp8calib.formats.fp8.quantization_config import StoredScheme
from fp8calib.formats.kv.parse_names import parse_name
from fp8calib.model.drafters import is_drafted
from fp8calib.numerics.schemes import find_nearest

_CONFIG_FIX = "use the config that the weights were quantized with"
_SHAPE_FIX = f"{_CONFIG_FIX}, whose strategy (tensor, channel, block) fits the shape of its scales"
_STRAY_FIX = f"remove these tensors, or {_CONFIG_FIX}"
_MISSING_FIX = "complete the download or the export"
_PLAIN_FIX = "exclude it in the config, or quantize it"
_VALUE_FIX = "quantize the model again: a scale is a finite number above zero"
_UNSET = "uninitialised memory"
_OF_OTHERS = "is missing: the engine uses that of the linears it joins this one with"
_NO_NUMBERS = ("NaN", "infinity")
_TOLERANCE = 1e-5
_TWINS = {"gate_proj": "up_proj", "w1": "w3"}
"""Projections of an expert, and those that engines load into the same tensor after them."""
_BOTH_WAYS = _TWINS | {second: first for first, second in _TWINS.items()}


def compare_linears(
    engine: Engine,
    stored: OpenedWeights,
    classes: ClassMap,
    named: Sequence[Finding],
    tp: int,
) -> tuple[LinearCount | None, list[Finding]]:
    """Compare what the config and the model's class mean with what is stored, on `tp` ranks.

    A plug-in's engine may have no reader: then only its rules are applied. `classes` is what the
    engine's class creates; `named` findings about names follow those of the rules. `Refusal` is
    raised where the engine refuses the config, or where that cannot be told.

    Returns:
        How many linears could be judged (None without a reader, and without FP8 weights), and the
        findings; alike ones are joined.
    """
    groups = list(list_groups(stored.tensors, stored.geometry, classes))
    # Newer releases of transformers write other names for some vision towers.
    decoder = find_decoder(stored.geometry)
    misplaced = (
        Finding.doubt(group.path, UNKNOWN["refused"], fix="")
        for group in groups
        if (group.state == "refused" and group.kind != "head")
        and find_layer_index(decoder, group.path) < 0
        and all(each.is_plain for each in group.members)
    )
    named = [*named, *join_alike(misplaced)]
    if stored.is_plain:
        return None, named
    schemes = stored.schemes
    reader = engine.make_reader and engine.make_reader(stored.folder, stored.geometry)
    rules = [*engine.weight_rules, *read_weight_rules(engine.facts)]
    findings = list(apply_rules(rules, stored, groups)) if schemes else []
    if reader is None:
        return None, findings
    findings += named
    created: list[tuple[LinearGroup, Found | Refusal]] = []
    unknown = 0
    for group in groups:
        try:
            created.append((group, reader.find_scheme(group)))
        except Refusal as refusal:
            created.append((group, refusal))
        _, found = created[-1]
        is_unjudged = isinstance(found, Unjudged)
        unknown += len(group.members) * (is_unjudged or _is_unknown(group, found, stored))
    count = None
    if schemes:
        findings += list_block_findings(reader.release, stored, groups, tp)
        total = sum(len(group.members) for group in groups)
        count = LinearCount(judged=total - unknown, unknown=unknown)
    try:
        reader.require_judged(stored.tensors)
    except Unjudged as refusal:
        return count, [*findings, Finding.of(refusal)]
    findings += islice(filter(None, (_find_unquantized(group, stored) for group in groups)), 1)
    findings += join_alike(each for pair in created for each in _compare(reader, stored, *pair))
    if len(set(schemes.values())) > 1:
        other = (_find_other_scheme(group, found, stored) for group, found in created)
        findings += join_alike(filter(None, other))
    return count, findings


def _is_unknown(group: LinearGroup, found: Found | Refusal, stored: OpenedWeights) -> bool:
    """Tell if it is unknown how the engine creates a group that may be quantized."""
    if group.state not in UNKNOWN or isinstance(found, Refusal):
        return False
    if not isinstance(found, Unquantized) or any(each.has_codes for each in group.members):
        return True
    # Classes of drafters ask the config by the names that the checkpoint has. The config of a KV
    # overlay lists linears, but quantizes none.
    is_listed = bool(stored.schemes) and found.is_excluded
    return is_listed and not group.state and not is_drafted(group.path, 0)


def _find_unquantized(group: LinearGroup, stored: OpenedWeights) -> Finding | None:
    """Say that only a part of a layer's experts is quantized.

    vLLM 0.32.0 compressed_tensors_moe/compressed_tensors_moe.py (get_moe_method); SGLang 0.5.23
    compressed_tensors/compressed_tensors.py (get_moe_scheme).
    """
    is_fp8 = any(each.module in stored.schemes for each in group.members)
    if group.kind != "experts" or not is_fp8 or not any(each.is_plain for each in group.members):
        return None
    why = f"it joins the experts of a layer, and only a part of them is quantized ({group.path})"
    why = f"{why}: it stops, or casts the others without a scale"
    return Finding(status=Status.MISREAD, why=why, fix="quantize all of them, or none")


def _find_other_scheme(
    group: LinearGroup, found: Found | Refusal, stored: OpenedWeights
) -> Finding | None:
    """Say where the engine finds a linear in another config group than the config means."""
    wanted = (stored.schemes.get(each.module) for each in group.members)
    other = next((each for each in wanted if each not in (None, found)), None)
    if other is None or not isinstance(found, StoredScheme):
        return None
    own, name = (find_nearest(each).name for each in (other, found))
    why = f"is {own} in the config, but the engine finds no such group for it: {name}"
    return Finding(status=Status.USED, subject=group.path, why=why, fix=_CONFIG_FIX)


def _compare(
    reader: LinearReader, stored: OpenedWeights, group: LinearGroup, found: Found | Refusal
) -> Iterator[Finding]:
    """Compare the tensors of a group with how the engine creates it."""
    if group.state == "skipped":
        return
    if isinstance(found, Refusal):
        yield Finding.of(found)
    elif _is_unknown(group, found, stored):
        yield Finding.doubt(group.path, UNKNOWN[group.state], fix="")
    elif not isinstance(found, Unquantized):
        yield from _compare_quantized(reader, stored, group, found)
    else:
        # whether it stops or not, a scale that the config leaves no place for is lost
        is_certain = found.is_excluded or not reader.method
        for linear in group.members:
            is_lost = is_certain and any("scale" in each for each in linear.tensors)
            if linear.has_codes:
                dtype = linear.tensors[WEIGHT].dtype
                kind = "FP8" if dtype.startswith("F8_E") else dtype
                why = (
                    f"is {kind}, but {found.why}: the engine stops, or uses its codes as the weight"
                )
                yield replace(_misread(linear.module, why, _CONFIG_FIX), is_silent=not is_lost)
            if not (linear.has_codes and is_lost):
                why = f"is stored, but {found.why}, and the engine has no place for it"
                yield from _list_strays(linear, (WEIGHT,), why)


def _compare_quantized(
    reader: LinearReader,
    stored: OpenedWeights,
    group: LinearGroup,
    scheme: StoredScheme | CompressedGroup,
) -> Iterator[Finding]:
    has_experts = group.kind == "experts"
    bad, numbers, _ = stored.values
    if has_experts and (expert := _find_unequal(group, numbers)):
        why = f"has other input scales for gate and up ({expert})"
        yield Finding.doubt(group.path, why, fix="", if_loaded="one of them is lost")
    scaled = {each.module for each in group.members if INPUT_SCALE in each.tensors}
    requantizes = reader.requantizes_fp8 or not reader.is_fp8
    is_cast = group.state in BY_CONFIG or any(each.has_codes for each in group.members)
    for linear in group.members:
        expected = list_expected(group, linear, scheme, reader.dialect, reader.renamed)
        yield from _list_strays(linear, expected, "has no place by the config")
        if linear.is_plain and is_cast:
            why = "is not quantized, but the config quantizes it: it is cast without a scale"
            yield _misread(linear.module, why, _PLAIN_FIX)
        is_created = group.state in BY_CONFIG or not linear.tensors.keys().isdisjoint(expected)
        if linear.is_plain or not is_created:
            continue
        # Two projections of an expert have one number: the one loaded last stays, the second's.
        twin = f"{linear.module.rpartition('.')[0]}.{_BOTH_WAYS.get(linear.projection)}"
        for suffix, tensor in expected.items():
            is_joined = requantizes and tensor.is_requantized
            if is_joined and suffix not in linear.tensors and _takes_others(group, suffix, numbers):
                yield Finding.doubt(f"{linear.module}.{suffix}", _OF_OTHERS, fix=_MISSING_FIX)
                continue
            has_twin = has_experts and suffix == INPUT_SCALE and twin in scaled
            yield from _judge_tensor(group, linear, suffix, tensor, bad, has_twin)


def _takes_others(group: LinearGroup, suffix: str, numbers: Mapping[str, float]) -> bool:
    """Tell if a linear without a scale has that of the linears that it is joined with.

    The engine takes a weight without its last scale for one that was joined before it was
    quantized, and uses the largest scale for all of it: vLLM 0.32.0
    quantization/utils/w8a8_utils.py (requantize_with_max_scale, run); SGLang 0.5.23
    quantization/utils.py, but for its method `fp8` (convert_to_channelwise; read).
    """
    names = [f"{each.module}.{suffix}" for each in group.members if suffix in each.tensors]
    has_last = suffix in group.members[-1].tensors
    return not has_last and len({numbers.get(name) for name in names}) == 1


def _judge_tensor(
    group: LinearGroup,
    linear: StoredLinear,
    suffix: str,
    expected: Expected,
    bad: Mapping[str, str],
    has_twin: bool,
) -> Iterator[Finding]:
    """Judge a tensor by whether it is there, its dtype, its shape, and its values.

    `bad` says what scales hold that are no scales; `has_twin`: another projection of the expert
    fills the same number.
    """
    name, entry = f"{linear.module}.{suffix}", linear.tensors.get(suffix)
    has_experts = group.kind == "experts"
    # The engine uses the largest of the valid scales of these linears.
    valid = [
        each.projection
        for each in (group.members if expected.is_shared else ())
        if suffix in each.tensors and f"{each.module}.{suffix}" not in bad
    ]
    if entry is None:
        if valid and not has_experts:
            why = f"is missing: the engine uses the largest of those of {', '.join(valid)}"
            yield Finding(status=Status.USED, subject=name, why=why)
        elif has_experts and suffix not in WEIGHTS and not has_twin:
            missing = _misread(name, "is missing: the engine uses 1.0", _MISSING_FIX)
            yield replace(missing, status=Status.DEFAULTED)
        elif not has_twin:
            yield _misread(name, f"is missing: the engine uses {_UNSET}", _MISSING_FIX)
    elif entry.dtype not in expected.dtypes:
        why = f"is {entry.dtype}, and the config means {expected.dtypes[0]}"
        cast = "its values are cast to another dtype"
        yield Finding.doubt(name, why, fix=_CONFIG_FIX, if_loaded=cast)
    elif entry.shape not in expected.shapes:
        shapes = f"{list(entry.shape)}, and the config means {list(expected.shapes[-1])}"
        fix = _CONFIG_FIX if suffix in WEIGHTS else _SHAPE_FIX
        yield Finding.doubt(name, f"has shape {shapes}", fix=fix, if_loaded=CUT)
    elif name in bad:
        is_number = bad[name] not in _NO_NUMBERS
        if (has_twin and linear.projection in _TWINS) or (expected.may_be_zero and is_number):
            return
        if is_number and valid:
            why = f"holds {bad[name]}: the engine uses the largest of those of {group.path}"
            yield Finding(status=Status.USED, subject=name, why=why)
        else:
            why = f"holds {bad[name]}, and the engine computes with it"
            yield Finding(status=Status.BAD, subject=name, why=why, fix=_VALUE_FIX)


def _misread(subject: str, why: str, fix: str) -> Finding:
    return Finding(status=Status.MISREAD, subject=subject, why=why, fix=fix, is_silent=True)


def _list_strays(linear: StoredLinear, wanted: Collection[str], why: str) -> Iterator[Finding]:
    """List the scales beside a linear that are not expected; KV scales are judged elsewhere."""
    for suffix in linear.tensors:
        name, is_number = f"{linear.module}.{suffix}", "scale" in suffix or "zero_point" in suffix
        if is_number and suffix not in wanted and parse_name(name) is None:
            yield Finding.doubt(name, why, fix=_STRAY_FIX)


def _find_unequal(group: LinearGroup, numbers: Mapping[str, float]) -> str:
    """Find an expert whose gate and up have unequal input scales; empty if there is none."""
    for linear in group.members:
        expert = linear.module.rpartition(".")[0]
        one = numbers.get(f"{linear.module}.{INPUT_SCALE}")
        other = numbers.get(f"{expert}.{_TWINS.get(linear.projection)}.{INPUT_SCALE}")
        if one is not None and other is not None and abs(one - other) > _TOLERANCE:
            return expert
    return ""
