"""Find the FP8 weights of a checkpoint that engines refuse, misread, or load in another way.

Each engine's record has a table of rules; the rules here compare several linears.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fp8calib.engines.status import Status
from fp8calib.engines.weights.finding import Finding
from fp8calib.engines.weights.quantized import QuantizedWeights, list_split_experts
from fp8calib.engines.weights.weight_rule import WeightRule


def apply_rules(
    engine: str, rules: Iterable[WeightRule], weights: QuantizedWeights
) -> Iterator[Finding]:
    """List what the rules of an engine's record say about FP8 weights."""
    for rule in rules:
        if _holds_for(rule, weights) and (found := _find_linear(rule, weights)):
            yield Finding(
                engine=engine,
                status=rule.status,
                why=_explain(rule, found, str(weights.config.get("model_type"))),
                source=rule.source,
                fix=rule.fix,
            )


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


def list_split_expert_findings(weights: QuantizedWeights) -> Iterator[Finding]:
    """List engines that treat the experts of a layer alike where only some are quantized."""
    quantized = [each.module for each in weights.linears]
    layers = list_split_experts(quantized, weights.unquantized)
    sources = {
        "vllm": "vLLM 0.32.0 compressed_tensors_moe/compressed_tensors_moe.py (get_moe_method)",
        "sglang": "SGLang 0.5.23 compressed_tensors/compressed_tensors.py (get_moe_scheme)",
    }
    for engine, source in sources.items():
        if layers:
            yield Finding(
                engine=engine,
                status=Status.MISREAD,
                why="it joins the experts of a layer, and only a part of them is quantized "
                f"({layers[0]}): it stops, or its answers are wrong",
                source=source,
                fix="quantize all of them, or none",
            )
