"""What binds statistics to the quantized checkpoints that were made from the calibrated model.

Quantization keeps norms and embeddings: they are hashed. It rounds the linears of the layers:
sketches tell whether a linear is within what rounding can have changed. K and V of a layer depend
on all linears of the layers below it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.header import FLOATS, TensorEntry
from fp8calib.errors import ModelError, shorten
from fp8calib.stats.matrix_sketch import (
    decode_sketch,
    encode_sketch,
    find_layer,
    measure_distance,
    sketch_matrix,
)

_SAMPLE_ELEMENTS = 2048
"""How many values from the middle of an embedding the statistics of earlier versions hash."""
_HASH_DIGITS = 16
_WHOLE_DIGITS = 32
"""Digits of the hash of a whole embedding: the length tells it from the hash of a sample."""
_ELEMENTS_AT_ONCE = 2**18
_SKETCH = "sketch:"
_NORM = re.compile(r"(norm|ln|layernorm)[^.]*\.weight$", re.IGNORECASE)
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|embed_in|wte|word_embeddings)\.weight$")
_KV_PROJECTION = re.compile(
    r"\.(k_proj|v_proj|kv_proj|qkv_proj|qkv|query_key_value|c_attn|Wqkv|kv_a_proj_with_mqa|kv_b_proj"
    r"|key|value|wk|wv|wqkv)\.weight$"
)
_LINEAR = re.compile(r"\.\d+\..*\.weight$")
_STACK = re.compile(r"\.\d+\..*\.experts\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_MOST_ELEMENTS = 2**17
"""Of a linear with more values, a sample is sketched; projections of K and V are sketched whole."""
_SMALLEST = torch.finfo(torch.float16).smallest_normal
_CHANGES = {"": 0.01, "FP8": 0.12, "INT8": 0.25}
"""The largest distance that a form of weights can cause. Steps of e4m3 are 1/8 of a value at most.
To nearest, a weight moves by half a step at most; GPTQ moves those of a linear by up to 0.05 on
average, which sketches estimate as up to 0.075. INT8 depends on outliers. A weight that is not
quantized is rounded to 16 bits."""
_CHANGE = 0.5
"""The largest distance for other forms, which have 4 bits. Unrelated projections differ by 1.4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseComparison:
    """A checkpoint beside the record of the calibrated model."""

    difference: str = ""
    """The first tensor that differs; empty if none does."""
    uncompared: str = ""
    """Why not all recorded linears were compared, or none is recorded; empty if all were."""
    compared: str = ""
    """Which linears were compared, in words."""


def hash_unquantized(checkpoint: Checkpoint) -> dict[str, str]:
    """Hash the norms and embeddings of a checkpoint, and sketch the linears of its layers.

    Of the experts of a layer, one is sketched, another in each layer. A hash is of the shape and of
    all values in bfloat16. Values that float16 holds only as subnormal numbers are counted as
    zeros. So the hash of a model in bfloat16 is the same after a conversion to fp32 or float16.

    Returns:
        A text for each tensor, by name in their order: hexadecimal digits, or a sketch.
    """
    found: dict[str, str] = {}
    experts: dict[str, dict[int, str]] = {}
    linears: set[str] = set()
    for name, entry in checkpoint.tensors.items():
        if _is_kept(name, entry):
            digits = _HASH_DIGITS if len(entry.shape) == 1 else _WHOLE_DIGITS
            found[name] = _hash(checkpoint, name, entry, digits)
        elif _is_linear(name, entry) and (expert := _EXPERT.search(name)) is not None:
            alike = f"{name[: expert.start(1)]}*{name[expert.end(1) :]}"
            experts.setdefault(alike, {})[int(expert[1])] = name
        elif _is_linear(name, entry):
            linears.add(name)
    for alike, names in experts.items():
        linears.add(names[sorted(names)[find_layer(alike) % len(names)]])
    for name in sorted(linears):
        sketch = sketch_matrix(checkpoint, name, _limit_elements(name))
        found[name] = f"{_SKETCH}{encode_sketch(sketch)}"
    return dict(sorted(found.items()))


def compare_with_base(recorded: Mapping[str, str], checkpoint: Checkpoint) -> BaseComparison:
    """Find the first tensor that differs from the recorded ones by more than quantization.

    A norm or an embedding that the checkpoint has quantized is not compared.

    Args:
        recorded: of `hash_unquantized`.
        checkpoint: decoded while it is read, so that its linears can be compared.

    Raises:
        ModelError: a recorded sketch is damaged.
    """
    hashes = {name: text for name, text in recorded.items() if not text.startswith(_SKETCH)}
    if difference := _find_changed_hash(hashes, checkpoint):
        return BaseComparison(difference=difference)
    sketches = {name: recorded[name] for name in recorded if name not in hashes}
    if not sketches:
        return BaseComparison(uncompared="the record of the calibrated model has no linears")
    missing, num_sampled = [], 0
    for name, text in sketches.items():
        entry = checkpoint.tensors.get(name)
        if entry is None or not _is_linear(name, entry):
            missing.append(name)
            continue
        most = _limit_elements(name)
        if difference := _explain_distance(text, checkpoint, name, most):
            return BaseComparison(difference=difference)
        num_sampled += most is not None and prod(entry.shape[-2:]) > most
    compared = f"{len(sketches) - len(missing)} of {len(sketches)} recorded linears"
    return BaseComparison(
        uncompared=f"its {shorten(missing[0])} cannot be decoded" if missing else "",
        compared=compared + (f", {num_sampled} by a sample of rows" if num_sampled else ""),
    )


def _find_changed_hash(hashes: Mapping[str, str], checkpoint: Checkpoint) -> str:
    compared = 0
    for name, expected in hashes.items():
        entry = checkpoint.tensors.get(name)
        if entry is None:
            return f"it lacks {shorten(name)}"
        if not _is_kept(name, entry) or checkpoint.form_of(name):
            continue
        if _hash(checkpoint, name, entry, len(expected)) != expected:
            return f"its {shorten(name)} differs"
        compared += 1
    return "" if compared else "it has no unquantized norm or embedding to compare"


def _explain_distance(
    text: str, checkpoint: Checkpoint, name: str, most_elements: int | None
) -> str:
    """Describe a linear that differs by more than its form explains; empty if none."""
    try:
        recorded = decode_sketch(text.removeprefix(_SKETCH))
    except ValueError as error:
        raise ModelError(
            f"the record of the calibrated model is damaged: sketch of {shorten(name)}: {error}",
            hint="write the statistics or scales again",
        ) from error
    form = checkpoint.form_of(name)
    most = _CHANGES.get(form, _CHANGE)
    distance = measure_distance(recorded, checkpoint, name, most_elements)
    if distance <= most:
        return ""
    cause = f"{form} changes a weight" if form else "rounding to 16 bits changes it"
    return (
        f"its {shorten(name)} differs by {distance:.0%} of its size, and {cause} by less than "
        f"{most:.0%}"
    )


def _limit_elements(name: str) -> int | None:
    return None if _KV_PROJECTION.search(name) else _MOST_ELEMENTS


def _is_kept(name: str, entry: TensorEntry) -> bool:
    pattern = {1: _NORM, 2: _EMBEDDING}.get(len(entry.shape))
    return entry.dtype in FLOATS and pattern is not None and pattern.search(name) is not None


def _is_linear(name: str, entry: TensorEntry) -> bool:
    """Whether a tensor is the weight of a linear in a layer, or a stack of those of experts."""
    pattern = {2: _LINEAR, 3: _STACK}.get(len(entry.shape))
    is_float = entry.dtype in FLOATS and not _EMBEDDING.search(name)
    return is_float and pattern is not None and pattern.search(name) is not None


def _hash(checkpoint: Checkpoint, name: str, entry: TensorEntry, digits: int) -> str:
    """Hash a vector or an embedding; with few digits, the middle of an embedding."""
    total = prod(entry.shape)
    is_whole = len(entry.shape) == 1 or digits == _WHOLE_DIGITS
    count = total if is_whole else min(_SAMPLE_ELEMENTS, total)
    item, first = entry.size_bytes // max(total, 1), (total - count) // 2
    digest = hashlib.sha256(f"{list(entry.shape)}\0".encode())
    for start in range(first, first + count, _ELEMENTS_AT_ONCE):
        stop = min(start + _ELEMENTS_AT_ONCE, first + count)
        data = checkpoint.read_bytes(name, start * item, stop * item)
        values = data.view(checkpoint.dtype(name)).to(torch.float32)
        values = torch.where(values.abs() < _SMALLEST, 0.0, values).to(torch.bfloat16)
        digest.update(values.view(torch.int16).numpy().astype("<i2", copy=False).data)
    return digest.hexdigest()[:digits]
