"""What binds statistics to the quantized checkpoints that were made from the calibrated model.

Quantization keeps norms and embeddings: they are hashed. It rounds the linears of the layers:
sketches tell whether a linear is within what rounding can have changed. K and V of a layer depend
on all linears of the layers below it.

A sketch is r^T W c for 32 fixed pairs of vectors of random signs. The sketch of a difference is the
difference of the sketches, and the mean of its squares estimates the squared Frobenius norm
(Johnson and Lindenstrauss). So 64 bytes tell a matrix that was quantized from another matrix.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.header import FLOATS, TensorEntry
from fp8calib.errors import ModelError, shorten

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
_SKETCH_SIZE, _SKETCH_BLOCKS, _SKETCH_SEED = 32, 16, 0
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
        sketch, _ = sketch_matrix(checkpoint, name, _limit_elements(name))
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
        num_sampled += most is not None and math.prod(entry.shape[-2:]) > most
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
    total = math.prod(entry.shape)
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


# --- sketches ----------------------------------------------------------------------------------


def measure_distance(
    recorded: torch.Tensor, checkpoint: Checkpoint, name: str, most_elements: int | None = None
) -> float:
    """Estimate how far a matrix is from a recorded one, divided by its own Frobenius norm.

    The estimate is within a quarter of the distance for rounding errors. Two matrices that have
    nothing in common have a distance of 1.4 or more. `most_elements` is that of `sketch_matrix`.
    """
    own, norm = sketch_matrix(checkpoint, name, most_elements)
    distance = math.sqrt(float((own - recorded).square().mean()))
    if norm == 0:
        return math.inf if distance else 0.0
    return distance / norm


def encode_sketch(sketch: torch.Tensor) -> str:
    """Convert a sketch to text."""
    raw = sketch.to(torch.bfloat16).view(torch.int16).numpy().astype("<i2").tobytes()
    return base64.b64encode(raw).decode()


def decode_sketch(text: str) -> torch.Tensor:
    """Convert the text of a sketch back.

    Raises:
        ValueError: it is not a sketch.
    """
    try:
        raw = base64.b64decode(text.encode(), validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from error
    values = torch.from_numpy(np.frombuffer(raw, "<i2").astype(np.int16)).view(torch.bfloat16)
    if len(values) != _SKETCH_SIZE or not bool(values.isfinite().all()):
        raise ValueError(f"not {_SKETCH_SIZE} finite numbers")
    return values.double()


def sketch_matrix(
    checkpoint: Checkpoint, name: str, most_elements: int | None = None
) -> tuple[torch.Tensor, float]:
    """Sketch a matrix of a checkpoint, and compute its Frobenius norm.

    A matrix of more than `most_elements` is replaced by about so many: 16 blocks of rows, evenly
    spread. Of experts stored in one tensor, one is sketched, another in each layer.

    Returns:
        The sketch, fp64 [32], each within the precision of bfloat16; and the norm.
    """
    *experts, rows, columns = checkpoint.tensors[name].shape
    expert = None
    if experts:
        index = find_layer(name) % max(experts[0], 1)
        (expert,) = checkpoint.read_rows(name, index, index + 1)
    signs = _draw_signs(max(rows, columns))
    left, right = signs[:, 0, :rows], signs[:, 1, :columns]
    sums, squares = torch.zeros(_SKETCH_SIZE, columns, dtype=torch.float64), 0.0
    for start, stop in _list_blocks(rows, columns, most_elements):
        part = checkpoint.read_rows(name, start, stop) if expert is None else expert[start:stop]
        part = part.double()
        sums += left[:, start:stop].double() @ part
        squares += float(part.square().sum())
    sketch = (sums * right.double()).sum(1)
    return sketch.to(torch.bfloat16).double(), math.sqrt(squares)


def find_layer(name: str) -> int:
    """Find the first number in the path of a tensor: that of its layer; 0 without one."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), 0)


def _list_blocks(rows: int, columns: int, most_elements: int | None) -> Iterator[tuple[int, int]]:
    """List the rows to read: all, or blocks of which the first and the last row are in one."""
    if most_elements is None or rows * columns <= most_elements:
        step = max(_ELEMENTS_AT_ONCE // max(columns, 1), 1)
        for start in range(0, rows, step):
            yield start, min(start + step, rows)
        return
    size = max(most_elements // columns // _SKETCH_BLOCKS, 1)
    count = min(_SKETCH_BLOCKS, rows // size)
    for number in range(count):
        start = (rows - size) * number // max(count - 1, 1)
        yield start, start + size


@cache
def _draw_signs(count: int) -> torch.Tensor:
    """Draw signs: int8 [32, 2, count]. NumPy guarantees the stream of a bit generator."""
    words = np.random.PCG64(_SKETCH_SEED).random_raw(count).astype("<u8")
    bits = np.unpackbits(words.view(np.uint8).reshape(count, 8), axis=1).T
    return torch.from_numpy(bits.astype(np.int8) * 2 - 1).reshape(_SKETCH_SIZE, 2, count)
