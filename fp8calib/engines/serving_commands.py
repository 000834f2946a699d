"""Which engine serves which form, by which command, and who cannot honour it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from fp8calib.engines.limitations import (
    OLD_VLLM,
    OVERLAYS,
    RULES,
    SGLANG,
    TGI,
    VLLM,
    Case,
    Limitation,
)
from fp8calib.fp8.formats import E4M3FN, Fp8Format
from fp8calib.geometry.model_geometry import ModelGeometry

_DTYPE_BYTES = {"float64": 8, "float32": 4}
_SERVED_BYTES = 2


@dataclass(frozen=True, slots=True)
class ServingCommand:
    """The command line that serves a file with an engine."""

    engine: str
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launcher:
    engine: str
    formats: tuple[str, ...]
    command: str
    ranks_flag: str


_LAUNCHERS = (
    _Launcher(
        engine=VLLM,
        formats=OVERLAYS,
        command="vllm serve {target} --kv-cache-dtype fp8",
        ranks_flag="--tensor-parallel-size",
    ),
    _Launcher(
        engine=SGLANG,
        formats=OVERLAYS,
        command="python -m sglang.launch_server --model-path {target} --kv-cache-dtype fp8_e4m3",
        ranks_flag="--tp-size",
    ),
    _Launcher(
        engine=TGI,
        formats=(*OVERLAYS, "tgi"),
        command="text-generation-launcher --model-id {target} --kv-cache-dtype fp8_e4m3fn",
        ranks_flag="--num-shard",
    ),
    _Launcher(
        engine=SGLANG,
        formats=("vllm-json",),
        command="python -m sglang.launch_server --model-path {model} --kv-cache-dtype fp8_e4m3 "
        "--quantization-param-path {target}",
        ranks_flag="--tp-size",
    ),
    _Launcher(
        engine=OLD_VLLM,
        formats=("vllm-json",),
        command="python -m vllm.entrypoints.openai.api_server --model {model} --kv-cache-dtype fp8 "
        "--quantization-param-path {target}",
        ranks_flag="--tensor-parallel-size",
    ),
)


def serving_commands(
    geometry: ModelGeometry,
    format_name: str,
    target: Path,
    *,
    model: str,
    fmt: Fp8Format = E4M3FN,
    tp: int = 1,
) -> list[ServingCommand]:
    """List the commands of the engines that can use the scales.

    Args:
        geometry: the shape of the model.
        format_name: the form, a name of the registry.
        target: the overlay's folder, or the file.
        model: the model as the user named it, for forms that lie beside it.
        fmt: the FP8 format the scales are for.
        tp: the number of ranks to serve with.
    """
    blocked = {
        limit.engine for limit in limitations(geometry, format_name, fmt) if limit.is_blocking
    }
    names = {"target": shlex.quote(str(target)), "model": shlex.quote(model)}
    return [
        ServingCommand(
            launcher.engine,
            launcher.command.format(**names) + (f" {launcher.ranks_flag} {tp}" if tp > 1 else ""),
        )
        for launcher in _LAUNCHERS
        if format_name in launcher.formats and launcher.engine not in blocked
    ]


def limitations(
    geometry: ModelGeometry, format_name: str, fmt: Fp8Format, *, query: bool = False
) -> list[Limitation]:
    """List every engine that cannot honour a file, and the conditions of those that can.

    Args:
        geometry: the shape of the model.
        format_name: the form, a name of the registry.
        fmt: the FP8 format the scales are for.
        query: whether the file holds `q_scale`.
    """
    case = Case(geometry=geometry, fmt=fmt, query=query)
    return [rule.limitation for rule in RULES if format_name in rule.formats and rule.applies(case)]


def kv_bytes_per_token(geometry: ModelGeometry) -> tuple[int, int]:
    """Give the bytes of KV cache per token over all layers and ranks, before and in FP8."""
    size = _DTYPE_BYTES.get(geometry.checkpoint_dtype, _SERVED_BYTES)
    elements = geometry.kv_elements_per_token
    return elements * size, elements
