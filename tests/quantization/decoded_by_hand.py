"""The values of quantized checkpoints, computed with numpy, ml_dtypes and a few loops.

This module shares no code with the product.
"""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import torch

from tests.kit.checkpoints import Tensors, load_folder

Array = np.ndarray
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
COMPANIONS = (
    *("_scale", "_scale_2", "_scale_inv", "_global_scale", "_blocks", "_scales"),
    *("weight_shape", "_zero_point"),
)
DTYPES = {
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float16: np.float16,
    torch.float32: np.float32,
}


def decode_folder(folder: Path, dtype: torch.dtype | None = None) -> Tensors:
    """Decode a folder: quantized weights in `dtype` (that of config.json), the others unchanged."""
    stored = load_folder(folder)
    config = json.loads((folder / "config.json").read_text())
    named = config.get("dtype") or config.get("torch_dtype") or config["text_config"]["dtype"]
    dtype = dtype or getattr(torch, named)
    values: Tensors = {}
    for name, tensor in stored.items():
        if name.endswith("_blocks"):
            plain = name.removesuffix("_blocks")
            values[plain] = round_to(decode_experts(tensor, stored[f"{plain}_scales"]), dtype)
        elif name.endswith(COMPANIONS):
            continue
        elif tensor.dtype in FLOATS:
            values[name] = tensor
        else:
            plain = name.replace(".weight_packed", ".weight")
            values[plain] = round_to(decode_weight(name, stored), dtype)
    return values


def round_to(values: Array, dtype: torch.dtype) -> torch.Tensor:
    """Round fp32 values to a dtype with ml_dtypes."""
    rounded = np.ascontiguousarray(values.astype(np.float32).astype(DTYPES[dtype]))
    return torch.from_numpy(rounded.view(np.uint8)).view(dtype)


def decode_weight(name: str, stored: Tensors) -> Array:
    """Decode one weight: fp32."""
    start = name.removesuffix("_packed").removesuffix("weight")
    is_stacked = not name.endswith(("weight", "weight_packed"))
    names = [f"{start}{leaf}" for leaf in ("weight_scale", "weight_scale_inv")]
    names += [f"{name}_{leaf}" for leaf in ("scale_inv", "scale", "weight_scale")] * is_stacked
    (scale_name,) = (each for each in names if each in stored)
    tensor, scale = stored[name], decode_numbers(stored[scale_name])
    if tensor.dtype is torch.uint8:
        codes = unpack_fp4(tensor.numpy())
        if f"{start}weight_scale_2" in stored:
            scale = scale * np.float32(stored[f"{start}weight_scale_2"].item())
        if f"{start}weight_global_scale" in stored:
            scale = scale / np.float32(stored[f"{start}weight_global_scale"].item())
    elif tensor.dtype is torch.int32:
        rows, columns = stored[f"{start}weight_shape"].tolist()
        codes = unpack_int4(tensor.numpy(), columns)
        assert codes.shape == (rows, columns)
    elif tensor.dtype is torch.int8:
        codes = tensor.numpy().astype(np.float32)
    else:
        kinds = {torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn}
        kinds |= {torch.float8_e4m3fnuz: ml_dtypes.float8_e4m3fnuz}
        codes = tensor.view(torch.uint8).numpy().view(kinds[tensor.dtype]).astype(np.float32)
    return codes * spread(scale, codes.shape, is_mx=stored[scale_name].dtype is torch.uint8)


def decode_numbers(scale: torch.Tensor) -> Array:
    """Decode scales: floats, e4m3 of NVFP4, or bytes with the exponents of powers of two."""
    if scale.dtype is torch.uint8:
        return np.exp2(scale.numpy().astype(np.float64) - 127).astype(np.float32)
    if scale.dtype is torch.float8_e4m3fn:
        codes = scale.view(torch.uint8).numpy()
        return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return scale.float().numpy()


def spread(scale: Array, shape: tuple[int, ...], *, is_mx: bool) -> Array:
    """Repeat scales so that each value of a weight has one."""
    if scale.size == 1:
        return scale.reshape((1,) * len(shape))
    if scale.ndim == 1:
        return scale.reshape(-1, *(1,) * (len(shape) - 1))
    for axis in (-2, -1):
        size, count = shape[axis], scale.shape[axis]
        if count not in (1, size):
            is_block = axis == -2 or size % count or (shape[-2] != scale.shape[-2] and not is_mx)
            scale = np.repeat(scale, 128 if is_block else size // count, axis)
    return scale[..., : shape[-2], : shape[-1]]


def unpack_fp4(octets: Array) -> Array:
    """Unpack two e2m1 numbers from every byte, the first in the low bits."""
    pairs = np.stack((octets % 16, octets // 16), axis=-1).astype(np.uint8)
    return pairs.view(ml_dtypes.float4_e2m1fn).astype(np.float32).reshape(*octets.shape[:-1], -1)


def unpack_int4(words: Array, columns: int) -> Array:
    """Unpack eight integers of a word, one after the other."""
    rows = []
    for row in words.astype(np.int64) % 2**32:
        numbers = [(int(word) // 16**place) % 16 - 8 for word in row for place in range(8)]
        rows.append(numbers[:columns])
    return np.array(rows, dtype=np.float32)


def decode_experts(blocks: torch.Tensor, scales: torch.Tensor) -> Array:
    """Decode gpt_oss's experts: [experts, in, out]."""
    values = unpack_fp4(blocks.numpy()) * decode_numbers(scales)[..., None]
    return values.reshape(*values.shape[:2], -1).transpose(0, 2, 1)
