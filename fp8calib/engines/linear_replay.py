"""The rule for linears: a stored tensor beside what an engine's class creates under the config.

Where a checkpoint differs from the form that its config means, the engine may stop, which only its
own loader can tell; what it does if it does not stop is judged here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from fp8calib.engines.engine import Engine
from fp8calib.engines.facts.classes import BY_CONFIG
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
    Expected,
    OtherScheme,
    list_expected,
)
from fp8calib.engines.weights.linears import UNKNOWN, WEIGHT, LinearGroup, StoredLinear
from fp8calib.engines.weights.reader import Found, LinearReader, Unquantized
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
_NO_NUMBERS = ("NaN", "infinity")
_TOLERANCE = 1e-5
_TWINS = {"gate_proj": "up_proj", "w1": "w3"}
"""Projections of an expert, and those that engines load into the same tensor after them."""
_BOTH_WAYS = _TWINS | {second: first for first, second in _TWINS.items()}


def compare_linears(
    engine: Engine,
    stored: OpenedWeights,
    groups: Sequence[LinearGroup],
    named: Sequence[Finding],
    tp: int,
) -> tuple[LinearCount | None, list[Finding]]:
    """Compare what the config and the model's class mean with what is stored, on `tp` ranks.

    A plug-in's engine may have no reader: then only its rules are applied. `groups` are the linears
    that the engine's class creates; `named` findings about their names follow those of the rules.
    `Refusal` is raised where the engine refuses the config, or where that cannot be told.

    Returns:
        How many linears could be judged (None without a reader, and without FP8 weights), and the
        findings.
    """
    reader = engine.make_reader and engine.make_reader(stored.folder, stored.geometry)
    found = list(apply_rules(engine.weight_rules, stored, groups)) if stored.schemes else []
    if reader is None:
        return None, found
    found += named
    replay = _Replay(reader, stored, groups)
    count = None
    if stored.schemes:
        repeats = engine.repeats_expert_scales
        found += list_block_findings(engine.loader, stored, groups, tp, repeats_scales=repeats)
        count = replay.count()
    try:
        reader.require_judged(stored.tensors)
    except Unjudged as refusal:
        return count, [*found, Finding.of(refusal)]
    return count, [*found, *replay.list_findings()]


class _Replay:
    """What an engine creates beside what is stored: its groups, and the scheme of each or why none.

    `has_fp8`: the config quantizes some linear of the folder, as that of a KV overlay does not.
    """

    def __init__(
        self, reader: LinearReader, stored: OpenedWeights, groups: Sequence[LinearGroup]
    ) -> None:
        self._reader, self._stored, self._has_fp8 = reader, stored, bool(stored.schemes)
        self._created: list[tuple[LinearGroup, Found | Refusal]] = []
        for group in groups:
            try:
                self._created.append((group, reader.find_scheme(group)))
            except Refusal as refusal:
                self._created.append((group, refusal))

    def count(self) -> LinearCount:
        """Count the linears of which it is known what the engine creates."""
        known = unknown = 0
        for group, found in self._created:
            is_unknown = isinstance(found, Unjudged) or self._is_unknown(group, found)
            unknown += len(group.members) * is_unknown
            known += len(group.members) * (not is_unknown)
        return LinearCount(judged=known, unknown=unknown)

    def list_findings(self) -> Iterator[Finding]:
        """List what differs from the form and the scheme of the config; alike ones are joined."""
        schemes = self._stored.schemes
        for group, _ in self._created:
            is_fp8 = [each.module in schemes for each in group.members]
            if group.kind == "experts" and any(is_fp8) and any(e.is_plain for e in group.members):
                # vLLM 0.32.0 compressed_tensors_moe/compressed_tensors_moe.py (get_moe_method);
                # SGLang 0.5.23 compressed_tensors/compressed_tensors.py (get_moe_scheme)
                yield Finding(
                    status=Status.MISREAD,
                    why="it joins the experts of a layer, and only a part of them is quantized "
                    f"({group.path}): it stops, or casts the others without a scale",
                    fix="quantize all of them, or none",
                )
                break
        yield from join_alike(each for pair in self._created for each in self._compare(*pair))
        if len(set(schemes.values())) > 1:
            yield from join_alike(each for pair in self._created for each in self._regroup(*pair))

    def _regroup(self, group: LinearGroup, found: Found | Refusal) -> Iterator[Finding]:
        """Say where the engine finds a linear in another config group than the config means."""
        wanted = (self._stored.schemes.get(each.module) for each in group.members)
        other = next((each for each in wanted if each not in (None, found)), None)
        if isinstance(found, StoredScheme) and other is not None:
            own, name = (find_nearest(each).name for each in (other, found))
            why = f"is {own} in the config, but the engine finds no such group for it: {name}"
            yield Finding(status=Status.USED, subject=group.path, why=why, fix=_CONFIG_FIX)

    def _is_unknown(self, group: LinearGroup, found: Found | Refusal) -> bool:
        """Tell if it is unknown how the engine creates a group that may be quantized."""
        if group.state not in UNKNOWN or isinstance(found, Refusal):
            return False
        if not isinstance(found, Unquantized) or any(each.has_codes for each in group.members):
            return True
        # Classes of drafters ask the config by the names that the checkpoint has.
        is_listed = self._has_fp8 and found.is_excluded
        return is_listed and not group.state and not is_drafted(group.path, 0)

    def _compare(self, group: LinearGroup, found: Found | Refusal) -> Iterator[Finding]:
        if group.state == "skipped":
            return
        if isinstance(found, Refusal):
            yield Finding.of(found)
        elif self._is_unknown(group, found):
            yield Finding.doubt(group.path, UNKNOWN[group.state], fix="")
        elif isinstance(found, Unquantized):
            for linear in group.members:
                yield from self._compare_plain(linear, found)
        else:
            yield from self._compare_quantized(group, found)

    def _compare_plain(self, linear: StoredLinear, found: Unquantized) -> Iterator[Finding]:
        """Compare a linear that the engine creates without quantization."""
        if linear.has_codes:
            dtype = linear.tensors[WEIGHT].dtype
            kind = "FP8" if dtype.startswith("F8_E") else dtype
            why = f"is {kind}, but {found.why}: the engine stops, or uses its codes as the weight"
            # whether it stops or not, a scale that the config leaves no place for is lost
            is_certain = found.is_excluded or not self._reader.method
            is_lost = is_certain and any("scale" in each for each in linear.tensors)
            yield replace(_misread(linear.module, why, _CONFIG_FIX), is_silent=not is_lost)
            if is_lost:
                return
        why = f"is stored, but {found.why}, and the engine has no place for it"
        yield from _list_strays(linear, (WEIGHT,), why)

    def _compare_quantized(
        self, group: LinearGroup, scheme: StoredScheme | OtherScheme
    ) -> Iterator[Finding]:
        has_experts = group.kind == "experts"
        if has_experts and (expert := _find_unequal(group, self._stored.values.numbers)):
            why = f"has other input scales for gate and up ({expert})"
            yield Finding.doubt(group.path, why, fix="", if_loaded="one of them is lost")
        scaled = {each.module for each in group.members if INPUT_SCALE in each.tensors}
        is_cast = group.state in BY_CONFIG or any(each.has_codes for each in group.members)
        for linear in group.members:
            dialect, renamed = self._reader.dialect, self._reader.renamed
            expected = list_expected(group, linear, scheme, dialect, renamed)
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
                has_twin = has_experts and suffix == INPUT_SCALE and twin in scaled
                yield from self._compare_tensor(group, linear, suffix, tensor, has_twin=has_twin)

    def _compare_tensor(
        self,
        group: LinearGroup,
        linear: StoredLinear,
        suffix: str,
        expected: Expected,
        *,
        has_twin: bool,
    ) -> Iterator[Finding]:
        """Compare one tensor: whether it is there, its dtype, its shape, and its values."""
        name, entry = f"{linear.module}.{suffix}", linear.tensors.get(suffix)
        bad = self._stored.values.bad
        # The engine uses the largest of the valid scales of these linears.
        valid = [
            each.projection
            for each in (group.members if expected.is_shared else ())
            if suffix in each.tensors and f"{each.module}.{suffix}" not in bad
        ]
        if entry is None:
            if valid and group.kind != "experts":
                what = f"is missing: the engine uses the largest of those of {', '.join(valid)}"
                yield Finding(status=Status.USED, subject=name, why=what)
            elif group.kind == "experts" and suffix not in WEIGHTS and not has_twin:
                missing = _misread(name, "is missing: the engine uses 1.0", _MISSING_FIX)
                yield replace(missing, status=Status.DEFAULTED)
            elif not has_twin:
                yield _misread(name, f"is missing: the engine uses {_UNSET}", _MISSING_FIX)
        elif entry.dtype not in expected.dtypes:
            what = f"is {entry.dtype}, and the config means {expected.dtypes[0]}"
            cast = "its values are cast to another dtype"
            yield Finding.doubt(name, what, fix=_CONFIG_FIX, if_loaded=cast)
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
