"""What binds statistics to the quantized checkpoints that were made from the calibrated model.

Quantization keeps norms and embeddings: they are hashed. It rounds the linears of the layers:
sketches tell whether a linear is within what rounding can have changed. K and V of a layer depend
on all linears of the layers below it.

A sketch is the product of 32 rows, evenly spread, with a fixed vector of random signs. The sketch
of a difference is the difference of the sketches, and the mean of its squares estimates the mean
square of the rows' norms (Johnson and Lindenstrauss). So 64 bytes tell a matrix that was quantized
from another matrix.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.header import FLOATS, TensorEntry
from fp8calib.errors import ModelError, shorten

_HASH_DIGITS = {1: 16, 2: 32}
"""Hexadecimal digits of the hash of a norm, and of an embedding."""
_ELEMENTS_AT_ONCE = 2**18
_READ_AT_ONCE_BYTES = 2**16
"""Of a larger matrix only the rows that are sketched are read."""
_SKETCH = "rows:"
_KEPT = {
    1: re.compile(r"(norm|ln|layernorm)[^.]*\.weight$", re.IGNORECASE),
    2: re.compile(r"(^|\.)(embed_tokens|embed_in|wte|word_embeddings)\.weight$"),
}
"""The names of norms and embeddings, by the number of their axes."""
_LINEAR = {2: re.compile(r"\.\d+\..*\.weight$"), 3: re.compile(r"\.\d+\..*\.experts\.")}
"""The names of linears in layers, and of stacks of those of experts."""
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_SKETCH_SIZE, _SKETCH_SEED = 32, 0
_SMALLEST = torch.finfo(torch.float16).smallest_normal
_CHANGES = {"": 0.01, "FP8": 0.12, "INT8": 0.25}
"""The largest distance that a form of weights can cause. Steps of e4m3 are 1/8 of a value at most.
To nearest, a weight moves by half a step at most; GPTQ moves those of a linear by up to 0.05 on
average, which sketches estimate as up to 0.075. INT8 depends on outliers. A weight that is not
quantized is rounded to 16 bits."""
_CHANGE = 0.5
"""The largest distance for other forms, which have 4 bits. Unrelated projections differ by 1.4."""


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
        if _matches(_KEPT, name, entry):
            found[name] = _hash(checkpoint, name, entry)
        elif not _matches(_LINEAR, name, entry):
            continue
        elif (expert := _EXPERT.search(name)) is None:
            linears.add(name)
        else:
            alike = f"{name[: expert.start(1)]}*{name[expert.end(1) :]}"
            experts.setdefault(alike, {})[int(expert[1])] = name
    for alike, names in experts.items():
        linears.add(names[sorted(names)[_find_layer(alike) % len(names)]])
    for name in sorted(linears):  # processes that share a model read its tensors together
        found[name] = sketch_matrix(checkpoint, name)[0]
    return dict(sorted(found.items()))


def compare_with_base(
    recorded: Mapping[str, str], checkpoint: Checkpoint
) -> tuple[str, dict[str, Any]]:
    """Find the first tensor that differs from the recorded ones by more than quantization.

    A norm or an embedding that the checkpoint has quantized is not compared, nor is what earlier
    versions recorded in another form. Linears of a checkpoint that is decoded while it is read are
    compared.

    Returns:
        The difference, empty without one. And in words `compared`, which linears were compared, and
        `unchecked`, why not all were, or none is recorded.
    """
    num_hashes = 0
    for name, expected in recorded.items():
        if ":" in expected:
            continue
        entry = checkpoint.tensors.get(name)
        if entry is None:
            return f"it lacks {shorten(name)}", {}
        digits = _HASH_DIGITS.get(len(entry.shape))
        if not _matches(_KEPT, name, entry) or checkpoint.form_of(name) or len(expected) != digits:
            continue
        if _hash(checkpoint, name, entry) != expected:
            return f"its {shorten(name)} differs", {}
        num_hashes += 1
    if not num_hashes:
        return "it has no unquantized norm or embedding to compare", {}
    sketches = {name: text for name, text in recorded.items() if is_sketch(text)}
    if not sketches:
        return "", {"unchecked": "the record of the calibrated model has no linears"}
    missing = []
    for name, text in sketches.items():
        entry = checkpoint.tensors.get(name)
        if entry is None or not _matches(_LINEAR, name, entry):
            missing.append(name)
            continue
        form = checkpoint.form_of(name)
        most = _CHANGES.get(form, _CHANGE)
        distance = measure_distance(text, checkpoint, name)
        if distance > most:
            cause = f"{form} changes a weight" if form else "rounding to 16 bits changes it"
            difference = f"its {shorten(name)} differs by {distance:.0%} of its size, and "
            return f"{difference}{cause} by less than {most:.0%}", {}
    return "", {
        "unchecked": f"its {shorten(missing[0])} cannot be decoded" if missing else "",
        "compared": f"{len(sketches) - len(missing)} of {len(sketches)} recorded linears",
    }


def is_sketch(text: str) -> bool:
    """Tell what is recorded of a linear from the hash of a norm or an embedding."""
    return text.startswith(_SKETCH)


def _matches(patterns: Mapping[int, re.Pattern[str]], name: str, entry: TensorEntry) -> bool:
    pattern = patterns.get(len(entry.shape))
    return entry.dtype in FLOATS and pattern is not None and pattern.search(name) is not None


def _hash(checkpoint: Checkpoint, name: str, entry: TensorEntry) -> str:
    """Hash a norm or an embedding."""
    total = math.prod(entry.shape)
    item = entry.size_bytes // max(total, 1)
    digest = hashlib.sha256(f"{list(entry.shape)}\0".encode())
    for start in range(0, total, _ELEMENTS_AT_ONCE):
        stop = min(start + _ELEMENTS_AT_ONCE, total)
        data = checkpoint.read_bytes(name, start * item, stop * item)
        values = data.view(checkpoint.dtype(name)).to(torch.float32)
        values = torch.where(values.abs() < _SMALLEST, 0.0, values).to(torch.bfloat16)
        digest.update(values.view(torch.int16).numpy().astype("<i2", copy=False).data)
    return digest.hexdigest()[: _HASH_DIGITS[len(entry.shape)]]


# --- sketches ----------------------------------------------------------------------------------


def sketch_matrix(checkpoint: Checkpoint, name: str) -> tuple[str, float]:
    """Sketch a matrix of a checkpoint; of experts stored in one tensor one, by the layer.

    Returns:
        The sketch as text, 32 numbers in bfloat16; and the root of the mean square of the rows'
        norms.
    """
    entry = checkpoint.tensors[name]
    *experts, count, columns = entry.shape
    places = torch.linspace(0, count - 1, _SKETCH_SIZE, dtype=torch.float64).round().int().tolist()
    if experts:
        index = _find_layer(name) % max(experts[0], 1)
        rows = checkpoint.read_rows(name, index, index + 1)[0][places]
    elif entry.size_bytes <= _READ_AT_ONCE_BYTES:
        rows = checkpoint.read_rows(name, 0, count)[places]
    else:
        rows = torch.cat([checkpoint.read_rows(name, place, place + 1) for place in places])
    rows = rows.double()
    sketch = (rows @ _draw_signs(columns).double()).to(torch.bfloat16)
    raw = sketch.view(torch.int16).numpy().astype("<i2").tobytes()
    root = math.sqrt(float(rows.square().sum(1).mean()))
    return f"{_SKETCH}{base64.b64encode(raw).decode()}", root


def measure_distance(recorded: str, checkpoint: Checkpoint, name: str) -> float:
    """Estimate how far a matrix is from a recorded sketch, divided by its own Frobenius norm.

    The estimate is within a quarter of the distance for rounding errors. Two matrices that have
    nothing in common have a distance of 1.4 or more.
    """
    text, norm = sketch_matrix(checkpoint, name)
    try:
        expected, own = map(_decode, (recorded, text))
    except ValueError as error:
        raise ModelError(
            f"the record of the calibrated model is damaged: sketch of {shorten(name)}: {error}",
            hint="write the statistics or scales again",
        ) from error
    distance = math.sqrt(float((own - expected).square().mean()))
    if norm == 0:
        return math.inf if distance else 0.0
    return distance / norm


def _decode(text: str) -> torch.Tensor:
    raw = base64.b64decode(text.removeprefix(_SKETCH).encode(), validate=True)
    values = torch.from_numpy(np.frombuffer(raw, "<i2").astype(np.int16)).view(torch.bfloat16)
    if len(values) != _SKETCH_SIZE or not bool(values.isfinite().all()):
        raise ValueError(f"not {_SKETCH_SIZE} finite numbers")
    return values.double()


def _find_layer(name: str) -> int:
    """Find the first number in the path of a tensor: that of its layer; 0 without one."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), 0)


@cache
def _draw_signs(count: int) -> torch.Tensor:
    """Draw signs: int8 [count]. NumPy guarantees the stream of a bit generator."""
    words = np.random.PCG64(_SKETCH_SEED).random_raw(-(-count // 64)).astype("<u8")
    bits = np.unpackbits(words.view(np.uint8))[:count]
    return torch.from_numpy(bits.astype(np.int8) * 2 - 1)
