"""Compare what an engine creates for every linear with what a checkpoint stores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from fp8calib.dialects.fp8.quantization_config import StoredScheme
from fp8calib.dialects.fp8.weights import list_scale_shapes
from fp8calib.dialects.kv.parse_names import parse_name
from fp8calib.engines.replay.verdicts import Refusal
from fp8calib.engines.weights.faults import WeightFault
from fp8calib.engines.weights.linear_loader import (
    Foreign,
    GroupKind,
    LinearGroup,
    LinearLoader,
    StoredLinear,
    Unquantized,
)
from fp8calib.engines.weights.parameters import (
    INPUT_SCALE,
    PLAIN_DTYPES,
    WEIGHT,
    Fit,
    Parameter,
    Shape,
    Unfilled,
)
from fp8calib.engines.weights.stored import ScaleValues, is_fp8
from fp8calib.engines.weights.weight_rule import Effect, Outcome
from fp8calib.errors import shorten
from fp8calib.fp8.schemes import BLOCK, Granularity, InputScaling, find_nearest

_CONFIG_FIX = "use the config that the weights were quantized with"
_STRAY_FIX = f"remove these tensors, or {_CONFIG_FIX}"
_MISSING_FIX = "complete the download or the export"
_PLAIN_FIX = "exclude it in the config, or quantize it"
_SIZE_FIX = "quantize with one scale per tensor or per channel, or serve it with another engine"
_DTYPE_FIX = "store weights as float8_e4m3fn, and scales as floating-point numbers"
_PLAIN_DTYPE_FIX = "store it in the model's dtype"
_EQUAL_FIX = "quantize with shared input scales, as fp8calib does"
_VALUE_FIX = "quantize the model again: a scale is a finite number above zero"


_ANY_SCHEME = StoredScheme(weights=Granularity.TENSOR, inputs=InputScaling.NONE)
"""The shape of a weight does not depend on how it is quantized."""
_TWINS = {"gate_proj": "up_proj", "w1": "w3"}
"""Projections of an expert, and those that engines load into the same tensor after them."""
_EFFECTS = {
    Unfilled.ONE: Effect.DEFAULTED,
    Unfilled.NONE: Effect.REFUSED,
    Unfilled.REFUSED: Effect.REFUSED,
    Unfilled.JOINED: Effect.REFUSED,
    Unfilled.ABSENT: Effect.REFUSED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finding:
    """Something that an engine does not load as it is."""

    subject: str
    """The tensor or the linear."""
    outcome: Outcome
    fix: str


def list_loading_faults(
    loader: LinearLoader, groups: Iterable[LinearGroup], values: ScaleValues
) -> list[WeightFault]:
    """List what an engine does to linears that differ from what it creates.

    Findings of the same kind become one fault, which names the first and says how many there are.

    Args:
        loader: the engine's.
        groups: the linears of the checkpoint.
        values: what the scales hold.

    Raises:
        ModelError: the config cannot be read.
    """
    kinds: dict[tuple[Effect, str], list[_Finding]] = {}
    for group in groups:
        for part in (group,) if loader.joins(group) else _split(group):
            for finding in _judge_group(loader, part, values):
                key = (finding.outcome.effect, finding.fix)
                kinds.setdefault(key, []).append(finding)
    return [_join(loader.engine, findings) for findings in kinds.values()]


def list_other_schemes(
    loader: LinearLoader, groups: Iterable[LinearGroup], schemes: Mapping[str, StoredScheme]
) -> list[WeightFault]:
    """List linears that an engine gives another scheme than their paths have in the config.

    Args:
        loader: the engine's.
        groups: the linears of the checkpoint.
        schemes: that the config gives to paths of linears, where it gives several.
    """
    findings: list[_Finding] = []
    for group in groups:
        for part in (group,) if loader.joins(group) else _split(group):
            findings += _compare_scheme(loader, part, schemes)
    return [_join(loader.engine, findings)] if findings else []


def _compare_scheme(
    loader: LinearLoader, group: LinearGroup, schemes: Mapping[str, StoredScheme]
) -> Iterator[_Finding]:
    if loader.engine == "transformers" and group.kind is GroupKind.EXPERTS:
        return  # it dequantizes them while it loads them
    try:
        created = loader.find_scheme(group)
    except Refusal:  # a fault already
        return
    wanted = (schemes.get(each.module) for each in group.members)
    other = next((each for each in wanted if each not in (None, created)), None)
    if isinstance(created, StoredScheme) and other is not None:
        own, found = (find_nearest(each.weights, each.inputs).name for each in (other, created))
        what = f"is {own} in the config, but {loader.title} finds no such group for it: {found}"
        outcome = Outcome(effect=Effect.CONDITION, what=what, source=loader.unfilled_source)
        yield _Finding(subject=group.path, outcome=outcome, fix=_CONFIG_FIX)


def find_weight_fit(
    loader: LinearLoader, groups: Iterable[LinearGroup], name: str, shape: Shape
) -> Fit | None:
    """Find what becomes of a linear's weight of some shape; None for what is in no group."""
    module = name.removesuffix(f".{WEIGHT}")
    for group in groups:
        for part in (group,) if loader.joins(group) else _split(group):
            linear = next((each for each in part.members if each.module == module), None)
            if linear is not None and part.kind is GroupKind.LINEAR:
                created = loader.list_parameters(part, linear, _ANY_SCHEME)
                return created[WEIGHT].fit(shape)
    return None


def _split(group: LinearGroup) -> Iterator[LinearGroup]:
    for linear in group.members:
        yield replace(group, path=linear.module, members=(linear,))


def _join(engine: str, findings: list[_Finding]) -> WeightFault:
    first = findings[0]
    why = f"{shorten(first.subject)} {first.outcome.what}".strip()
    others = list(dict.fromkeys(each.subject or each.outcome.what for each in findings[1:]))
    if others:
        why += f"; {len(others)} more likewise, such as {shorten(others[0])}"
    return WeightFault(
        engine=engine,
        effect=first.outcome.effect,
        why=why,
        source=first.outcome.source,
        fix=first.fix,
    )


def _judge_group(
    loader: LinearLoader, group: LinearGroup, values: ScaleValues
) -> Iterator[_Finding]:
    if group.is_tied and not loader.quantizes_tied:
        return
    try:
        scheme = loader.find_scheme(group)
    except Refusal as refusal:
        outcome = Outcome(effect=Effect.REFUSED, what=refusal.why, source=loader.unfilled_source)
        yield _Finding(subject="", outcome=outcome, fix=refusal.fix)
        return
    if isinstance(scheme, Foreign):
        outcome = Outcome(
            effect=scheme.effect, what=f"is FP8, but {scheme.why}", source=loader.unfilled_source
        )
        coded = (linear for linear in group.members if is_fp8(linear.tensors.get(WEIGHT)))
        for linear in coded:
            yield _Finding(subject=linear.module, outcome=outcome, fix=_CONFIG_FIX)
    elif isinstance(scheme, Unquantized):
        for linear in group.members:
            yield from _judge_unquantized(loader, group, linear, scheme.why)
    elif scheme is not None:
        yield from _judge_quantized(loader, group, scheme, values)


def _judge_unquantized(
    loader: LinearLoader, group: LinearGroup, linear: StoredLinear, why: str
) -> Iterator[_Finding]:
    weight = linear.tensors.get(WEIGHT)
    has_codes = weight is not None and weight.dtype not in PLAIN_DTYPES
    strays = list(_judge_strays(loader, group, linear, (WEIGHT,)))
    for stray in strays:
        if has_codes and stray.outcome.effect is Effect.REFUSED:
            what = f"is FP8, but {why}; its {stray.subject.rpartition('.')[2]} {stray.outcome.what}"
            outcome = replace(stray.outcome, what=what)
            yield _Finding(subject=linear.module, outcome=outcome, fix=_CONFIG_FIX)
            return
        yield stray
    if weight is not None and has_codes and (codes := loader.judge_codes(why)) is not None:
        if not is_fp8(weight):
            codes = replace(codes, what=codes.what.replace("is FP8", f"is {weight.dtype}", 1))
        yield _Finding(subject=linear.module, outcome=codes, fix=_CONFIG_FIX)


def _judge_strays(
    loader: LinearLoader, group: LinearGroup, linear: StoredLinear, wanted: Iterable[str]
) -> Iterator[_Finding]:
    """Judge the scales beside a linear that have no parameter; KV scales are judged elsewhere."""
    for suffix in linear.tensors:
        is_judged = suffix in wanted or parse_name(linear.name(suffix)) is not None
        if is_judged or not _describes_numbers(suffix):
            continue
        if (outcome := loader.judge_stray(group, suffix)) is not None:
            yield _Finding(subject=linear.name(suffix), outcome=outcome, fix=_STRAY_FIX)


def _describes_numbers(suffix: str) -> bool:
    """Tell from the last part of a name whether it is that of a scale or a zero point."""
    return "scale" in suffix or "zero_point" in suffix


def _judge_quantized(
    loader: LinearLoader,
    group: LinearGroup,
    scheme: StoredScheme,
    values: ScaleValues,
) -> Iterator[_Finding]:
    if (unequal := loader.judge_values(group, scheme, values.numbers)) is not None:
        yield _Finding(subject=group.path, outcome=unequal, fix=_EQUAL_FIX)
    has_codes = any(is_fp8(each.tensors.get(WEIGHT)) for each in group.members)
    for linear in group.members:
        parameters = loader.list_parameters(group, linear, scheme)
        yield from _judge_strays(loader, group, linear, parameters)
        if (weight := linear.tensors.get(WEIGHT)) is not None and weight.dtype in PLAIN_DTYPES:
            yield from _judge_plain_dtype(loader, group, linear, weight.dtype)
            plain = loader.judge_plain(group) if has_codes or loader.creates(group) else None
            if plain is not None:
                yield _Finding(subject=linear.module, outcome=plain, fix=_PLAIN_FIX)
            continue
        if WEIGHT not in linear.tensors and not loader.creates(group):
            continue
        if (sizes := loader.judge_sizes(linear, scheme)) is not None:
            yield _Finding(subject=linear.module, outcome=sizes, fix=_SIZE_FIX)
        for suffix, parameter in parameters.items():
            yield from _judge_parameter(loader, group, linear, suffix, parameter, values)


def _judge_plain_dtype(
    loader: LinearLoader, group: LinearGroup, linear: StoredLinear, dtype: str
) -> Iterator[_Finding]:
    if group.is_known or group.kind is GroupKind.HEAD:
        outcome = loader.judge_plain_dtype(dtype)
        if outcome is not None:
            yield _Finding(subject=linear.name(WEIGHT), outcome=outcome, fix=_PLAIN_DTYPE_FIX)


def _judge_parameter(
    loader: LinearLoader,
    group: LinearGroup,
    linear: StoredLinear,
    suffix: str,
    parameter: Parameter,
    values: ScaleValues,
) -> Iterator[_Finding]:
    """Judge one parameter: whether there is a tensor for it, of which shape, with which values."""
    name = linear.name(suffix)
    twin = _find_twin(group, linear) if suffix == INPUT_SCALE else None
    if suffix not in linear.tensors:
        if twin is not None:
            return
        outcome = _judge_missing(loader, group, suffix, parameter, values)
        yield _Finding(subject=name, outcome=outcome, fix=_MISSING_FIX)
        return
    entry = linear.tensors[suffix]
    if (dtype := loader.judge_dtype(group, suffix, entry.dtype)) is not None:
        yield _Finding(subject=name, outcome=dtype, fix=_DTYPE_FIX)
        return
    shape = entry.shape
    if (fit := parameter.fit(shape)) is not Fit.WHOLE:
        what = _describe_misfit(linear, suffix, shape, parameter.shape)
        outcome = _judge_misfit(loader, what, parameter, fit)
        yield _Finding(subject=name, outcome=outcome, fix=_CONFIG_FIX)
    elif (bad := values.bad.get(name)) is not None and (
        twin is None or linear.projection not in _TWINS
    ):
        outcome = _judge_value(loader, group, suffix, parameter, bad, values)
        yield _Finding(subject=name, outcome=outcome, fix=_VALUE_FIX)


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


def _judge_missing(
    loader: LinearLoader,
    group: LinearGroup,
    suffix: str,
    parameter: Parameter,
    values: ScaleValues,
) -> Outcome:
    others = _list_good(group, suffix, values) if parameter.is_shared else []
    if others and parameter.unfilled is Unfilled.LOWEST:
        what = f"is missing: the engine uses the largest of those of {', '.join(others)}"
        return _outcome(Effect.CONDITION, what, loader.unfilled_source)
    effect = _EFFECTS.get(parameter.unfilled, Effect.MISREAD)
    beside = "" if suffix == WEIGHT else " beside the FP8 weight"
    what = f"is missing{beside}: {parameter.unfilled}"
    return _outcome(effect, what, loader.unfilled_source)


def _describe_misfit(
    linear: StoredLinear, suffix: str, shape: tuple[int, ...], wanted: tuple[int, ...]
) -> str:
    """Say which shape a tensor has, in words where it is that of another kind of scale."""
    kinds = list_scale_shapes(linear.shape, BLOCK) if suffix != WEIGHT else {}
    found, meant = (
        next((kind for kind, shapes in kinds.items() if each in shapes), None)
        for each in (shape, wanted)
    )
    if found is None or meant is None or found is meant:
        return f"has shape {list(shape)}, and the config means {list(wanted)}"
    return f"has shape {list(shape)}, which is per {found}, and the config says per {meant}"


def _judge_misfit(loader: LinearLoader, what: str, parameter: Parameter, fit: Fit) -> Outcome:
    if fit is Fit.REFUSED:
        return _outcome(Effect.REFUSED, f"{what} (AssertionError)", loader.shape_source)
    if fit is Fit.CUT:
        return _outcome(Effect.MISREAD, f"{what}: the rest is dropped", loader.shape_source)
    if fit is Fit.PADDED:
        return _outcome(Effect.MISREAD, f"{what}: the rest becomes zero", loader.shape_source)
    what = f"{what}: for the rest {parameter.unfilled}"
    return _outcome(Effect.MISREAD, what, loader.shape_source)


def _judge_value(
    loader: LinearLoader,
    group: LinearGroup,
    suffix: str,
    parameter: Parameter,
    bad: str,
    values: ScaleValues,
) -> Outcome:
    """Judge a scale that is no scale: the largest of several hides what is not above zero."""
    is_hidden = parameter.is_shared and bad not in ("NaN", "infinity")
    if is_hidden and _list_good(group, suffix, values):
        what = f"holds {bad}: the engine uses the largest of those of {group.path}"
        return _outcome(Effect.CONDITION, what, loader.unfilled_source)
    return _outcome(
        Effect.MISREAD, f"holds {bad}, and the engine computes with it", loader.shape_source
    )


def _list_good(group: LinearGroup, suffix: str, values: ScaleValues) -> list[str]:
    """List the linears of a group that store a valid scale of a kind."""
    return [
        each.projection
        for each in group.members
        if suffix in each.tensors and each.name(suffix) not in values.bad
    ]


def _outcome(effect: Effect, what: str, source: str) -> Outcome:
    return Outcome(effect=effect, what=what, source=source)
