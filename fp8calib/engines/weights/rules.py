"""What the rules of an engine's record say about the FP8 weights of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fp8calib.engines.weights.finding import Finding
from fp8calib.engines.weights.linears import GroupKind, LinearGroup
from fp8calib.engines.weights.weight_rule import WeightRule
from fp8calib.errors import shorten
from fp8calib.formats.fp8.quantization_config import StoredScheme
from fp8calib.numerics.schemes import Granularity, find_nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeights:
    """The linears of a checkpoint, as an engine joins them, and the schemes of those in FP8."""

    dialect: str
    """The name of its FP8 dialect."""
    config: Mapping[str, object]
    """The model's config.json."""
    groups: Sequence[LinearGroup]
    schemes: Mapping[str, StoredScheme]
    """By the config, of linears that are stored in FP8, by path."""
    is_mixed: bool = False
    """Whether it is ModelOpt's MIXED_PRECISION, for which engines have a separate method."""


def apply_rules(rules: Iterable[WeightRule], weights: QuantizedWeights) -> Iterator[Finding]:
    """List what the rules of an engine's record say about FP8 weights."""
    model_type = weights.config.get("model_type")
    experts = {
        each.module
        for group in weights.groups
        for each in group.members
        if group.kind is GroupKind.EXPERTS
    }
    names = {each: find_nearest(each).name for each in set(weights.schemes.values())}
    for rule in rules:
        if (
            rule.dialect not in ("", weights.dialect)
            or (rule.model_types and model_type not in rule.model_types)
            or model_type in rule.except_model_types
        ):
            continue
        excepted = rule.not_mixed if weights.is_mixed else ()
        for module, scheme in weights.schemes.items():
            if (
                (not rule.schemes or names[scheme] in rule.schemes)
                and names[scheme] not in excepted
                and (not rule.endings or module.endswith(rule.endings))
                and (not rule.has_blocks or scheme.weights is Granularity.BLOCK)
                and (not rule.has_experts or module in experts)
                and rule.granularity in (None, scheme.weights)
            ):
                why = f"{model_type}: {rule.why}" if rule.model_types else rule.why
                if rule.has_experts or rule.endings:
                    why = f"{why} ({shorten(module)})"
                if options := " ".join(f"--ignore '{pattern}'" for pattern in rule.ignore):
                    why = f"{why}; {options} leaves them unquantized"
                yield Finding(status=rule.status, why=why, fix=rule.fix)
                break
