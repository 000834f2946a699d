"""Engines that use no KV scale of a checkpoint: their FP8 cache multiplies by constants."""

from __future__ import annotations

from collections.abc import Mapping

from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.load_context import open_indexed
from fp8calib.engines.replay.quantization_config import find_quantization
from fp8calib.engines.replay.verdicts import EngineReport, LayerVerdict, Refusal
from fp8calib.geometry.model_geometry import ModelGeometry

FIX = "serve it with vLLM or SGLang; here, serve a checkpoint without KV scales"


def replay_constant(
    folder: ScaleFolder, geometry: ModelGeometry, *, why: str, value: float | None
) -> EngineReport:
    """Report that no layer gets a scale of the files.

    Args:
        folder: the checkpoint.
        geometry: its shape.
        why: what the engine does instead.
        value: what it multiplies by; None where that depends on the GPU.

    Raises:
        Refusal: the files cannot be opened.
    """
    context = open_indexed(folder, geometry, error="an error")
    layers = [
        context.judge_absent_layer(layer.index, why=why, fix=FIX)
        for layer, _ in geometry.attentions()
    ]
    return EngineReport(
        layers=tuple(_replace_value(layer, value) for layer in layers),
        problems=tuple(context.problems),
    )


def _replace_value(layer: LayerVerdict, value: float | None) -> LayerVerdict:
    k, v = (one.model_copy(update={"value": value}) for one in (layer.k, layer.v))
    return LayerVerdict(layer=layer.layer, k=k, v=v)


def refuse_lmdeploy(folder: ScaleFolder, geometry: ModelGeometry) -> None:
    """Refuse what LMDeploy's PyTorch backend does not load.

    Raises:
        Refusal: the quantization method, or a scale that its models have no parameter for.
    """
    keys = (
        "quantization_config",
        "llm_config.quantization_config",
        "text_config.quantization_config",
    )
    quantization = find_quantization(folder, keys=keys)
    if quantization is not None and (method := quantization.get("quant_method")) != "fp8":
        raise Refusal(f"Unsupported quant method: {method!a:.40} (TypeError)", fix=FIX)
    stray = next(iter(open_indexed(folder, geometry, error="an error").scales.values()), None)
    if stray is not None:
        raise Refusal(f"{stray}: its models have no parameter of that name (KeyError)", fix=FIX)


def refuse_tensorrt_llm(folder: ScaleFolder) -> None:
    """Refuse compressed-tensors configs that TensorRT-LLM does not read.

    Raises:
        Refusal: naming the first group it stops at.
    """
    quantization = find_quantization(folder, keys=("modelopt", "quantization_config")) or {}
    if quantization.get("quant_method") != "compressed-tensors":
        return
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise Refusal("config_groups is not set or empty (ValueError)", fix=FIX)
    scheme = quantization.get("kv_cache_scheme")
    if scheme is not None and not (
        isinstance(scheme, dict) and (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
    ):
        raise Refusal("Unsupported kv_cache_scheme (ValueError)", fix=FIX)
    for name, group in groups.items():
        if why := _find_group_fault(group if isinstance(group, dict) else {}):
            raise Refusal(f"group {name!a:.40} of config_groups: {why}", fix=FIX)


def _find_group_fault(group: Mapping[str, object]) -> str:
    """Say why a group of 8-bit weights is refused; empty where it is read."""
    weights, inputs = group.get("weights"), group.get("input_activations")
    if "input_activations" not in group:
        return "KeyError: 'input_activations'"
    if not isinstance(weights, dict) or not isinstance(inputs, dict):
        return "TypeError: it needs weights and input_activations"
    pair = (weights.get("strategy"), inputs.get("strategy"))
    if pair[0] not in ("channel", "block"):
        return f"Unsupported weights_quant_strategy: {pair[0]!a:.40} (ValueError)"
    if pair not in (("channel", "token"), ("block", "group")):
        return f"Unsupported inputs_quant_strategy: {pair[1]!a:.40} (ValueError)"
    if pair[0] == "block" and inputs.get("group_size") != 128:
        return f"Unsupported group_size: {inputs.get('group_size')!a:.40} (ValueError)"
    return ""
