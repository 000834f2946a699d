"""Which engine serves which FP8 checkpoint, by which command, and who cannot honour it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fp8calib.dialects.engine_rules import SGLANG, TGI, TRANSFORMERS, VLLM, Limitation
from fp8calib.dialects.engines import ServingCommand, limitations
from fp8calib.fp8 import E4M3FN
from fp8calib.geometry import ModelGeometry
from fp8calib.quantize.cast import BLOCK
from fp8calib.quantize.expert_matrices import find_layout
from fp8calib.quantize.plan import QuantizePlan
from fp8calib.quantize.selection import Matrix

_COMMANDS = (
    (VLLM, "vllm serve {target}", " --kv-cache-dtype fp8"),
    (
        SGLANG,
        "python -m sglang.launch_server --model-path {target}",
        " --kv-cache-dtype fp8_e4m3",
    ),
    (TGI, "text-generation-launcher --model-id {target}", " --kv-cache-dtype fp8_e4m3fn"),
)
"""Engine, command, and what it takes for the FP8 KV cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    engine: str
    form: str
    schemes: tuple[str, ...]
    why: str
    source: str
    is_blocking: bool


_RULES = (
    _Rule(
        engine=TGI,
        form="compressed-tensors",
        schemes=("fp8-block",),
        why="it takes the scales of blocks for scales of rows, and stops",
        source="TGI layers/compressed_tensors/w8an_fp.py",
        is_blocking=True,
    ),
    _Rule(
        engine=TGI,
        form="compressed-tensors",
        schemes=("w8a16",),
        why="it quantizes the inputs too, per token, where its kernels can",
        source="TGI layers/compressed_tensors/w8an_fp.py (force_w8a16)",
        is_blocking=False,
    ),
    _Rule(
        engine=TGI,
        form="modelopt",
        schemes=("fp8-static", "fp8-dynamic"),
        why="it knows no quant_method modelopt",
        source="TGI utils/quantization.py (get_loader)",
        is_blocking=True,
    ),
    _Rule(
        engine=SGLANG,
        form="modelopt",
        schemes=("fp8-dynamic",),
        why="of ModelOpt's FP8 it takes the per-tensor form alone",
        source="SGLang 0.5.23 srt/layers/quantization/modelopt_quant.py (ModelOptFp8Config)",
        is_blocking=True,
    ),
    _Rule(
        engine=TRANSFORMERS,
        form="autofp8",
        schemes=("fp8-static",),
        why="it misreads the scales without an error, and its answers are wrong",
        source="transformers 5.23, tried",
        is_blocking=True,
    ),
    _Rule(
        engine=TRANSFORMERS,
        form="modelopt",
        schemes=("fp8-static", "fp8-dynamic"),
        why="it leaves the scales out without an error, and its answers are wrong",
        source="transformers 5.23, tried",
        is_blocking=True,
    ),
    _Rule(
        engine=TRANSFORMERS,
        form="compressed-tensors",
        schemes=("fp8-static", "fp8-dynamic", "w8a16", "fp8-block"),
        why="the package compressed-tensors has to be installed",
        source="transformers 5.23 quantizers/quantizer_compressed_tensors.py",
        is_blocking=False,
    ),
)

_ONLY_WEIGHTS = "it takes no FP8 experts whose inputs are not quantized"
_EXPERT_RULES = (
    _Rule(
        engine=VLLM,
        form="compressed-tensors",
        schemes=("w8a16",),
        why=_ONLY_WEIGHTS,
        source="vLLM 0.32.0 compressed_tensors_moe/compressed_tensors_moe.py (get_moe_method)",
        is_blocking=True,
    ),
    _Rule(
        engine=SGLANG,
        form="compressed-tensors",
        schemes=("w8a16",),
        why=_ONLY_WEIGHTS,
        source="SGLang 0.5.23 compressed_tensors/compressed_tensors.py (get_moe_scheme)",
        is_blocking=True,
    ),
    _Rule(
        engine=VLLM,
        form="modelopt",
        schemes=("fp8-dynamic",),
        why="of ModelOpt's FP8 experts it takes the per-tensor form alone",
        source="vLLM 0.32.0 quantization/modelopt.py (ModelOptFp8MoEMethod)",
        is_blocking=True,
    ),
)
"""What holds where experts are quantized."""
_TURNED = ("self_attn.q_proj", "self_attn.k_proj")


def list_limitations(plan: QuantizePlan, geometry: ModelGeometry | None) -> list[Limitation]:
    """List the engines that cannot honour a checkpoint, and the conditions of those that can.

    Args:
        plan: of the checkpoint.
        geometry: of the model where it has KV scales, else None.
    """
    scheme, form = plan.settings.scheme.name, plan.settings.form.name
    found = [
        Limitation(
            engine=rule.engine, why=rule.why, source=rule.source, is_blocking=rule.is_blocking
        )
        for rule in _RULES
        if rule.form == form and scheme in rule.schemes
    ]
    found += _list_fused_faults(plan)
    found += _list_expert_faults(plan)
    found += _list_stack_faults(plan)
    found += _list_turned_faults(plan)
    if geometry is not None and form == "compressed-tensors":
        found += _list_kv_limitations(geometry)
    return found


def list_commands(
    plan: QuantizePlan, target: Path, geometry: ModelGeometry | None
) -> list[ServingCommand]:
    """List the commands of the engines that serve a checkpoint; arguments as above."""
    blocked = {item.engine for item in list_limitations(plan, geometry) if item.is_blocking}
    return [
        ServingCommand(
            engine,
            command.format(target=shlex.quote(str(target))) + (kv_flag if geometry else ""),
        )
        for engine, command, kv_flag in _COMMANDS
        if engine not in blocked
    ]


def _list_fused_faults(plan: QuantizePlan) -> Iterator[Limitation]:
    """Tell what engines refuse that load several projections into one weight."""
    for engine in (VLLM, SGLANG):
        for group in sorted(set(plan.selection.split_groups())):
            yield Limitation(
                engine=engine,
                why=f"{group} is loaded into one weight, and only a part of it is quantized",
                source="vLLM 0.32.0 quantization/utils/quant_utils.py (is_layer_skipped)",
                is_blocking=True,
            )
    if plan.settings.scheme.name == "fp8-block":
        torn = [matrix for matrix in plan.selection.taken if _is_torn(matrix)]
        for engine in (VLLM, SGLANG) if torn else ():
            yield Limitation(
                engine=engine,
                why=f"{torn[0].module} has {torn[0].shape[0]} outputs, no multiple of {BLOCK}, and "
                "others follow it in one weight, whose blocks would begin elsewhere",
                source="vLLM 0.32.0 quantization/utils/fp8_utils.py, SGLang 0.5.23 "
                "layers/quantization/fp8_utils.py (validate_fp8_block_shape)",
                is_blocking=True,
            )


def _list_expert_faults(plan: QuantizePlan) -> Iterator[Limitation]:
    """Tell what engines refuse of experts alone."""
    experts = [each.module for each in plan.selection.taken if ".experts." in each.module]
    pair = (plan.settings.form.name, plan.settings.scheme.name)
    for rule in _EXPERT_RULES if experts else ():
        if pair[0] == rule.form and pair[1] in rule.schemes:
            yield Limitation(
                engine=rule.engine,
                why=f"{rule.why} ({experts[0]})",
                source=rule.source,
                is_blocking=rule.is_blocking,
            )


def _list_stack_faults(plan: QuantizePlan) -> Iterator[Limitation]:
    """Tell who knows a model's experts as a stack alone."""
    kind, layout, _ = find_layout(plan.config)
    experts = [each for each in plan.selection.taken if each.place is not None]
    if experts and layout is not None and not layout.is_split_in_transformers:
        yield Limitation(
            engine=TRANSFORMERS,
            why=f"it looks for {kind}'s experts in one tensor and reports {experts[0].module} and "
            "all others UNEXPECTED: its experts are random numbers",
            source="transformers 5.23, tried",
            is_blocking=True,
        )


def _list_turned_faults(plan: QuantizePlan) -> Iterator[Limitation]:
    """Tell of weights whose rows an engine puts in another order, which blocks do not survive."""
    queries = [each for each in plan.selection.taken if each.module.endswith(_TURNED)]
    is_llama4 = plan.config.get("model_type") in ("llama4", "llama4_text")
    if plan.settings.scheme.name == "fp8-block" and is_llama4 and queries:
        yield Limitation(
            engine=VLLM,
            why=f"it reorders the rows of q and k, which cut across blocks ({queries[0].module}); "
            "--ignore '*.self_attn.[qkv]_proj' leaves them as they are",
            source="vLLM 0.32.0 models/llama4.py (permute_qk_weight_for_rotary)",
            is_blocking=True,
        )


def _is_torn(matrix: Matrix) -> bool:
    """Tell whether a part of a fused weight ends inside a block, though others follow it."""
    parts = matrix.fused_group.rpartition(".")[2].split("+")
    followed = parts[:-1] if ".experts." not in matrix.module else parts
    return (
        len(parts) > 1
        and matrix.module.rpartition(".")[2] in followed
        and matrix.shape[0] % BLOCK != 0
    )


def _list_kv_limitations(geometry: ModelGeometry) -> Iterator[Limitation]:
    """Tell who cannot use the KV scales: what holds for an overlay of the same form."""
    for item in limitations(geometry, "kv-overlay", E4M3FN):
        yield Limitation(
            engine=item.engine,
            why=f"KV scales: {item.why}",
            source=item.source,
            is_blocking=False,
        )
