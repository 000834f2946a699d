"""Who cannot load which FP8 weights, as rules for checkpoints that are written and that are found.

The engines' loaders take several projections into one weight and cut weights for their ranks; what
does not survive either is told here, with the file of the engine that says so.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from fp8calib.dialects.engine_rules import SGLANG, TGI, TRANSFORMERS, VLLM
from fp8calib.dialects.fp8_weights import FUSED_NAME
from fp8calib.expert_stacks import find_layout
from fp8calib.geometry import Linear, ModelGeometry
from fp8calib.tensor_parallel import owned_channels, owned_rows


class Effect(StrEnum):
    """What a rule means for who serves the checkpoint."""

    REFUSED = "refused"
    """The engine does not start."""
    MISREAD = "misread"
    """It starts, and its answers are wrong."""
    CONDITION = "condition"
    """It serves the checkpoint, under a condition or in another way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFault:
    """What an engine makes of FP8 weights that is not what they mean."""

    engine: str
    effect: Effect
    why: str
    source: str
    mend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedLinear:
    """A linear with an FP8 weight."""

    module: str
    shape: tuple[int, int]
    """[out, in]."""
    scheme: str
    """`fp8-static`, `fp8-dynamic`, `w8a16` or `fp8-block`."""
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale, where scales are of blocks."""

    @property
    def fused_group(self) -> str:
        """Name what engines load it into, together with others."""
        return name_fused_group(self.module)

    @property
    def is_expert(self) -> bool:
        """Tell whether it is one of many that a router chooses from."""
        return ".experts." in self.module


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeights:
    """The linears of a checkpoint, as far as engines' loading depends on them."""

    form: str
    """`compressed-tensors`, `autofp8` (`quant_method: fp8`), `modelopt`, or another method."""
    config: Mapping[str, object]
    """The model's config.json."""
    linears: tuple[QuantizedLinear, ...]
    left: Collection[str]
    """Paths of the linears that are not FP8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    engine: str
    form: str
    schemes: tuple[str, ...]
    effect: Effect
    why: str
    source: str


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
    ),
)
"""What holds where experts are quantized."""
_BLOCK_SOURCES = {
    VLLM: "vLLM 0.32.0 quantization/utils/fp8_utils.py (validate_fp8_block_shape)",
    SGLANG: "SGLang 0.5.23 layers/quantization/fp8_utils.py, fp8.py (validate_fp8_block_shape)",
}
_TURNED = ("self_attn.q_proj", "self_attn.k_proj")
_ROW_EXPERTS = ("down_proj", "w2")
"""Projections of experts whose inputs are cut for ranks; of the others it is the outputs."""
_QUANTIZE_OTHERWISE = "quantize with one scale per tensor or per channel"


def name_fused_group(module: str) -> str:
    """Name what engines load a linear into, together with others."""
    parent, _, projection = module.rpartition(".")
    return f"{parent}.{FUSED_NAME.get(projection, projection)}"


def list_split_groups(taken: Collection[str], left: Collection[str]) -> list[str]:
    """List the fused groups of which only a part is quantized, by paths of linears."""
    groups = {name_fused_group(module) for module in taken}
    return sorted({name_fused_group(module) for module in left} & groups)


def list_weight_faults(weights: QuantizedWeights) -> list[WeightFault]:
    """List what engines make of FP8 weights on one rank, as far as it is not what they mean."""
    return [
        *_apply(_RULES, weights.form, weights.linears, is_named=False),
        *_list_fused_faults(weights),
        *_apply(
            _EXPERT_RULES, weights.form, [e for e in weights.linears if e.is_expert], is_named=True
        ),
        *_list_stack_faults(weights),
        *_list_turned_faults(weights),
    ]


def list_rank_faults(
    weights: QuantizedWeights, geometry: ModelGeometry, tp: int
) -> Iterator[WeightFault]:
    """List the blocks that do not survive the cut for `tp` ranks, one fault an engine.

    Projections that the checkpoint itself holds in one weight are looked at on one rank too.
    """
    blocks = {each.module: each.block for each in weights.linears if each.block is not None}
    fault = next(_find_cut_blocks(blocks, geometry, tp), None) if blocks else None
    if fault is None and tp > 1:
        fault = next(_find_cut_experts(weights.linears, tp), None)
    for engine, source in _BLOCK_SOURCES.items() if fault is not None else ():
        yield WeightFault(
            engine=engine,
            effect=Effect.REFUSED,
            why=str(fault),
            source=source,
            mend=f"serve it with fewer ranks, or {_QUANTIZE_OTHERWISE}"
            if tp > 1
            else _QUANTIZE_OTHERWISE,
        )


def _apply(
    rules: Collection[_Rule], form: str, linears: Collection[QuantizedLinear], *, is_named: bool
) -> Iterator[WeightFault]:
    examples: dict[str, str] = {}
    for each in linears:
        examples.setdefault(each.scheme, each.module)
    for rule in rules:
        example = next((examples[name] for name in rule.schemes if name in examples), None)
        if rule.form == form and example is not None:
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
                mend="quantize all of it, or nothing of it",
            )
    for engine, source in _BLOCK_SOURCES.items():
        is_whole = engine == SGLANG and weights.form == "autofp8"
        torn = next((e for e in weights.linears if _is_torn(e, is_last_too=is_whole)), None)
        if torn is not None and torn.block is not None:
            why = f"{torn.module} has {torn.shape[0]} outputs, no multiple of {torn.block[0]}, and "
            yield WeightFault(
                engine=engine,
                effect=Effect.REFUSED,
                why=why + "is loaded into one weight with others, whose blocks would begin "
                "elsewhere",
                source=source,
                mend=_QUANTIZE_OTHERWISE,
            )


def _is_torn(linear: QuantizedLinear, *, is_last_too: bool) -> bool:
    """Tell whether a part of a fused weight ends inside a block, though others follow it.

    Args:
        linear: the part.
        is_last_too: the last part of a fused weight has to fill its blocks too. Of experts it
            always has: their stacks go on.
    """
    parts = linear.fused_group.rpartition(".")[2].split("+")
    followed = parts if linear.is_expert or is_last_too else parts[:-1]
    return (
        linear.block is not None
        and len(parts) > 1
        and linear.module.rpartition(".")[2] in followed
        and linear.shape[0] % linear.block[0] != 0
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


def _find_cut_blocks(
    blocks: Mapping[str, tuple[int, int] | None], geometry: ModelGeometry, tp: int
) -> Iterator[str]:
    """Say which blocks a rank's share of a linear would cut."""
    for _, linear in geometry.linears():
        block = _find_block(blocks, linear)
        if block is None or linear.num_experts or linear.section == "other":
            continue
        rank = f" on each of {tp} ranks" if tp > 1 else ""
        if len(owned_channels(linear, tp, 0)) % block[1] and linear.shard == "row" and tp > 1:
            yield (
                f"{linear.module} has {len(owned_channels(linear, tp, 0))} inputs{rank}, no "
                f"multiple of {block[1]}: blocks would be cut (ValueError)"
            )
        if linear.shard != "column":
            continue
        for part in linear.parts if tp > 1 else linear.parts[:-1]:
            rows = len(owned_rows(linear, part, tp, 0))
            if rows % block[0]:
                yield (
                    f"{linear.logical(part)} has {rows} outputs{rank}, no multiple of {block[0]}: "
                    "blocks would be cut (ValueError)"
                )


def _find_block(
    blocks: Mapping[str, tuple[int, int] | None], linear: Linear
) -> tuple[int, int] | None:
    stored = linear.checkpoint_name
    return blocks.get(stored.removesuffix(".weight") if stored else linear.module)


_EXPERT = re.compile(r"\.experts\.\d+\.")


def _find_cut_experts(linears: Collection[QuantizedLinear], tp: int) -> Iterator[str]:
    """Say which experts' share of a rank does not fill its blocks: vLLM wants both of them to."""
    for each in linears:
        if each.block is None or not _EXPERT.search(each.module):
            continue
        is_row = each.module.endswith(_ROW_EXPERTS)
        size, block = (each.shape[int(is_row)], each.block[int(is_row)])
        if size % (tp * block):
            side = "inputs" if is_row else "outputs"
            yield (
                f"{each.module} has {size / tp:g} {side} on each of {tp} ranks, no multiple of "
                f"{block}: blocks would be cut (ValueError)"
            )
