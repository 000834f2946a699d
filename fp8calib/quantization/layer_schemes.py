"""The scheme of each linear: that of the first pattern that matches it, else the default."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from fp8calib.errors import UsageError
from fp8calib.model.module_paths import name_fused_group, split_expert
from fp8calib.numerics.schemes import Scheme, name_mixed
from fp8calib.quantization.ignored import match_patterns, matches_module, span_layers
from fp8calib.quantization.select import Selection

OPTION = "--layer-scheme"


@dataclass(frozen=True, slots=True)
class LayerSchemes:
    """The schemes of the linears of a checkpoint."""

    default: Scheme
    by_pattern: tuple[tuple[str, Scheme], ...] = ()
    """Patterns as of `--ignore`, each with the scheme of its linears; the first match counts."""

    def of(self, module: str) -> Scheme:
        """Give the scheme of a linear."""
        pattern = self.pattern_of(module)
        return self.default if pattern is None else dict(self.by_pattern)[pattern]

    def pattern_of(self, module: str) -> str | None:
        """Give the pattern that a linear has its scheme from; None for the default."""
        patterns = tuple(pattern for pattern, _ in self.by_pattern)
        return _find_first(patterns, module) if patterns else None

    @property
    def all(self) -> tuple[Scheme, ...]:
        """List all schemes, the default first."""
        return tuple(dict.fromkeys((self.default, *(scheme for _, scheme in self.by_pattern))))

    @property
    def has_static_inputs(self) -> bool:
        """Tell whether some scales of inputs come from calibration."""
        return any(scheme.has_static_inputs for scheme in self.all)

    @property
    def has_power_of_two_scales(self) -> bool:
        """Tell whether some scales of weights are rounded up to powers of two."""
        return any(scheme.has_power_of_two_scales for scheme in self.all)

    @property
    def names(self) -> dict[str, str]:
        """Name the scheme of each pattern."""
        return {pattern: scheme.name for pattern, scheme in self.by_pattern}

    @property
    def name(self) -> str:
        """Name them together."""
        return name_mixed(self.default.name, is_mixed=bool(self.by_pattern))


@lru_cache(maxsize=1 << 17)
def _find_first(patterns: tuple[str, ...], module: str) -> str | None:
    """Find the first pattern that matches a linear, or a module around it."""
    return next((each for each in patterns if matches_module(each, module, option=OPTION)), None)


def check_layer_schemes(schemes: LayerSchemes, selection: Selection) -> None:
    """Refuse patterns that give no linear its scheme, or that divide what engines load as one."""
    if not schemes.by_pattern:
        return
    quantized = [matrix.module for matrix in selection.quantized]
    reasons = {path: item.why for item in selection.unquantized for path in item.linears}
    used = {schemes.pattern_of(module) for module in quantized}
    for pattern in schemes.names:
        named = match_patterns([pattern], [*quantized, *reasons], option=OPTION)
        if pattern not in used:
            module = next((each for each in named if each not in reasons), next(iter(named)))
            why = reasons.get(
                module, f"the earlier pattern {schemes.pattern_of(module)} matches it"
            )
            raise UsageError(
                f"{OPTION} {pattern}: gives no linear its scheme, such as {module}: {why}",
                hint="leave it out, or write the narrower pattern first: the first match counts",
            )
    for group, modules in join_linears(quantized).items():
        names = {schemes.of(module).name: module for module in reversed(modules)}
        if len(names) > 1:
            pattern = next(filter(None, map(schemes.pattern_of, modules)))
            found = ", ".join(f"{module} {name}" for name, module in names.items())
            parent, _, last = group.rpartition(".")
            whole = span_layers(parent if "+" in last else group)
            raise UsageError(
                f"{OPTION} {pattern}: engines load {group} as one weight, and it has several "
                f"schemes ({found})",
                hint="give all of it one scheme: "
                f"{OPTION} {shlex.quote(f'{whole}={schemes.names[pattern]}')}",
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
