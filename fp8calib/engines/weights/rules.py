"""Find the FP8 weights of a checkpoint that engines refuse, misread, or load in another way.

Each engine's record has a table of rules; the rules here compare several linears.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from fp8calib.engines.status import Status
from fp8calib.engines.weights.finding import Finding
from fp8calib.engines.weights.weight_rule import WeightRule
from fp8calib.model.module_paths import name_fused_group
from fp8calib.numerics.schemes import Granularity


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedLinear:
    """A linear with an FP8 weight."""

    module: str
    shape: tuple[int, int]
    """[out, in]."""
    scheme: str
    """The name of its scheme, or of the nearest one."""
    block: tuple[int, int] | None = None
    """Rows and columns of a block; None without block scales."""
    granularity: Granularity | None = None
    """What one scale of the weight is for; None where that does not matter."""

    @property
    def fused_group(self) -> str:
        """The fused weight into which engines load it: its path with all projections."""
        return name_fused_group(self.module)

    @property
    def is_expert(self) -> bool:
        """Whether it is an expert, among which a router chooses."""
        return ".experts." in self.module


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeights:
    """The linears of a checkpoint, as rules about loading see them."""

    dialect: str
    """The name of its FP8 dialect."""
    config: Mapping[str, object]
    """The model's config.json."""
    linears: tuple[QuantizedLinear, ...]
    unquantized: Collection[str]
    """The paths of the linears that are not FP8."""
    is_mixed: bool = False
    """Whether it is ModelOpt's MIXED_PRECISION, for which engines have a separate method."""


def apply_rules(rules: Iterable[WeightRule], weights: QuantizedWeights) -> Iterator[Finding]:
    """List what the rules of an engine's record say about FP8 weights."""
    for rule in rules:
        if _holds_for(rule, weights) and (found := _find_linear(rule, weights)):
            why = _explain(rule, found, str(weights.config.get("model_type")))
            yield Finding(status=rule.status, why=why, fix=rule.fix)


def _holds_for(rule: WeightRule, weights: QuantizedWeights) -> bool:
    model_type = weights.config.get("model_type")
    return (
        rule.dialect in ("", weights.dialect)
        and (not rule.model_types or model_type in rule.model_types)
        and model_type not in rule.except_model_types
    )


def _find_linear(rule: WeightRule, weights: QuantizedWeights) -> str:
    """Find the path of the first FP8 linear to which a rule applies."""
    excepted = rule.not_mixed if weights.is_mixed else ()
    return next(
        (
            each.module
            for each in weights.linears
            if (not rule.schemes or each.scheme in rule.schemes)
            and each.scheme not in excepted
            and (not rule.endings or each.module.endswith(rule.endings))
            and (not rule.has_blocks or each.block is not None)
            and (not rule.has_experts or each.is_expert)
            and rule.granularity in (None, each.granularity)
        ),
        "",
    )


def _explain(rule: WeightRule, example: str, model_type: str) -> str:
    """Add the model type and an example to a rule's reason, where the rule is limited to some."""
    is_limited = rule.has_experts or rule.endings
    why = f"{model_type}: {rule.why}" if rule.model_types else rule.why
    why = f"{why} ({example})" if is_limited else why
    options = " ".join(f"--ignore '{pattern}'" for pattern in rule.ignore)
    return f"{why}; {options} leaves them unquantized" if options else why


_JOINING = ("vllm", "sglang")
"""vLLM 0.32.0 compressed_tensors_moe/compressed_tensors_moe.py (get_moe_method); SGLang 0.5.23
compressed_tensors/compressed_tensors.py (get_moe_scheme)."""
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.[^.]+")


def list_split_expert_findings(engine: str, weights: QuantizedWeights) -> Iterator[Finding]:
    """List layers of which only some experts are quantized, where an engine treats them alike."""
    quantized, others = (
        {found[1] for found in map(_EXPERT.fullmatch, modules) if found}
        for modules in ([each.module for each in weights.linears], weights.unquantized)
    )
    layers = sorted(quantized & others)
    if layers and engine in _JOINING:
        yield Finding(
            status=Status.MISREAD,
            why="it joins the experts of a layer, and only a part of them is quantized "
            f"({layers[0]}): it stops, or its answers are wrong",
            fix="quantize all of them, or none",
        )
