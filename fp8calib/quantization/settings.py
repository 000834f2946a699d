"""The settings of a quantization: the scheme of each linear, the dialect, what stays in 16 bits."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fp8calib.calibration.origin import calibrate_first
from fp8calib.errors import UsageError, join_or
from fp8calib.formats.fp8.compressed_tensors import COMPRESSED_TENSORS
from fp8calib.formats.fp8.dialect import Fp8Dialect
from fp8calib.formats.fp8.registry import find_written, list_written_fp8
from fp8calib.model.module_paths import name_fused_group, split_expert
from fp8calib.numerics.schemes import Scheme, find_scheme, list_without_calibration
from fp8calib.quantization.ignored import find_pattern, match_patterns, span_layers
from fp8calib.quantization.select import Selection

_OPTION = "--layer-scheme"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """The options of a quantization."""

    scheme: Scheme
    """The scheme of linears that no pattern names."""
    by_pattern: Mapping[str, Scheme] = field(default_factory=dict)
    """The schemes of other linears, by patterns as of `--ignore`; the first match counts."""
    dialect: Fp8Dialect
    ignore: tuple[str, ...] = ()
    drafters: bool = False
    """Quantize drafters too."""
    plain_caches: tuple[int, ...] = ()
    """The layers whose KV cache is served in 16 bits, as a recipe may ask."""

    def scheme_of(self, module: str) -> Scheme:
        """Give the scheme of a linear."""
        pattern = self.pattern_of(module) if self.by_pattern else None
        return self.scheme if pattern is None else self.by_pattern[pattern]

    def pattern_of(self, module: str) -> str | None:
        """Give the pattern that a linear has its scheme from; None for the default."""
        return find_pattern(tuple(self.by_pattern), module, option=_OPTION)

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """List all schemes, the default first."""
        return tuple(dict.fromkeys((self.scheme, *self.by_pattern.values())))

    @property
    def layer_schemes(self) -> dict[str, str]:
        """Name the scheme of each pattern."""
        return {pattern: scheme.name for pattern, scheme in self.by_pattern.items()}


def make_settings(
    scheme: str,
    layer_schemes: Mapping[str, str] | None = None,
    ignore: Sequence[str] | None = None,
    *,
    dialect: str = COMPRESSED_TENSORS.name,
    drafters: bool = False,
    plain_caches: Sequence[int] = (),
    measures_inputs: bool = True,
) -> PlanSettings:
    """Find schemes and dialect by their names.

    The options are those of `PlanSettings`; `measures_inputs` tells whether the scales of static
    inputs are known, or will be.

    Raises:
        UsageError: a name is unknown, the dialect cannot express the schemes, or input scales are
            missing.
    """
    chosen = {
        pattern: find_scheme(name, option=pattern and f"{_OPTION} {pattern}={name}")
        for pattern, name in {"": scheme, **(layer_schemes or {})}.items()
    }
    default = chosen.pop("")
    written = find_written(dialect, default)
    if chosen and not written.has_groups:
        others = (each.name for each in list_written_fp8() if each.has_groups)
        raise UsageError(
            f"{_OPTION}: --format {written.name} has one scheme for all linears",
            hint=f"leave out {_OPTION}, or use --format {join_or(list(others))}",
        )
    settings = PlanSettings(
        scheme=default,
        by_pattern=chosen,
        dialect=written,
        ignore=tuple(ignore or ()),
        drafters=drafters,
        plain_caches=tuple(plain_caches),
    )
    if not measures_inputs and any(each.has_static_inputs for each in settings.schemes):
        option, instead = f"--scheme {scheme}", "use another --layer-scheme"
        if default.has_static_inputs:
            instead = f"use --scheme {join_or(list_without_calibration())}"
        else:
            pattern = next(p for p, each in chosen.items() if each.has_static_inputs)
            option = f"{_OPTION} {pattern}={chosen[pattern].name}"
        raise UsageError(
            f"{option}: its input scales come from calibration",
            hint=f"{calibrate_first('--stats', recipe='w8a8-static')}, or {instead}",
        )
    return settings


def check_layer_schemes(settings: PlanSettings, selection: Selection) -> None:
    """Refuse patterns that give no linear its scheme, or that divide what engines load as one."""
    quantized = [matrix.module for matrix in selection.quantized]
    reasons = {path: item.why for item in selection.unquantized for path in item.linears}
    used = {settings.pattern_of(module) for module in quantized}
    for pattern in settings.by_pattern:
        named = match_patterns([pattern], [*quantized, *reasons], option=_OPTION)
        if pattern not in used:
            module = next((each for each in named if each not in reasons), next(iter(named)))
            why = reasons.get(
                module, f"the earlier pattern {settings.pattern_of(module)} matches it"
            )
            raise UsageError(
                f"{_OPTION} {pattern}: gives no linear its scheme, such as {module}: {why}",
                hint=f"leave out {_OPTION} {pattern}, or write the narrower pattern first: the "
                "first match counts",
            )
    for group, modules in join_linears(quantized).items():
        names = {settings.scheme_of(module).name: module for module in reversed(modules)}
        if len(names) > 1:
            pattern = next(filter(None, map(settings.pattern_of, modules)))
            found = ", ".join(f"{module} {name}" for name, module in names.items())
            parent, _, last = group.rpartition(".")
            whole = span_layers(parent if "+" in last else group)
            raise UsageError(
                f"{_OPTION} {pattern}: engines load {group} as one weight, and it has several "
                f"schemes ({found})",
                hint="give all of it one scheme: use "
                f"{_OPTION} {shlex.quote(f'{whole}={settings.by_pattern[pattern].name}')}",
            )


def join_linears(linears: Iterable[str]) -> dict[str, list[str]]:
    """Group the linears that engines load as one weight: joined projections, experts of a layer.

    So do vLLM 0.32.0 (`compressed_tensors/utils.py`, `compressed_tensors_moe.py`), SGLang 0.5.23.
    """
    members: dict[str, list[str]] = defaultdict(list)
    for module in linears:
        expert = split_expert(module)
        members[name_fused_group(module) if expert is None else expert[0]].append(module)
    return members
