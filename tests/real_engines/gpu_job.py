"""Run vLLM's GPU kernels on the numbers of `tests/kit/gpu_inputs.py`: `gpu_job.py OUT`.

Runs in an environment with vLLM, on a Hopper GPU, with the repository as its folder. OUT is
`tests/engines/goldens/h100.safetensors`, which `tests/engines/test_gpu_goldens.py` compares with
the emulation.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import vllm
from safetensors.torch import save_file
from vllm import _custom_ops as ops
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func
from vllm.v1.attention.ops import triton_reshape_and_cache_flash
from vllm.v1.kv_cache_interface import KVQuantMode

from tests.kit.gpu_inputs import (
    ATTENTION_SCALES,
    DTYPES,
    HEAD_SIZES,
    KV_HEADS,
    RECORDED_ROWS,
    SCALES,
    draw_activations,
    draw_attention,
    draw_wide,
    list_edges,
)

_BLOCK = 16
_E4M3 = torch.float8_e4m3fn
_PER_TOKEN = {
    "fp8_per_token_head": (_E4M3, KVQuantMode.FP8_PER_TOKEN_HEAD),
    "int8_per_token_head": (torch.int8, KVQuantMode.INT8_PER_TOKEN_HEAD),
}

Answer = tuple[str, torch.Tensor]


def main() -> None:
    """Write the answers of every kernel."""
    answers: dict[str, torch.Tensor] = {}
    with set_current_vllm_config(VllmConfig()), torch.device("cuda"):
        for name, dtype in DTYPES.items():
            for key, answer in (*store_all(dtype), *quantize_all(dtype)):
                answers[f"{name}/{key}"] = answer
        for size in HEAD_SIZES:
            answers[f"attention/{size}"] = attend(size)[RECORDED_ROWS]
    stored = {name: _as_bytes(x).cpu().contiguous().clone() for name, x in answers.items()}
    about = {"vllm": vllm.__version__, "gpu": torch.cuda.get_device_name()}
    save_file(stored, sys.argv[1], metadata=about)


def _draw(draw: Callable[..., torch.Tensor], *given: Any, **options: Any) -> torch.Tensor:
    """Draw on the CPU, whose generator gives the same numbers everywhere."""
    with torch.device("cpu"):
        return draw(*given, **options).cuda()


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.dtype in (_E4M3, torch.int8) else x


def store(x: torch.Tensor, scale: torch.Tensor, kind: str = "fp8") -> torch.Tensor:
    """Store K [N, heads, D] in a paged cache: codes, uint8 of the same shape."""
    count, heads, size = x.shape
    shape = (-(-count // _BLOCK), _BLOCK, heads, size)
    caches = [torch.zeros(shape, dtype=torch.uint8) for _ in range(2)]
    ops.reshape_and_cache_flash(x, x, *caches, torch.arange(count), kind, scale, scale)
    assert torch.equal(*caches)
    return caches[0].flatten(0, 1)[:count]


def store_all(dtype: torch.dtype) -> Iterator[Answer]:
    """Write the KV cache."""
    x, edges = _draw(draw_wide, dtype, 32, 3, 64, seed=1), _draw(list_edges, dtype)[:, None]
    for name, scales in SCALES.items():
        scale = torch.tensor(scales)
        yield f"kv/{name}", store(x, scale)
        if len(scales) == 1:
            yield f"kv edges/{name}", store(edges, scale)
            yield f"kv edges e5m2/{name}", store(edges, scale, "fp8_e5m2")
    for name, (stored, mode) in _PER_TOKEN.items():
        shape = (2, _BLOCK, 3, 64)
        caches = [torch.zeros(shape).to(stored) for _ in range(2)]
        scales = [torch.zeros(shape[:3]) for _ in range(2)]
        write = triton_reshape_and_cache_flash.triton_reshape_and_cache_flash_per_token_head_quant
        write(x, x, *caches, *scales, torch.arange(32), mode)
        yield f"{name}/codes", caches[0].flatten(0, 1)
        yield f"{name}/scales", scales[0].flatten(0, 1)


def quantize_all(dtype: torch.dtype) -> Iterator[Answer]:
    """Quantize q and the inputs of linears, by the kernel and by what torch compiles."""
    x, edges = _draw(draw_activations, dtype), _draw(list_edges, dtype)
    for mode in ("eager", "compiled"):
        for name in ("1", "0.037"):
            quantize = _make_quantizer(mode, GroupShape.PER_TENSOR, is_static=True)
            yield f"static/{mode}/{name}", quantize(edges, torch.tensor(SCALES[name]))[0]
        codes, scales = _make_quantizer(mode, GroupShape.PER_TOKEN, is_static=False)(x)
        yield f"token/{mode}/codes", codes
        yield f"token/{mode}/scales", scales
    for name, is_power in (("group", False), ("group of a power of two", True)):
        codes, scales = per_token_group_quant_fp8(x, 128, use_ue8m0=is_power)
        yield f"{name}/codes", codes
        yield f"{name}/scales", scales


def _make_quantizer(mode: str, shape: Any, *, is_static: bool) -> Any:
    module = QuantFP8(is_static, shape)
    if mode == "eager":
        return module.forward_cuda
    return torch.compile(module.forward_native, dynamic=False)


def attend(size: int) -> torch.Tensor:
    """Attend to a prompt over an FP8 cache with FlashAttention 3: [N, heads, D], bfloat16."""
    with torch.device("cpu"):
        given = {name: x.cuda() for name, x in draw_attention(size).items()}
    scales = {name: torch.tensor([each]) for name, each in ATTENTION_SCALES.items()}
    count = len(given["q"])
    query, _ = ops.scaled_fp8_quant(given["q"].flatten(1), scales["q"])
    caches = {}
    for name in ("k", "v"):
        codes = torch.zeros(-(-count // _BLOCK) * _BLOCK, KV_HEADS, size, dtype=torch.uint8)
        codes[:count] = store(given[name], scales[name])
        caches[name] = codes.view(_E4M3).unflatten(0, (-1, _BLOCK))
    output = torch.empty_like(given["q"])
    flash_attn_varlen_func(
        q=query.view(output.shape),
        **caches,
        out=output,
        cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32),
        max_seqlen_q=count,
        seqused_k=torch.tensor([count], dtype=torch.int32),
        max_seqlen_k=count,
        softmax_scale=size**-0.5,
        causal=True,
        window_size=[-1, -1],
        block_table=torch.arange(len(caches["k"]), dtype=torch.int32)[None],
        fa_version=3,
        num_splits=1,
        **{f"{name}_descale": each.expand(1, KV_HEADS) for name, each in scales.items()},
    )
    return output


if __name__ == "__main__":
    main()
