"""The names and tensors of KV scales in overlays, and `kv-scales`: a file of them alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fp8calib.formats.dialect import Dialect, ParsedScales, ScaleFiles, Spelling, WriteJob
from fp8calib.model.shapes import Role

if TYPE_CHECKING:
    import torch

    from fp8calib.formats.table import ScaleTable
    from fp8calib.model.shapes import Attention, ModelGeometry


def name_scales(attention: Attention, role: Role) -> tuple[str, ...]:
    """Name the scale tensors of `role`, which all hold the same number.

    If the attention module itself is called `attn` (gpt2, gptj, mpt), vLLM does not map
    `attn.k_scale` to the layer inside it, so there is a second tensor with the mapped name
    (vLLM 0.32.0 `quantization/base_config.py:get_cache_scale_mapper`).
    """
    module = attention.checkpoint_module
    suffix = f"{role}_scale"
    if module.rpartition(".")[2] == "attn":
        return f"{module}.{suffix}", f"{module}.attn.{suffix}"
    return (f"{module}.{suffix}",)


def make_scale_tensors(
    table: ScaleTable,
    *,
    scalar_shape: tuple[int, ...] = (),
    all_ranks: bool = False,
    name: Callable[[Attention, Role], tuple[str, ...]] = name_scales,
) -> dict[str, torch.Tensor]:
    """Make the scale tensors of every layer that reads a KV cache, and of q if the table has it.

    A per-tensor scale is the scale of the first rank and has the shape `scalar_shape`; per-head
    scales are [heads, 1, 1]; those of all ranks are [ranks]. `name` gives the names of the tensors
    of a layer.
    """
    shape = (-1, 1, 1) if table.per_head else scalar_shape
    tensors: dict[str, torch.Tensor] = {}
    for _, attention in table.geometry.attentions():
        for role in (Role.K, Role.V, Role.Q):
            scale = table.scales.get(attention.site(role))
            if scale is not None:
                values = scale.values if all_ranks else scale.values[0].reshape(shape)
                tensors |= dict.fromkeys(name(attention, role), values)
    return tensors


def read_kv_scales(files: ScaleFiles, geometry: ModelGeometry) -> ParsedScales:
    """Read the scale tensors of a file or checkpoint, in any tool's spelling.

    Raises:
        ModelError: a scale is missing, not valid, or of another model.
    """
    from fp8calib.formats.kv.read_tensors import read_tensors  # noqa: PLC0415 -- imports torch

    return read_tensors(files, geometry)


def _write(job: WriteJob, path: Path) -> None:
    """Write the scales under the names an overlay gives them, fp32 0-dim."""
    job.save_tensors(path, make_scale_tensors(job.table), fmt=job.table.fmt)


def _recognise(files: ScaleFiles) -> bool:
    is_tgi = files.quant_method is not None or files.spellings == {Spelling.SINGLE}
    return bool(files.spellings) and not is_tgi


KV_SCALES = Dialect(
    name="kv-scales",
    description="only the scale tensors",
    path_pattern="kv_scales.safetensors",
    write=_write,
    recognise=_recognise,
    read=read_kv_scales,
    has_query=True,
)
