"""What vLLM's weight loader puts into a model, in a fork of `vllm_forks.py`.

Runs in vLLM's own environment. The result is a safetensors file of parameters: `loaded.X` as the
loader left them, `ready.X` as vLLM has prepared them for its kernels, `held.LAYER.k`, `.v` and
`.is_fp8` of attention layers, and `pooling` where vLLM runs the model to embed text. No kernel is
looked for: the CPU build has none for FP8 matrices without AMX and none for FP4, and experts keep
the form in which they were loaded.
"""

import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm import SamplingParams
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.quantization import fp8, modelopt
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_w4a4_mxfp4,
    compressed_tensors_w4a4_nvfp4,
    compressed_tensors_w8a8_fp8,
    compressed_tensors_w8a8_mxfp8,
    compressed_tensors_w8a16_fp8,
)
from vllm.model_executor.layers.quantization.utils import w8a8_utils
from vllm.model_executor.model_loader import base_loader, get_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment
from vllm_worker import TINY_SERVER

KERNELS = (
    *("init_fp8_linear_kernel", "init_wfp8_a16_linear_kernel"),
    *("init_nvfp4_linear_kernel", "init_mxfp4_linear_kernel", "init_mxfp8_linear_kernel"),
)
MODULES = (
    *(fp8, modelopt, compressed_tensors_w8a8_fp8, compressed_tensors_w8a16_fp8),
    *(compressed_tensors_w4a4_nvfp4, compressed_tensors_w4a4_mxfp4, compressed_tensors_w8a8_mxfp8),
)
PACKAGE = str(Path(vllm.__file__).parent)


class NoKernel:
    """Stands where the kernel would, and leaves the weights as they are."""

    def input_quant_key(self) -> None:
        """Take inputs that are not quantized yet."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Want no other layout."""

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: object = None) -> torch.Tensor:
        """Give zeros, from which latent attention makes a weight that nothing here reads."""
        del bias
        return x.new_zeros(*x.shape[:-1], layer.output_size_per_partition)


def scaled_fp8_quant(
    values: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what vLLM's CUDA kernel does, which the CPU build lacks: multiply, saturate, cast.

    csrc/libtorch_stable/quantization/w8a8/fp8/common.cu divides once, one by the scale.
    """
    scaled = values.float() * (1 / scale.float())
    return scaled.clamp(-448, 448).to(torch.float8_e4m3fn), scale


def leave_out_kernels() -> None:
    """Change vLLM so that a CPU loads what only GPUs compute."""
    for module in MODULES:
        for name in KERNELS:
            if hasattr(module, name):
                setattr(module, name, lambda **_: NoKernel())
    w8a8_utils.ops.scaled_fp8_quant = scaled_fp8_quant
    # With AMX, latent attention packs its weights, and releases those that are compared.
    torch.cpu._is_amx_tile_supported = lambda: False
    # Processors with bfloat16 pack convolutions, of sizes that tiny models do not have.
    del w8a8_utils.ops.causal_conv1d_weight_pack
    _set_torch_accelerator_to_noop()


def describe(error: BaseException) -> str:
    """Name the error and the last line of vLLM that it passed."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if PACKAGE in f.filename]
    where = f"{frames[-1].filename.removeprefix(PACKAGE)[1:]}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}\n{where}"


def load(model: str, dtype: str) -> dict[str, torch.Tensor]:
    """Load one model, and take copies of its parameters on the way."""
    taken: dict[str, torch.Tensor] = {}
    load_weights = DefaultModelLoader.load_weights
    process = base_loader.process_weights_after_loading

    def take(prefix: str, module: torch.nn.Module) -> None:
        for name, tensor in module.named_parameters():
            taken[f"{prefix}.{name}"] = tensor.detach().clone().contiguous()

    def load_and_take(loader: Any, module: torch.nn.Module, *arguments: Any) -> None:
        load_weights(loader, module, *arguments)
        take("loaded", module)

    def process_and_take(module: torch.nn.Module, *arguments: Any) -> None:
        for inner in module.modules():
            if isinstance(getattr(inner, "quant_method", None), FusedMoEMethodBase):
                inner.quant_method.process_weights_after_loading = lambda _: None
        process(module, *arguments)
        take("ready", module)

    DefaultModelLoader.load_weights = load_and_take
    base_loader.process_weights_after_loading = process_and_take
    config = make_config(model, dtype)
    if config.model_config.runner_type == "generate":  # as a server does at its start
        SamplingParams.from_optional(**config.model_config.get_diff_sampling_param())
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
        init_worker_distributed_environment(config, 0, f"file://{folder}/ranks", 0, "gloo")
        loader = get_model_loader(config.load_config)
        loader.load_model(vllm_config=config, model_config=config.model_config)
    if config.model_config.runner_type != "generate":
        taken["pooling"] = torch.tensor(True)
    return taken | list_held(config)


def make_config(model: str, dtype: str) -> VllmConfig:
    """Make the config that a server would start with."""
    return EngineArgs(
        model=model,
        dtype=dtype,
        # classes that see ask their processor for ids
        **{**TINY_SERVER, "skip_tokenizer_init": not Path(model, "tokenizer.json").exists()},
    ).create_engine_config()


def list_held(config: VllmConfig) -> dict[str, torch.Tensor]:
    """Give the scales that attention layers hold, and whether their cache is FP8."""
    held: dict[str, torch.Tensor] = {}
    for name, layer in config.compilation_config.static_forward_context.items():
        if hasattr(layer, "_k_scale"):
            held[f"held.{name}.k"] = layer._k_scale.detach().float().reshape(-1).clone()
            held[f"held.{name}.v"] = layer._v_scale.detach().float().reshape(-1).clone()
            is_fp8 = str(layer.kv_cache_dtype).startswith("fp8")
            held[f"held.{name}.is_fp8"] = torch.tensor(is_fp8)
    return held
