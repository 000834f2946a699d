"""How scale tensors are called in a checkpoint, and what shape they have."""

from __future__ import annotations

import torch

from fp8calib.geometry.model_geometry import Attention
from fp8calib.geometry.sites import Role
from fp8calib.scales.compute import ScaleTable


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
