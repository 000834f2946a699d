"""Hashes of the tensors that a quantized checkpoint keeps: norms and embeddings.

They bind statistics to the quantized checkpoints that were made from the calibrated model.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from math import prod

import torch

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.header import TensorEntry
from fp8calib.errors import shorten

_SAMPLE_ELEMENTS = 2048
_HASH_DIGITS = 16
_DTYPES = frozenset({"BF16", "F16", "F32"})
_NORM = re.compile(r"(norm|ln|layernorm)[^.]*\.weight$", re.IGNORECASE)
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|embed_in|wte|word_embeddings)\.weight$")
_SMALLEST = torch.finfo(torch.float16).smallest_normal


def hash_unquantized(checkpoint: Checkpoint) -> dict[str, str]:
    """Hash the norms and embeddings of a checkpoint, in the order of their names.

    A hash is of the shape and of the values in bfloat16 (of an embedding, of 2048 from its middle).
    Values that float16 holds only as subnormal numbers are counted as zeros. So the hash is the
    same after a conversion between fp32, bfloat16 and float16.

    Returns:
        16 hexadecimal digits for each tensor, by name.
    """
    return {
        name: _hash(checkpoint, name, entry)
        for name, entry in sorted(checkpoint.tensors.items())
        if _is_kept(name, entry)
    }


def find_first_change(recorded: Mapping[str, str], checkpoint: Checkpoint) -> str:
    """Describe the first norm or embedding that differs from the recorded ones; empty if none.

    A tensor that the checkpoint has quantized is not compared.
    """
    compared = 0
    for name, expected in recorded.items():
        entry = checkpoint.tensors.get(name)
        if entry is None:
            return f"it lacks {shorten(name)}"
        if not _is_kept(name, entry):
            continue
        if _hash(checkpoint, name, entry) != expected:
            return f"its {shorten(name)} differs"
        compared += 1
    return "" if compared else "it has no unquantized norm or embedding to compare"


def _is_kept(name: str, entry: TensorEntry) -> bool:
    if entry.dtype not in _DTYPES:
        return False
    pattern = {1: _NORM, 2: _EMBEDDING}.get(len(entry.shape))
    return pattern is not None and pattern.search(name) is not None


def _hash(checkpoint: Checkpoint, name: str, entry: TensorEntry) -> str:
    values = _read_middle(checkpoint, name, entry).to(torch.float32)
    values = torch.where(values.abs() < _SMALLEST, 0.0, values).to(torch.bfloat16)
    digest = hashlib.sha256(f"{list(entry.shape)}\0".encode())
    digest.update(values.view(torch.int16).numpy().astype("<i2").tobytes())
    return digest.hexdigest()[:_HASH_DIGITS]


def _read_middle(checkpoint: Checkpoint, name: str, entry: TensorEntry) -> torch.Tensor:
    """Read a vector, or `_SAMPLE_ELEMENTS` from the middle of a larger tensor."""
    total = prod(entry.shape)
    count = total if len(entry.shape) == 1 else min(_SAMPLE_ELEMENTS, total)
    item, first = entry.size_bytes // max(total, 1), (total - count) // 2
    data = checkpoint.read_bytes(name, first * item, (first + count) * item)
    return data.view(checkpoint.dtype(name))
