"""Functions of vLLM's releases, taken out of their files with stubs for what they call."""

import ast
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from tests.real_engines.package import Package
from tests.real_engines.stubs import take

QUANTIZATION = "model_executor/layers/quantization/"
COMPRESSED = f"{QUANTIZATION}compressed_tensors/compressed_tensors.py"
MODELOPT = f"{QUANTIZATION}modelopt.py"
KV_CACHE = f"{QUANTIZATION}kv_cache.py"


def read_algorithms(package: Package) -> list[str]:
    """Read ModelOpt's QUANT_ALGOS, which from 0.30 on is made of the keys of a table."""
    space: dict[str, Any] = {}
    for node in package.parse(MODELOPT).body:
        text = ast.unparse(node)
        if text.startswith(("QUANT_ALGOS", "LINEAR_ALGOS")):
            exec(text, space)  # noqa: S102
    found: list[str] = space["QUANT_ALGOS"]
    return found


def read_modelopt_list(package: Package) -> Callable[[Mapping[str, Any]], list[str] | None]:
    """Take the function that reads a ModelOpt config; it gives the list of excluded modules."""
    name = "ModelOptQuantConfigBase.from_config"
    read = take(package, MODELOPT, name, QUANT_ALGOS=read_algorithms(package))
    return lambda config: read(_Reader(), config)


class _Reader:
    """What from_config calls, in the place of its class: it gives the list of excluded modules."""

    def __call__(self, *args: Any) -> Any:
        return args[-1]

    def _from_config(self, **kwargs: Any) -> Any:
        return kwargs["exclude_modules"]

    def get_from_keys(self, config: Mapping[str, Any], keys: list[str]) -> Any:
        return next(config[key] for key in keys if key in config)


def make_layer(k: float, v: float) -> Any:
    """Make an attention layer with these scales, for `process_weights_after_loading`."""
    scales = {"k_scale": k, "v_scale": v, "q_scale": -1.0, "prob_scale": -1.0}
    made = {name: torch.tensor(value) for name, value in scales.items()}
    made |= {f"_{name}": torch.tensor(1.0) for name in scales}
    made |= {"_k_scale_cpu": torch.tensor(1.0), "_v_scale_cpu": torch.tensor(1.0)}
    return SimpleNamespace(**made, kv_cache_dtype="fp8", calculate_kv_scales=False)


def take_processing(package: Package) -> Callable[[Any], None]:
    """Take the function that makes the numbers of an attention layer of its loaded scales."""
    process = take(package, KV_CACHE, "BaseKVCacheMethod.process_weights_after_loading")
    return lambda layer: process(None, layer)
