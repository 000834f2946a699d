"""`kv-scales`: one safetensors file with nothing but the scale tensors of an overlay."""

from __future__ import annotations

from pathlib import Path

import torch

from fp8calib.checkpoint.tensor_file import save_tensors
from fp8calib.dialects.kv.metadata import Provenance, make_metadata
from fp8calib.geometry.model_geometry import Attention
from fp8calib.geometry.sites import Role
from fp8calib.scales.compute import ScaleTable


def write_kv_scales(table: ScaleTable, path: Path, *, provenance: Provenance | None = None) -> None:
    """Write the table's scales under the names an overlay gives them, fp32 0-dim.

    No config lies beside them, so the FP8 format stands in the header's metadata.

    Raises:
        ExportError: the file cannot be written.
    """
    metadata = make_metadata(fmt=table.fmt, origin=table.origin, provenance=provenance)
    save_tensors(path, make_scale_tensors(table), metadata={"format": "pt", **metadata})


def name_scales(attention: Attention, role: Role) -> tuple[str, ...]:
    """Name the scale tensors of `role`, all of which hold the same number.

    Where the attention module itself is called `attn` (gpt2, gptj, mpt), vLLM does not map
    `attn.k_scale` to the layer inside it, so the mapped name is written as well
    (vLLM 0.32.0 `quantization/base_config.py:get_cache_scale_mapper`).
    """
    module = attention.checkpoint_module
    suffix = f"{role}_scale"
    if module.rpartition(".")[2] == "attn":
        return f"{module}.{suffix}", f"{module}.attn.{suffix}"
    return (f"{module}.{suffix}",)


def make_scale_tensors(
    table: ScaleTable, *, scalar_shape: tuple[int, ...] = ()
) -> dict[str, torch.Tensor]:
    """Make the scale tensors of every layer that reads a KV cache, q too where the table has it.

    Args:
        table: scales of one rank, which are those of the whole model.
        scalar_shape: the shape of a per-tensor scale; per-head scales are [heads, 1, 1].
    """
    shape = (-1, 1, 1) if table.per_head else scalar_shape
    tensors: dict[str, torch.Tensor] = {}
    for _, attention in table.geometry.attentions():
        for role in (Role.K, Role.V, Role.Q):
            scale = table.scales.get(attention.site(role))
            if scale is not None:
                values = scale.values[0].reshape(shape)
                tensors |= dict.fromkeys(name_scales(attention, role), values)
    return tensors
