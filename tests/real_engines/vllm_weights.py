"""What vLLM's weight loader puts into its parameters: `vllm_weights.py MODEL RESULT...`.

Runs in vLLM's own environment. For every MODEL, a RESULT: a safetensors file of all parameters,
`loaded.X` as the loader left them and `ready.X` as vLLM has prepared them for its kernels. It ends
there, and no kernel is looked for: the CPU build has none for FP8 matrices without AMX. Models with
experts have no `ready.X`. Of a model that is refused there is the error instead.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm import LLM
from vllm.model_executor.layers.quantization import fp8, modelopt
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_w8a8_fp8,
    compressed_tensors_w8a16_fp8,
)
from vllm.model_executor.layers.quantization.utils import w8a8_utils
from vllm.model_executor.model_loader import base_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

REFUSED = ".refused"
"""Suffix of what is written in place of RESULT where vLLM does not load MODEL."""
KERNELS = ("init_fp8_linear_kernel", "init_wfp8_a16_linear_kernel")
MODULES = (fp8, modelopt, compressed_tensors_w8a8_fp8, compressed_tensors_w8a16_fp8)


class LoadedError(Exception):
    """The weights are loaded, which is all that was asked."""


class NoKernel:
    """Stands where the kernel would, and leaves the weights as they are."""

    def input_quant_key(self) -> None:
        """Take inputs that are not quantized yet."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Want no other layout."""


def scaled_fp8_quant(
    values: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what vLLM's CUDA kernel does, which the CPU build lacks: multiply, saturate, cast.

    csrc/libtorch_stable/quantization/w8a8/fp8/common.cu divides once, one by the scale.
    """
    scaled = values.float() * (1 / scale.float())
    return scaled.clamp(-448, 448).to(torch.float8_e4m3fn), scale


def main() -> None:
    """Load every model of the command line as far as its weights."""
    for module in MODULES:
        for name in KERNELS:
            if hasattr(module, name):
                setattr(module, name, lambda **_: NoKernel())
    w8a8_utils.ops.scaled_fp8_quant = scaled_fp8_quant
    paths = list(map(Path, sys.argv[1:]))
    for model, result in zip(paths[::2], paths[1::2], strict=True):
        try:
            save_file(load(model), result)
        except Exception as error:  # noqa: BLE001 -- whatever the engine says is the answer
            result.with_suffix(REFUSED).write_text(f"{type(error).__name__}: {error}")


def load(model: Path) -> dict[str, torch.Tensor]:
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

    def process_and_stop(module: torch.nn.Module, *arguments: Any) -> None:
        if not any("experts" in name for name in taken):  # which have no form without a kernel
            process(module, *arguments)
            take("ready", module)
        raise LoadedError

    DefaultModelLoader.load_weights = load_and_take
    base_loader.process_weights_after_loading = process_and_stop
    try:
        LLM(
            model=str(model),
            dtype="bfloat16",
            kv_cache_dtype="fp8",
            max_model_len=64,
            max_num_batched_tokens=64,
            max_num_seqs=4,
            num_gpu_blocks_override=64,
            block_size=32,
            skip_tokenizer_init=True,
            enforce_eager=True,
        )
    except LoadedError:
        return taken
    finally:
        DefaultModelLoader.load_weights = load_weights
        base_loader.process_weights_after_loading = process
    raise AssertionError(f"{model}: vLLM never came to its weights")


if __name__ == "__main__":
    main()
