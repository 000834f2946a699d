"""Store K and V with vLLM's own kernels, in Triton's interpreter, and read them or attend to them.

`TRITON_INTERPRET=1 python kernel_job.py IN OUT FOLDER`, in the environment of vLLM. IN holds
"stored", pairs of K and V, and "attended", triples of q, K and V with their scales. OUT gets what
the cache holds, by cache type, and the outputs of attention over it, as a prompt and token by
token. FOLDER has files of SGLang. What is stored rotated stays so: K of turboquant and ultraquant,
K and V of INT4, which are given rotated.
"""

import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from vllm import triton_utils

# A module of kernels takes Triton from here when it is imported.
triton_utils.HAS_TRITON, triton_utils.triton, triton_utils.tl = True, triton, tl

from vllm.model_executor.layers.quantization.turboquant.centroids import solve_lloyd_max  # noqa: E402
from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig  # noqa: E402
from vllm.v1.attention.backends.turboquant_attn import _build_hadamard  # noqa: E402
from vllm.v1.attention.ops import (  # noqa: E402
    int4_per_token_head,
    triton_reshape_and_cache_flash,
    triton_turboquant_decode,
    triton_turboquant_store,
    triton_unified_attention,
)
from vllm.v1.attention.ops.ultraquant import format as layout  # noqa: E402
from vllm.v1.attention.ops.ultraquant import triton_dequant, triton_store  # noqa: E402
from vllm.v1.kv_cache_interface import KVQuantMode  # noqa: E402

_BLOCK = 16
_SEGMENTS = 4
"""A decoding step cuts the keys into so many parts."""
_E4M3 = torch.float8_e4m3fn
_PRESETS = ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc")
"""Of TurboQuant."""
_PER_TOKEN = {
    "fp8_per_token_head": (_E4M3, KVQuantMode.FP8_PER_TOKEN_HEAD),
    "int8_per_token_head": (torch.int8, KVQuantMode.INT8_PER_TOKEN_HEAD),
}
_INTERPRETED = interpreter._convert_float


def _convert(values: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    """Cast to E4M3 by torch: the interpreter drops the carry to the next power of two."""
    if target != tl.float8e4nv or source != tl.float32:
        return _INTERPRETED(values, source, target, rounding)
    exact = torch.from_numpy(np.ascontiguousarray(values).view(np.float32)).clamp(-448, 448)
    return exact.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def main() -> None:
    """Run the kernels of every type."""
    interpreter._convert_float = _convert
    # The kernel that writes FP8 asks which GPU it runs on: Hopper.
    triton_reshape_and_cache_flash._is_supported_kv_cache_dtype = lambda _: True
    torch.cuda.get_device_capability = lambda _=None: (9, 0)
    given = torch.load(sys.argv[1])
    latents = store_latents(*given["latents"])
    found: dict[str, dict[str, Any]] = {"stored": {}, "attended": {}}
    found["stored"]["latents"] = latents
    for name, (key, value) in given["stored"].items():
        found["stored"] |= {f"{name}/{kind}": pair for kind, pair in store_all(key, value)}
    for name, call in given["attended"].items():
        found["attended"] |= {f"{name}/{kind}": both for kind, both in attend_all(**call)}
    torch.save(found, sys.argv[2])


def open_sglang(name: str) -> Any:
    """Import a file of SGLang, compiled for nothing, on no platform."""
    torch.compile = lambda function: function
    sys.modules.setdefault("sglang", types.ModuleType("sglang"))
    sys.modules.setdefault("sglang.srt", types.ModuleType("sglang.srt"))
    context: Any = types.ModuleType("sglang.srt.runtime_context")
    context.get_platform = None
    sys.modules["sglang.srt.runtime_context"] = context
    spec = importlib.util.spec_from_file_location(name, f"{sys.argv[3]}/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def store_mxfp8(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Store with a power of two for 32 values, in pages that begin with an empty slot."""
    tokens, heads, size = key.shape
    slots, chunks = -(-(tokens + 1) // 128) * 128, size // 32
    codes = [torch.zeros(slots, heads, size, dtype=torch.float8_e4m3fn) for _ in range(2)]
    shape = (slots // 128, heads, 32, 4, chunks)
    scales = [torch.zeros(shape, dtype=torch.uint8) for _ in range(2)]
    places = torch.arange(1, tokens + 1)
    store = open_sglang("mxfp8_quant_store_kv").quant_store_kv_mxfp8
    store(key, value, places, *codes, *scales)
    page, within = places // 128, places % 128
    read = []
    for code, scale in zip(codes, scales, strict=True):
        exponents = scale[page, :, within % 32, within // 32].float() - 127
        blocks = code[places].float().unflatten(-1, (-1, 32))
        read.append((blocks * exponents.exp2()[..., None]).flatten(-2))
    return read[0], read[1]


def store_mx_block16(x: torch.Tensor) -> torch.Tensor:
    """Store E2M1 in blocks of 16, and read back, by SGLang's own two functions."""
    util = open_sglang("kvfp4_tensor").FP4MXBlock16KVQuantizeUtil
    packed, scales = util.batched_quantize(x.float())
    return util.batched_dequantize(packed, scales, torch.float32)


def store_latents(latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Store latents [N, D] in tiles of 128 and the rotary part, and read them: fp32."""
    tokens, size = latent.shape
    store = open_sglang("dsa_quant_k_cache").quantize_k_cache_separate
    stored, rotary = store(latent, rope)
    flat = stored.reshape(tokens, -1)
    codes = flat[:, :size].view(torch.float8_e4m3fn).float()
    scales = flat[:, size:].contiguous().view(torch.float32)
    read = (codes.unflatten(-1, (-1, 128)) * scales[..., None]).flatten(-2)
    return read, rotary.reshape(tokens, -1).view(torch.bfloat16).float()


def store_all(
    key: torch.Tensor, value: torch.Tensor
) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Store K and V [N, H, D] as every type that fits, and read them back: fp32."""
    size = key.shape[-1]
    for name in _PER_TOKEN:
        yield name, read_per_token_head(*store_per_token_head(key, value, name)[:4], len(key))
    yield "int4_per_token_head", store_int4(key, value)
    yield "fp4_mx_block16", (store_mx_block16(key), store_mx_block16(value))
    if size & (size - 1):
        return
    yield "mxfp8", store_mxfp8(key, value)
    for preset in _PRESETS:
        yield f"turboquant_{preset}", read_turboquant(key, value, f"turboquant_{preset}")
    if key.dtype != torch.float32:
        yield "ultraquant_4bit", store_ultraquant(key, value)


def _make_caches(shape: torch.Size, dtype: torch.dtype, factor: int = 1) -> list[torch.Tensor]:
    """Make the caches of K and V and of their scales, and the slots of all tokens."""
    tokens, heads, size = shape
    blocks = -(-tokens // _BLOCK)
    caches = [torch.zeros(blocks, _BLOCK, heads, size // factor).to(dtype) for _ in range(2)]
    scales = [torch.zeros(blocks, _BLOCK, heads) for _ in range(2)]
    return [*caches, *scales, torch.arange(tokens)]


def store_per_token_head(key: torch.Tensor, value: torch.Tensor, name: str) -> list[torch.Tensor]:
    """Store with a scale for each token and head: the caches, and those of the scales."""
    dtype, mode = _PER_TOKEN[name]
    *caches, slots = _make_caches(key.shape, dtype)
    triton_reshape_and_cache_flash.triton_reshape_and_cache_flash_per_token_head_quant(
        key, value, *caches, slots, mode
    )
    return caches


def read_per_token_head(
    k: torch.Tensor, v: torch.Tensor, k_scale: torch.Tensor, v_scale: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read what is stored with a scale for each token and head."""
    read = (k.float() * k_scale[..., None], v.float() * v_scale[..., None])
    key, value = (each.flatten(0, 1)[:count] for each in read)
    return key, value


def store_fp8(
    key: torch.Tensor, value: torch.Tensor, k_scale: torch.Tensor, v_scale: torch.Tensor
) -> list[torch.Tensor]:
    """Store in E4M3 with one scale for K and one for V."""
    *caches, slots = _make_caches(key.shape, torch.uint8)
    triton_reshape_and_cache_flash.triton_reshape_and_cache_flash(
        key, value, *caches[:2], slots, "fp8", k_scale, v_scale
    )
    return [each.view(_E4M3) for each in caches[:2]]


def attend_all(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    q_scale: torch.Tensor,
) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Attend over the caches of the types that attention kernels read, in the model's dtype.

    q is [N, heads, D], K and V [N, KV heads, D]. INT4 is left out: on a CPU its kernel rotates q in
    fp32, on a GPU in bfloat16.
    """
    descales = {"k_descale": k_scale, "v_descale": v_scale}
    k, v = store_fp8(key, value, k_scale, v_scale)
    fp8 = {"k": k, "v": v, "kv_quant_mode": KVQuantMode.FP8_PER_TENSOR, **descales}
    yield "fp8", attend(query, q_descale=None, **fp8)
    codes = (query.float() / q_scale).clamp(-448, 448).to(_E4M3)
    yield "fp8, q in FP8", attend(codes, q_descale=q_scale, **fp8, dtype=query.dtype)
    for name, (_, mode) in _PER_TOKEN.items():
        k, v, *scales = store_per_token_head(key, value, name)
        caches = dict(zip(("k_scale_cache", "v_scale_cache"), scales, strict=True))
        none = dict.fromkeys(("q_descale", "k_descale", "v_descale"))
        yield name, attend(query, k=k, v=v, kv_quant_mode=mode, **caches, **none)
    for preset in _PRESETS:
        decoded = decode_turboquant(query, key, value, f"turboquant_{preset}")
        yield f"turboquant_{preset}", (decoded, decoded)  # a prompt is attended to unquantized


def decode_turboquant(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, preset: str
) -> torch.Tensor:
    """Attend token by token over a cache of TurboQuant."""
    count, _, size = query.shape
    cache, levels, rotation, config = store_turboquant(key, value, preset)
    table = torch.arange(len(cache), dtype=torch.int32)[None].expand(count, -1).contiguous()
    output: torch.Tensor = triton_turboquant_decode.triton_turboquant_decode_attention(
        query=query,
        kv_cache=cache,
        block_table=table,
        seq_lens=torch.arange(1, count + 1, dtype=torch.int32),
        Pi=rotation,
        centroids=levels,
        scale=size**-0.5,
        mse_bits=config.key_mse_bits,
        key_packed_size=config.key_packed_size,
        value_quant_bits=config.effective_value_quant_bits,
        key_fp8=config.key_fp8,
        norm_correction=config.norm_correction,
        max_num_kv_splits=_SEGMENTS,
    )
    return output


def attend(
    query: torch.Tensor, *, k: torch.Tensor, dtype: torch.dtype | None = None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to a prompt at once, and token by token."""
    count, heads, size = query.shape
    outputs = torch.zeros(2, count, heads, size, dtype=dtype or query.dtype)
    asked = {
        "k": k,
        "softmax_scale": size**-0.5,
        "causal": True,
        "window_size": (-1, -1),
        "block_table": torch.arange(len(k), dtype=torch.int32)[None],
        "softcap": 0.0,
        "max_seqlen_k": count,
        **options,
    }
    triton_unified_attention.unified_attention(
        q=query, out=outputs[0], max_seqlen_q=count, **asked, **_count(count, count)
    )
    for number in range(count):
        triton_unified_attention.unified_attention(
            q=query[number : number + 1],
            out=outputs[1, number : number + 1],
            max_seqlen_q=1,
            seq_threshold_3D=1,
            num_par_softmax_segments=_SEGMENTS,
            softmax_segm_output=torch.zeros(1, heads, _SEGMENTS, triton.next_power_of_2(size)),
            softmax_segm_max=torch.zeros(1, heads, _SEGMENTS),
            softmax_segm_expsum=torch.zeros(1, heads, _SEGMENTS),
            **asked,
            **_count(1, number + 1),
        )
    return outputs[0], outputs[1]


def _count(queries: int, keys: int) -> dict[str, torch.Tensor]:
    """Give the lengths of the only sequence."""
    return {
        "cu_seqlens_q": torch.tensor([0, queries], dtype=torch.int32),
        "seqused_k": torch.tensor([keys], dtype=torch.int32),
    }


def store_int4(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Store what is rotated already in 4-bit integers."""
    *caches, slots = _make_caches(key.shape, torch.uint8, factor=2)
    int4_per_token_head._run_reshape_kernel(
        int4_per_token_head._reshape_cache_int4_kernel,
        key=key,
        value=value,
        key_cache=caches[0],
        value_cache=caches[1],
        k_scale_cache=caches[2],
        v_scale_cache=caches[3],
        slot_mapping=slots,
        packing_factor=2,
    )
    k, v = (
        _read_int4(codes, scale).flatten(0, 1)[: len(key)]
        for codes, scale in zip(caches[:2], caches[2:], strict=True)
    )
    return k, v


def _read_int4(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    bits = scale.view(torch.int32)
    nibbles = torch.stack([codes & 0xF, codes >> 4], -1).flatten(-2).float()
    exact = (bits & -16).view(torch.float32)
    return (nibbles - (bits & 0xF).float()[..., None]) * exact[..., None]


def store_turboquant(
    key: torch.Tensor, value: torch.Tensor, preset: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, TurboQuantConfig]:
    """Store with the levels of a Gaussian: the cache, the levels and the rotation."""
    for module in (triton_turboquant_store, triton_turboquant_decode):
        module._use_fp8_e4b15 = lambda _device: 0  # of Hopper
    tokens, heads, size = key.shape
    config = TurboQuantConfig.from_cache_dtype(preset, size)
    levels, middles = solve_lloyd_max(size, config.centroid_bits)
    rotation = _build_hadamard(size, "cpu")
    blocks = -(-tokens // _BLOCK)
    cache = torch.zeros(blocks, _BLOCK, heads, config.slot_size_aligned, dtype=torch.uint8)
    triton_turboquant_store.triton_turboquant_store(
        key,
        value,
        cache,
        torch.arange(tokens, dtype=torch.int32),
        rotation,
        middles,
        config.mse_bits,
        config.key_packed_size,
        config.value_quant_bits,
        config.key_fp8,
    )
    return cache, levels, rotation, config


def read_turboquant(
    key: torch.Tensor, value: torch.Tensor, preset: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Store, and read what a further prompt reads."""
    tokens, heads, size = key.shape
    cache, levels, _, config = store_turboquant(key, value, preset)
    k = torch.zeros(1, heads, tokens, size)
    v = torch.zeros_like(k)
    table = torch.arange(len(cache), dtype=torch.int32)[None]
    triton_turboquant_decode._tq_full_dequant_kv[(tokens, heads)](
        cache,
        table,
        levels,
        k,
        v,
        *k.stride()[:3],
        *v.stride()[:3],
        *cache.stride()[:3],
        table.stride(0),
        HEAD_DIM=size,
        BLOCK_SIZE=_BLOCK,
        NUM_KV_HEADS=heads,
        MSE_BYTES=-(-size * config.key_mse_bits // 8),
        KPS=config.key_packed_size,
        VQB=config.effective_value_quant_bits,
        VAL_DATA_BYTES=-(-size * config.effective_value_quant_bits // 8),
        MSE_BITS=config.key_mse_bits,
        KEY_FP8=int(config.key_fp8),
        BLOCK_D=triton.next_power_of_2(size),
        NORM_CORRECTION=int(config.norm_correction),
    )
    read_key, read_value = (each[0].transpose(0, 1) for each in (k, v))
    return read_key, read_value


def store_ultraquant(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Store E2M1 in blocks of 32."""
    tokens, heads, size = key.shape
    blocks = -(-tokens // _BLOCK)
    slot = layout.slot_size(size)
    cache = torch.zeros(blocks, _BLOCK, heads, slot + slot % 2, dtype=torch.uint8)
    triton_store.ultraquant_store(key, value, cache, torch.arange(tokens))
    k = torch.zeros(1, heads, tokens, size, dtype=torch.bfloat16)
    v = torch.zeros_like(k)
    table = torch.arange(blocks, dtype=torch.int32)[None]
    triton_dequant.ultraquant_full_dequant_kv(cache, table, k, v, tokens)
    read_key, read_value = (each[0].transpose(0, 1).float() for each in (k, v))
    return read_key, read_value


if __name__ == "__main__":
    main()
