"""Estimate what K and V reach by the weights that make them of a norm."""

from __future__ import annotations

from collections.abc import Collection
from itertools import product

import numpy as np
from numpy.typing import NDArray

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.verdicts import Slot
from fp8calib.engines.scale_mistakes import Reach
from fp8calib.engines.weights.layers import PLAIN_DTYPES
from fp8calib.formats.fp8.weights import WEIGHT_FORMATS, name_weight_scales
from fp8calib.model.geometry import KV_ROLES, Attention, ModelGeometry, Role
from fp8calib.numerics.arrays import decode_floats

_USUAL = 4.0
"""How many times the largest |W_i * g| K and V reach: 2.3 to 9.6 times in SmolLM2-135M."""
_WITHIN = 3.0
"""The factor by which a group of these estimates may be off."""
_SAMPLED_ROWS = 64
_SHIFTED_NORMS = (
    *("gemma", "gemma2", "gemma3_text", "nemotron", "qwen3_next", "qwen3_5_text"),
    *("qwen3_5_moe_text", "recurrent_gemma", "vaultgemma"),
)
"""Model types whose norms multiply by 1 + weight (transformers 5.23 `models/*/modeling_*.py`,
read)."""
_WEIGHTLESS_NORMS = ("gemma3n_text", "gemma4_text", "llama4_text")
"""Model types that norm K or V without a weight, which no tensor shows (transformers 5.23
`models/*/modeling_*.py`, read)."""


def estimate_reaches(
    folder: ScaleFolder, geometry: ModelGeometry, odd_scales: Collection[str] = ()
) -> dict[Slot, Reach]:
    """Estimate the largest K and V of the layers by the weights that make them of a norm.

    A norm's output has the length sqrt(hidden size) before its weight g, whatever the text. Hence
    no channel i of K exceeds sqrt(hidden size) * |W_i * g|; RoPE adds a factor of at most sqrt(2).
    `odd_scales` are those of FP8 weights that are not to be trusted.
    """
    reaches: dict[Slot, Reach] = {}
    if geometry.model_type in _WEIGHTLESS_NORMS:
        return reaches
    with np.errstate(all="ignore"), _open(folder) as weights:
        norms = [name for name in weights.tensors if "norm" in name]
        for (layer, attention), role in product(geometry.attentions(), KV_ROLES):
            path = f"{attention.checkpoint_module}.{role}"
            beside = (name.removeprefix(path) for name in norms if name.startswith(path))
            if any("norm" in rest.partition(".")[0] for rest in beside):
                continue  # K or V is not what the weight gives
            estimated = _estimate(weights, odd_scales, geometry, attention, role)
            if estimated is not None:
                reaches[layer.index, role] = estimated
    return reaches


def measure_sizes(folder: ScaleFolder) -> dict[str, float]:
    """Measure the root mean square of rows in the middle of FP8 matrices, by their names.

    Left out are experts, which may be dead, and what is zero or not finite, or has no scale.
    """
    sizes = {}
    with np.errstate(all="ignore"), _open(folder) as weights:
        for name, entry in weights.tensors.items():
            if entry.dtype not in WEIGHT_FORMATS or ".experts." in name or len(entry.shape) != 2:
                continue
            first = max(0, (entry.shape[0] - _SAMPLED_ROWS) // 2)
            last = min(entry.shape[0], first + _SAMPLED_ROWS)
            values = _read(weights, name, rows=range(first, last))
            if values is not None:
                sizes[name] = float(np.sqrt(np.mean(np.square(values, dtype="f8"))))
    return {name: size for name, size in sizes.items() if 0 < size < float("inf")}


def _open(folder: ScaleFolder) -> Checkpoint:
    return Checkpoint(
        folder.path, files=[TensorFile(folder.path / name) for name in folder.tensors]
    )


def _estimate(
    weights: Checkpoint,
    odd_scales: Collection[str],
    geometry: ModelGeometry,
    attention: Attention,
    role: Role,
) -> Reach | None:
    """Estimate the reach of one tensor; None if it is not made by a norm and one weight."""
    path = attention.checkpoint_module
    parent, _, name = path.rpartition(".")
    if name == "cross_attn" or attention.producer is not None:
        return None
    weight = _read(weights, f"{path}.{role}_proj.weight", odd_scales)
    norm = _read(weights, f"{parent}.input_layernorm.weight", odd_scales)
    if weight is None or norm is None or weight.ndim != 2 or not weight.size:
        return None
    beta = _read_bias(weights, f"{parent}.input_layernorm.bias", len(weight[0]))
    bias = _read_bias(weights, f"{path}.{role}_proj.bias", len(weight))
    if norm.shape != weight.shape[1:] or beta is None or bias is None:
        return None
    shift = float((np.abs(weight @ beta) + np.abs(bias)).max()) if beta.any() or bias.any() else 0.0
    if geometry.model_type in _SHIFTED_NORMS:
        norm += 1
    length = float(np.linalg.norm(weight * norm, axis=1).max())
    bound = 2**0.5 * (weight.shape[1] ** 0.5 * length + shift)
    if not 0 < bound < float("inf"):
        return None
    return Reach(
        amax=_USUAL * length + shift,
        least=length / 8,
        most=bound * 8,
        source=f"{role} reaches {length:,.4g} to {bound:,.4g} in this model",
        within=_WITHIN,
    )


def _read(
    weights: Checkpoint,
    name: str,
    odd_scales: Collection[str] = (),
    *,
    rows: range | None = None,
) -> NDArray[np.float32] | None:
    """Read floats, or rows of FP8 with their scale; None for any other, or an odd scale."""
    entry = weights.tensors.get(name)
    if entry is None:
        return None
    if entry.dtype in PLAIN_DTYPES:
        return weights.read_floats(name)
    scales = [each for each in name_weight_scales(name) if each in weights.tensors]
    is_matrix = len(entry.shape) == 2 and bool(entry.size_bytes)
    if entry.dtype not in WEIGHT_FORMATS or not is_matrix or len(scales) != 1:
        return None
    scale = weights.read_floats(scales[0], of_scale=True)
    if scales[0] in odd_scales or not scale.size:
        return None
    height, columns = entry.shape
    rows = range(height) if rows is None else rows
    data = weights.read_array(name, rows.start * columns, rows.stop * columns)
    scale = scale.reshape(scale.shape[0] if scale.ndim else 1, -1)
    # Blocks that do not divide a weight have slightly moved borders: good for an estimate.
    chosen = np.ix_(
        np.arange(rows.start, rows.stop) * scale.shape[0] // height,
        np.arange(columns) * scale.shape[1] // columns,
    )
    return decode_floats(data, entry.dtype).reshape(-1, columns) * scale[chosen]


def _read_bias(weights: Checkpoint, name: str, length: int) -> NDArray[np.float32] | None:
    """Read a bias; zeros where the model has none, None for another shape or dtype."""
    if name not in weights.tensors:
        return np.zeros(length, dtype=np.float32)
    bias = _read(weights, name)
    return bias if bias is not None and bias.shape == (length,) else None
