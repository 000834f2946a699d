"""What GPU kernels of an engine are given: the same numbers on every machine."""

from collections.abc import Mapping

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
SCALES = {"1": (1.0,), "0.037": (0.037,), "heads": (0.037, 1.0, 0.0113)}
"""Of K and V: for the tensor, or for each head."""
HEAD_SIZES = (64, 96, 128, 192, 256)
TOKENS, HEADS, KV_HEADS = 300, 4, 2
RECORDED_ROWS = slice(0, TOKENS, 6)
ATTENTION_SCALES = {"q": 0.013, "k": 0.037, "v": 0.011}


def draw_wide(dtype: torch.dtype, *shape: int, seed: int) -> torch.Tensor:
    """Draw numbers of either sign whose magnitudes spread over 25 powers of two."""
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.exp2(25 * torch.rand(shape, generator=generator) - 14)
    signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return (magnitudes * signs).to(dtype)


def list_edges(dtype: torch.dtype) -> torch.Tensor:
    """List E4M3's numbers, the middles between them, their neighbours, and what saturates [N, 64].

    The last ones are infinity and NaN.
    """
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = codes[codes.isfinite()].unique()
    middles = (values[1:] + values[:-1]) / 2
    near = [middles * (1 + sign * 2.0**-9) for sign in (1, -1)]
    large = torch.tensor([463.9, 464.0, 464.1, 480.0, 511.0, 1e4, 6e4, -0.0])
    numbers = torch.cat([values, middles, *near, large, -large])
    ends = torch.tensor([float("inf"), -float("inf"), float("nan")])
    padding = torch.zeros(-(len(numbers) + len(ends)) % 64)
    return torch.cat([numbers, padding, ends]).to(dtype).reshape(-1, 64)


def draw_activations(dtype: torch.dtype) -> torch.Tensor:
    """Draw the inputs of a linear [64, 512]: rows of many sizes, one of zeros, outliers."""
    generator = torch.Generator().manual_seed(3)
    sizes = torch.exp2(12 * torch.rand(64, 1, generator=generator) - 6)
    x = sizes * torch.randn(64, 512, generator=generator)
    x[3], x[5, 17] = 0, 300
    x[7] *= 1e-6
    return x.to(dtype)


def draw_attention(head_size: int) -> Mapping[str, torch.Tensor]:
    """Draw q [300, 4, D], K and V [300, 2, D] in bfloat16; the first key attracts every query.

    The largest score is then not known before the tile of the first key.
    """
    generator = torch.Generator().manual_seed(head_size)

    def draw(heads: int) -> torch.Tensor:
        return torch.randn(TOKENS, heads, head_size, generator=generator)

    q, k, v = draw(HEADS) + 0.5, draw(KV_HEADS), draw(KV_HEADS)
    k[0] += 12 / head_size**0.5
    return {"q": q.bfloat16(), "k": k.bfloat16(), "v": v.bfloat16()}
