"""Which engine serves which FP8 checkpoint, by which command, and who cannot honour it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from fp8calib.engines.limitations import SGLANG, TGI, TRANSFORMERS, VLLM, Limitation
from fp8calib.engines.serving_commands import ServingCommand, limitations
from fp8calib.engines.weights.faults import Effect, QuantizedLinear, QuantizedWeights
from fp8calib.engines.weights.rules import list_weight_faults
from fp8calib.fp8.formats import E4M3FN
from fp8calib.fp8.schemes import Granularity
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.quantization.plan import QuantizePlan

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
_INSTALLED = Limitation(
    engine=TRANSFORMERS,
    why="the package compressed-tensors has to be installed",
    source="transformers 5.23 quantizers/quantizer_compressed_tensors.py",
    is_blocking=False,
)


def list_limitations(plan: QuantizePlan, geometry: ModelGeometry | None) -> list[Limitation]:
    """List the engines that cannot honour a checkpoint, and the conditions of those that can.

    Args:
        plan: of the checkpoint.
        geometry: of the model where it has KV scales, else None.
    """
    faults = list_weight_faults(_describe(plan))
    found = [
        Limitation(
            engine=fault.engine,
            why=fault.why,
            source=fault.source,
            is_blocking=fault.effect is not Effect.CONDITION,
        )
        for fault in faults
    ]
    if plan.settings.dialect.name == "compressed-tensors":
        found.append(_INSTALLED)
        found += _list_kv_limitations(geometry) if geometry is not None else ()
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


def _describe(plan: QuantizePlan) -> QuantizedWeights:
    scheme = plan.settings.scheme
    return QuantizedWeights(
        form=plan.settings.dialect.name,
        config=plan.config,
        linears=tuple(
            QuantizedLinear(
                module=matrix.module,
                shape=matrix.shape,
                scheme=scheme.name,
                block=scheme.block if scheme.weights is Granularity.BLOCK else None,
            )
            for matrix in plan.selection.quantized
        ),
        left=plan.selection.list_unquantized(),
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
