"""Read and write the scales of K, V and q in a worker of vLLM, which mixes this class in.

vLLM keeps up to four copies of a scale on each rank: a tensor on the device, a float and a CPU
tensor on the host, and the factor that FlashInfer computes from the float at its first forward
pass (0.32.0 `model_executor/layers/attention/attention.py`, `v1/attention/backends/flashinfer.py`).
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

import torch

ROLES = ("k", "v", "q")
COPIES = {"device": "_{}_scale", "float": "_{}_scale_float", "cpu": "_{}_scale_cpu"}
"""The attribute of an attention layer that holds a copy, for a role."""
READ_ATTRIBUTE = re.compile(r"\b(?:layer|self)\.(_[kvq]_scale(?:_float|_cpu)?)\b")

FP8_CACHES = ("fp8", "fp8_e4m3")
"""vLLM's names of the KV cache with a scale for each layer."""
_FOREIGN = ("abc", "builtins", "torch", "typing")


class LiveScales:
    """What a rank answers about the scales that it multiplies by."""

    model_runner: Any
    vllm_config: Any

    def fp8calib_read_scales(self) -> dict[str, Any]:
        """Give every copy of the scales of this rank; numbers are text, as JSON has no NaN."""
        import vllm  # noqa: PLC0415
        from vllm.distributed import parallel_state  # noqa: PLC0415
        from vllm.platforms import current_platform  # noqa: PLC0415

        parallel = self.vllm_config.parallel_config
        held = dict(self.fp8calib_list_attention())
        context = self.vllm_config.compilation_config.static_forward_context
        return {
            "version": vllm.__version__,
            "device": current_platform.device_type,
            "is_fnuz": bool(current_platform.is_fp8_fnuz()),
            "tp_rank": parallel_state.get_tp_group().rank_in_group,
            "tp": parallel.tensor_parallel_size,
            "pp_rank": parallel_state.get_pp_group().rank_in_group,
            "pp": parallel.pipeline_parallel_size,
            "dp": parallel.data_parallel_size,
            "has_graphs": self.vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs(),
            "layers": [_read_layer(name, module) for name, module in held.items()],
            "others": [
                name for name, each in context.items() if _is_cached(each) and name not in held
            ],
        }

    def fp8calib_write_scales(self, scales: str) -> dict[str, Any]:
        """Write one number a role into every copy of a layer, on this rank.

        Args:
            scales: JSON of layers' names, roles and numbers.
        """
        modules = dict(self.fp8calib_list_attention())
        for name, numbers in json.loads(scales).items():
            for role, number in numbers.items() if name in modules else ():
                _write(modules[name], role, number)
        return {}

    def fp8calib_list_attention(self) -> Iterator[tuple[str, Any]]:
        """List the layers of the model, without a drafter's, that read a KV cache."""
        for name, module in self.model_runner.get_model().named_modules():
            if _is_cached(module):
                yield getattr(module, "layer_name", name), module


def _is_cached(module: Any) -> bool:
    """Check for attention with scales and a KV cache; an encoder has none."""
    kind = getattr(module, "attn_type", "decoder")
    return hasattr(module, "_k_scale") and kind in ("decoder", "encoder_decoder")


def _read_layer(name: str, module: Any) -> dict[str, Any]:
    cache = module.kv_cache
    cache = cache[0] if isinstance(cache, list | tuple) and cache else cache
    return {
        "name": name,
        "backend": module.attn_backend.get_name(),
        "reads": list_scales_read(module),
        "cache_dtype": module.kv_cache_dtype,
        "stored_dtype": str(getattr(cache, "dtype", "")).removeprefix("torch."),
        "scales": {role: dict(_read_copies(module, role)) for role in ROLES},
    }


def _read_copies(module: Any, role: str) -> Iterator[tuple[str, list[str]]]:
    for copy, attribute in COPIES.items():
        held = getattr(module, attribute.format(role), None)
        if held is not None:
            yield copy, list(map(str, torch.as_tensor(held).double().flatten().tolist()))
    if role == "v" and (factor := _find_factor(module, "bmm2_scale")) is not None:
        yield "factor", [str(factor)]
    if role == "k" and (factor := _find_factor(module, "bmm1_scale")) is not None:
        yield "factor", [str(factor / (module.impl.scale * module._q_scale_float))]


def _find_factor(module: Any, name: str) -> float | None:
    """Find a factor that the backend keeps; None if it has none, or with another one in it."""
    has_own = getattr(module, "_o_scale_float", None) is None and hasattr(module, "num_kv_heads")
    factor = getattr(module.impl, name, None)
    return float(factor) if has_own and isinstance(factor, int | float) else None


def list_scales_read(module: Any) -> list[str]:
    """List the attributes of a layer that hold scales and that the source of its backend reads.

    Empty where there is no source.
    """
    try:
        names = _list_read_by(type(module.impl))
        of_layer = _list_read_by(type(module))
    except (OSError, TypeError):
        return []
    if getattr(module, "query_quant", ...) is None:
        of_layer.discard("_q_scale")  # the layer quantizes no query
    return sorted(names | of_layer)


def _list_read_by(kind: type) -> set[str]:
    classes = [each for each in kind.__mro__ if each.__module__.split(".")[0] not in _FOREIGN]
    return {name for each in classes for name in READ_ATTRIBUTE.findall(inspect.getsource(each))}


def _write(module: Any, role: str, number: float) -> None:
    """Write in place: captured CUDA graphs hold the address of the device's tensor."""
    getattr(module, COPIES["device"].format(role)).fill_(number)
    setattr(module, COPIES["float"].format(role), number)
    if hasattr(module, COPIES["cpu"].format(role)):
        getattr(module, COPIES["cpu"].format(role)).fill_(number)
    for name in ("bmm1_scale", "bmm2_scale"):
        if getattr(module.impl, name, None) is not None:
            setattr(module.impl, name, None)  # the next forward pass computes it
