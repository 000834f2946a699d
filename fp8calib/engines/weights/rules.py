"""Who cannot load which FP8 weights, as rules for checkpoints that are written and that are found.

Every rule names the file of the engine that says so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from fp8calib.engines.limitations import SGLANG, TGI, TRANSFORMERS, VLLM
from fp8calib.engines.weights.blocks import list_joined_faults
from fp8calib.engines.weights.faults import (
    Effect,
    QuantizedLinear,
    QuantizedWeights,
    WeightFault,
    list_split_experts,
    list_split_groups,
)
from fp8calib.geometry.expert_layouts import find_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    engine: str
    form: str
    schemes: tuple[str, ...]
    effect: Effect
    why: str
    source: str
    not_mixed: tuple[str, ...] = ()
    """The schemes that it does not hold for under ModelOpt's MIXED_PRECISION."""


_ALL = ("fp8-static", "fp8-dynamic", "w8a16", "fp8-block")
_RULES = (
    _Rule(
        engine=TGI,
        form="compressed-tensors",
        schemes=("fp8-block",),
        effect=Effect.REFUSED,
        why="it takes the scales of blocks for scales of rows, and stops",
        source="TGI layers/compressed_tensors/w8an_fp.py",
    ),
    _Rule(
        engine=TGI,
        form="compressed-tensors",
        schemes=("w8a16",),
        effect=Effect.CONDITION,
        why="it quantizes the inputs too, per token, where its kernels can",
        source="TGI layers/compressed_tensors/w8an_fp.py (force_w8a16)",
    ),
    _Rule(
        engine=TGI,
        form="modelopt",
        schemes=_ALL,
        effect=Effect.CONDITION,
        why="it warns of the quant_method, and knows FP8 weights by their dtype",
        source="TGI models/__init__.py (get_model), layers/fp8.py (HybridFP8UnquantLoader)",
    ),
    _Rule(
        engine=SGLANG,
        form="modelopt",
        schemes=("fp8-dynamic", "fp8-block"),
        effect=Effect.REFUSED,
        why="of ModelOpt's FP8 it takes the per-tensor form alone",
        source="SGLang 0.5.23 srt/layers/quantization/modelopt_quant.py (ModelOptFp8Config)",
        not_mixed=("fp8-block",),
    ),
    _Rule(
        engine=TRANSFORMERS,
        form="autofp8",
        schemes=("fp8-static", "fp8-dynamic"),
        effect=Effect.MISREAD,
        why="it misreads the scales without an error, and its answers are wrong",
        source="transformers 5.23, tried",
    ),
    _Rule(
        engine=TRANSFORMERS,
        form="modelopt",
        schemes=_ALL,
        effect=Effect.MISREAD,
        why="it leaves the scales out without an error, and its answers are wrong",
        source="transformers 5.23, tried",
    ),
)

_ONLY_WEIGHTS = "it takes no FP8 experts whose inputs are not quantized"
_EXPERT_RULES = (
    _Rule(
        engine=VLLM,
        form="compressed-tensors",
        schemes=("w8a16",),
        effect=Effect.REFUSED,
        why=_ONLY_WEIGHTS,
        source="vLLM 0.32.0 compressed_tensors_moe/compressed_tensors_moe.py (get_moe_method)",
    ),
    _Rule(
        engine=SGLANG,
        form="compressed-tensors",
        schemes=("w8a16",),
        effect=Effect.REFUSED,
        why=_ONLY_WEIGHTS,
        source="SGLang 0.5.23 compressed_tensors/compressed_tensors.py (get_moe_scheme)",
    ),
    _Rule(
        engine=VLLM,
        form="modelopt",
        schemes=("fp8-dynamic", "fp8-block"),
        effect=Effect.REFUSED,
        why="of ModelOpt's FP8 experts it takes the per-tensor form alone",
        source="vLLM 0.32.0 quantization/modelopt.py (ModelOptFp8MoEMethod)",
        not_mixed=("fp8-block",),
    ),
)
"""What holds where experts are quantized."""
FINEGRAINED = "finegrained"
"""The form of `quant_method: fp8` with one scale per tensor under the names of transformers:
`weight_scale_inv` and `activation_scale`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """Linears that an engine makes without a quantization config, whatever the checkpoint's."""

    engine: str
    model_type: str
    endings: tuple[str, ...]
    """Of their paths."""
    effect: Effect
    why: str
    source: str


_KEPT = (
    _Kept(
        engine=SGLANG,
        model_type="olmo",
        endings=tuple(f".self_attn.{name}_proj" for name in "qkvo"),
        effect=Effect.REFUSED,
        why="it has no place for their scales, and stops",
        source="SGLang 0.5.23 srt/models/olmo.py (OlmoAttention, load_weights)",
    ),
    _Kept(
        engine=SGLANG,
        model_type="step3p5",
        endings=(".self_attn.g_proj",),
        effect=Effect.MISREAD,
        why="it leaves their scales out without an error, and its answers are wrong",
        source="SGLang 0.5.23 srt/models/step3p5.py (g_proj, load_weights)",
    ),
)
_TURNED = ("self_attn.q_proj", "self_attn.k_proj")


def list_weight_faults(weights: QuantizedWeights) -> list[WeightFault]:
    """List what engines make of FP8 weights on one rank, as far as it is not what they mean."""
    return [
        *_apply(_RULES, weights, weights.linears, is_named=False),
        *_list_fused_faults(weights),
        *_list_split_expert_faults(weights),
        *list_joined_faults(weights),
        *_apply(_EXPERT_RULES, weights, [e for e in weights.linears if e.is_expert], is_named=True),
        *_list_stack_faults(weights),
        *_list_turned_faults(weights),
        *_list_named_faults(weights),
        *_list_kept_faults(weights),
    ]


def _apply(
    rules: Collection[_Rule],
    weights: QuantizedWeights,
    linears: Collection[QuantizedLinear],
    *,
    is_named: bool,
) -> Iterator[WeightFault]:
    examples: dict[str, str] = {}
    for each in linears:
        examples.setdefault(each.scheme, each.module)
    for rule in rules:
        excepted = rule.not_mixed if weights.is_mixed else ()
        schemes = (name for name in rule.schemes if name not in excepted)
        example = next((examples[name] for name in schemes if name in examples), None)
        if rule.form == weights.form and example is not None:
            yield WeightFault(
                engine=rule.engine,
                effect=rule.effect,
                why=f"{rule.why} ({example})" if is_named else rule.why,
                source=rule.source,
            )


def _list_fused_faults(weights: QuantizedWeights) -> Iterator[WeightFault]:
    """Tell what engines refuse that load several projections into one weight."""
    groups = list_split_groups([each.module for each in weights.linears], weights.left)
    for engine in (VLLM, SGLANG):
        for group in groups:
            yield WeightFault(
                engine=engine,
                effect=Effect.REFUSED,
                why=f"{group} is loaded into one weight, and only a part of it is quantized",
                source="vLLM 0.32.0 quantization/utils/quant_utils.py (is_layer_skipped)",
                fix="quantize all of it, or nothing of it",
            )


def _list_split_expert_faults(weights: QuantizedWeights) -> Iterator[WeightFault]:
    """Tell who takes the experts of a layer for quantized all alike."""
    taken = [each.module for each in weights.linears]
    layers = list_split_experts(taken, weights.left)
    split = {
        VLLM: layers,
        SGLANG: layers,
        TRANSFORMERS: list_split_experts(taken, weights.left, by_projection=True),
    }
    sources = {
        VLLM: "vLLM 0.32.0 compressed_tensors_moe/compressed_tensors_moe.py (get_moe_method)",
        SGLANG: "SGLang 0.5.23 compressed_tensors/compressed_tensors.py (get_moe_scheme)",
        TRANSFORMERS: "transformers 5.23, tried",
    }
    for engine, groups in split.items():
        if groups:
            yield WeightFault(
                engine=engine,
                effect=Effect.MISREAD,
                why="it joins the experts of a layer, and only a part of them is quantized "
                f"({groups[0]}): it stops, or its answers are wrong",
                source=sources[engine],
                fix="quantize all of them, or none",
            )


def _list_stack_faults(weights: QuantizedWeights) -> Iterator[WeightFault]:
    """Tell who knows a model's experts as a stack alone."""
    expert = next((each for each in weights.linears if each.is_expert), None)
    kind, layout, _ = find_layout(weights.config) if expert else ("", None, None)
    if expert is not None and layout is not None and not layout.is_split_in_transformers:
        yield WeightFault(
            engine=TRANSFORMERS,
            effect=Effect.MISREAD,
            why=f"it looks for {kind}'s experts in one tensor and reports {expert.module} and "
            "all others UNEXPECTED: its experts are random numbers",
            source="transformers 5.23, tried",
        )


def _list_turned_faults(weights: QuantizedWeights) -> Iterator[WeightFault]:
    """Tell of weights whose rows an engine puts in another order, which blocks do not survive."""
    is_llama4 = weights.config.get("model_type") in ("llama4", "llama4_text")
    turned = (e for e in weights.linears if e.block is not None and e.module.endswith(_TURNED))
    query = next(turned, None) if is_llama4 else None
    if query is not None:
        yield WeightFault(
            engine=VLLM,
            effect=Effect.REFUSED,
            why=f"it reorders the rows of q and k, which cut across blocks ({query.module}); "
            "--ignore '*.self_attn.[qkv]_proj' leaves them as they are",
            source="vLLM 0.32.0 models/llama4.py (permute_qk_weight_for_rotary)",
        )


def _list_named_faults(weights: QuantizedWeights) -> Iterator[WeightFault]:
    """Tell of names that vLLM translates in one model alone."""
    if weights.form == FINEGRAINED and weights.config.get("model_type") != "mistral3":
        yield WeightFault(
            engine=VLLM,
            effect=Effect.REFUSED,
            why="scales per tensor are called weight_scale and input_scale there, and here "
            "weight_scale_inv and activation_scale (ValueError)",
            source="vLLM 0.32.0 models/utils.py (AutoWeightsLoader), tried; models/mistral3.py",
            fix="rename the scales: the numbers are the same",
        )


def _list_kept_faults(weights: QuantizedWeights) -> Iterator[WeightFault]:
    """Tell of linears that an engine cannot have in FP8."""
    for rule in _KEPT:
        if weights.config.get("model_type") != rule.model_type:
            continue
        found = (each.module for each in weights.linears if each.module.endswith(rule.endings))
        if (example := next(found, None)) is not None:
            options = " ".join(f"--ignore '*{ending}'" for ending in rule.endings)
            yield WeightFault(
                engine=rule.engine,
                effect=rule.effect,
                why=f"{rule.model_type}: {rule.why} ({example}); {options} leaves them as they are",
                source=rule.source,
            )
