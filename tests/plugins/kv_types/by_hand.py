"""Cache types value by value, in numpy: nothing here is the product's.

Every function takes one vector of a token and head, and gives what is read back.
"""

import math
import struct
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

import ml_dtypes
import numpy as np
import torch

F32 = np.float32
Vector = np.ndarray
OneVector = Callable[[Vector], Vector]


def draw_vectors(size: int, dtype: torch.dtype, *, seed: int = 3) -> torch.Tensor:
    """Draw vectors [batch, heads, tokens, size] of many magnitudes, with zeros and outliers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 2, 12, size, generator=generator)
    x = x * torch.exp(2 * torch.randn(2, 2, 12, 1, generator=generator))
    x[0, 0, 0] = 0
    x[0, 1, 1, 5] *= 1000
    x[1, 0, 2] *= 1e-7
    x[1, 1, 3] = 1.5
    return x.to(dtype)


def store_all(store: OneVector, x: torch.Tensor) -> torch.Tensor:
    rows = [store(row.numpy()) for row in x.float().reshape(-1, x.shape[-1])]
    return torch.from_numpy(np.stack(rows)).reshape(x.shape)


def fp8_per_token_head(x: Vector) -> Vector:
    scale = max(F32(np.abs(x).max()) / F32(448), F32(1e-6))
    codes = np.clip(x * (F32(1) / scale), -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return codes.astype(F32) * scale


def int8_per_token_head(x: Vector) -> Vector:
    """Round each value, halves away from zero."""
    scale = max(F32(np.abs(x).max()) / F32(127), F32(1e-6))
    scaled = x * (F32(1) / scale)
    codes = [int(F32(each) + F32(0.5 if each >= 0 else -0.5)) for each in scaled]
    return np.array(np.clip(codes, -128, 127), F32) * scale


def int4_as_rotated(x: Vector) -> Vector:
    """Hide the zero point in the lowest bits of the scale, and read it from there."""
    low, high = F32(x.min()), F32(x.max())
    scale = max((high - low) / F32(15), F32(1e-6))
    zero = min(max(_round_half_away(-low / scale), 0), 15)
    inverse = F32(1) / scale
    codes = [min(max(_round_half_away(F32(v) * inverse + F32(zero)), 0), 15) for v in x]
    (bits,) = struct.unpack("<I", struct.pack("<f", scale))
    packed = (bits & 0xFFFFFFF0) | zero
    (exact,) = struct.unpack("<f", struct.pack("<I", packed & 0xFFFFFFF0))
    return np.array([F32(code - (packed & 15)) * F32(exact) for code in codes], F32)


def _round_half_away(x: np.floating) -> int:
    return int(F32(x) + F32(0.5)) if x >= 0 else int(F32(x) - F32(0.5))


def int4_per_token_head(x: Vector, dtype: type = ml_dtypes.bfloat16) -> Vector:
    """Rotate a vector of a dtype by signs drawn as vLLM draws them, store it, rotate it back."""
    size = len(x)
    block = size & -size
    generator = torch.Generator().manual_seed(0x9E3779B9)
    signs = (2 * torch.bernoulli(torch.full((block,), 0.5), generator=generator) - 1).numpy()
    matrix = hadamard_matrix(block)
    read = []
    for part in x.reshape(-1, block):
        signed = (part * signs).astype(ml_dtypes.bfloat16).astype(np.float64)
        unit = (signed @ matrix).astype(F32).astype(ml_dtypes.bfloat16).astype(F32)
        read.append((unit * F32(block**0.5)).astype(dtype))
    rotated = int4_as_rotated(np.concatenate(read).astype(F32))
    back = [
        part.astype(np.float64) @ matrix / block**0.5 * signs for part in rotated.reshape(-1, block)
    ]
    return np.concatenate(back).astype(F32)


def hadamard_matrix(size: int) -> np.ndarray:
    """Count the bits that row and column share: [size, size], orthonormal, fp64."""
    signs = [[(-1) ** (row & column).bit_count() for column in range(size)] for row in range(size)]
    return np.array(signs, np.float64) / size**0.5


def nvfp4(x: Vector, scale: float = 1.0) -> Vector:
    """Cast 16 values at a time by ml_dtypes."""
    inverse = F32(1) / (F32(6) * F32(scale))
    read = [
        _nvfp4_block(block, F32(scale), F32(np.abs(block).max()) * inverse)[0]
        for block in x.reshape(-1, 16)
    ]
    return np.concatenate(read)


def nvfp4_4over6(x: Vector, scale: float = 1.0) -> Vector:
    """Take the better of two factors for each block."""
    read = []
    for block in x.reshape(-1, 16):
        wanted = F32(np.abs(block).max()) / F32(6) * (F32(1) / F32(scale))
        six, four = (_nvfp4_block(block, F32(scale), wanted * F32(f)) for f in (1.0, 1.5))
        read.append(four[0] if four[1] < six[1] else six[0])
    return np.concatenate(read)


def _nvfp4_block(block: Vector, scale: np.floating, wanted: np.floating) -> tuple[Vector, float]:
    of_block = F32(np.clip(wanted, 0, 448).astype(ml_dtypes.float8_e4m3fn)) * scale
    factors = F32(1) / of_block if of_block > 0 else F32(0)
    codes = np.clip(block * factors, -6, 6).astype(ml_dtypes.float4_e2m1fn)
    read = codes.astype(F32) * of_block
    return read, float(np.square(read - block, dtype=F32).sum(dtype=F32))


def fp8_tiles(x: Vector) -> Vector:
    """Cast 128 values at a time by ml_dtypes."""
    read = []
    for tile in x.reshape(-1, 128):
        scale = max(F32(np.abs(tile).max()) / F32(448), np.finfo(F32).tiny)
        codes = np.clip(tile / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        read.append(codes.astype(F32) * scale)
    return np.concatenate(read)


def mxfp8(x: Vector) -> Vector:
    """Search the smallest power of two by which 32 values fit E4M3."""
    read = []
    for block in x.reshape(-1, 32):
        amax = max(float(np.abs(block).max()), 1e-30)
        exponent = next(e for e in range(-127, 128) if math.ldexp(448.0, e) >= amax)
        scale = F32(math.ldexp(1.0, exponent))
        codes = (block / scale).astype(F32).astype(ml_dtypes.float8_e4m3fn)
        read.append(codes.astype(F32) * scale)
    return np.concatenate(read)


def mx_block16(x: Vector) -> Vector:
    """Search the smallest power of two by which 16 values fit E2M1; halves go away from zero."""
    magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    read = []
    for block in x.reshape(-1, 16):
        amax = max(float(np.abs(block).max()), 6e-10)
        exponent = next(e for e in range(-40, 128) if math.ldexp(6.0, e) >= amax)
        for each in block:
            code = abs(float(each)) / 2.0**exponent
            nearest = min(magnitudes, key=lambda m: (abs(m - code), -m))
            read.append(math.copysign(nearest, float(each)) * 2.0**exponent)
    return np.array(read, F32)


@lru_cache
def solve_levels(bits: int, size: int) -> np.ndarray:
    """Solve for the best levels of a Gaussian in steps, as vLLM does; Max's table is 0.3 % off.

    vLLM stops at steps of 1e-10 for values of variance 1 / size.
    """
    levels = np.array([7 * (i + 0.5) / 2**bits - 3.5 for i in range(2**bits)])
    for _ in range(200):
        edges = [-10.5, *((levels[1:] + levels[:-1]) / 2), 10.5]
        means = []
        for low, high in pairwise(edges):
            x = np.linspace(low, high, 201)
            density = np.exp(-x * x / 2)
            means.append(np.trapezoid(x * density, x) / np.trapezoid(density, x))
        if np.abs(np.array(means) - levels).max() < 1e-10 * size**0.5:
            break
        levels = np.array(means)
    return (levels / size**0.5).astype(F32)


def turboquant_key(bits: int) -> OneVector:
    """Take the nearest of the levels for the direction; sums are exact, all else is fp32."""

    def store(x: Vector) -> Vector:
        levels = solve_levels(bits, len(x))
        matrix = hadamard_matrix(len(x))
        norm = F32(np.linalg.norm(x.astype(np.float64)))
        rotated = (matrix @ (x / (norm + F32(1e-8)))).astype(F32)
        found = np.array([levels[np.abs(levels - each).argmin()] for each in rotated])
        length = np.sqrt(F32(np.square(found.astype(np.float64)).sum()) + F32(1e-16))
        return (matrix @ (F32(np.float16(norm)) * (found * (F32(1) / length)))).astype(F32)

    return store


def uniform_value(bits: int) -> OneVector:
    """Store equal steps from the smallest to the largest value."""

    def store(x: Vector) -> Vector:
        low, last = F32(x.min()), 2**bits - 1
        step = max((F32(x.max()) - low) / F32(last), F32(1e-8))
        codes = [min(int((F32(each) - low) / step + F32(0.5)), last) for each in x]
        return np.array([F32(c) * F32(np.float16(step)) + F32(np.float16(low)) for c in codes], F32)

    return store


def ultraquant(x: Vector) -> Vector:
    """Search the nearest of 15 levels, and of two equally near ones the lower."""
    magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    levels = sorted({sign * each for each in magnitudes for sign in (1.0, -1.0)})
    read = []
    for block in x.reshape(-1, 32):
        amax = float(np.abs(block).max())
        scale = 2.0 ** np.floor(np.log2(F32(amax) * F32(0.156)) + F32(0.5)) if amax else 1.0
        read += [min(levels, key=lambda one: (abs(one - v / scale), one)) * scale for v in block]
    return np.array(read, F32)


def ultraquant_key(x: Vector) -> Vector:
    """Store what is rotated, and rotate it back."""
    matrix = hadamard_matrix(len(x))
    return (matrix @ ultraquant((matrix @ x).astype(F32)).astype(np.float64)).astype(F32)
