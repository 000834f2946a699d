"""`tgi`: the checkpoint of TGI's pull request #2028, one `kv_scale` a layer.

Merged TGI reads `kv_scale` where a layer has no `k_scale` and `v_scale`; the config key is read by
the pull request's branch alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.overlay import write_overlay
from fp8calib.dialects.kv.metadata import Provenance, make_metadata, name_dtype
from fp8calib.scales.compute import ScaleTable


def write_tgi_overlay(
    table: ScaleTable, source: Checkpoint, folder: Path, *, provenance: Provenance | None = None
) -> Mapping[str, str]:
    """Write `source` with one scale for k and v of every layer, fp32 0-dim.

    Returns:
        The entries of the source that were left out, each with the reason.

    Raises:
        ModelError: the source's config.json is missing or broken.
        ExportError: the source already has such tensors, or the folder cannot be written.
    """
    scales = {
        f"{attention.checkpoint_module}.kv_scale": torch.tensor(table.kv(attention))
        for _, attention in table.geometry.attentions()
    }
    updates = {"kv_cache_torch_dtype": name_dtype(table.fmt)}
    metadata = make_metadata(fmt=None, origin=table.origin, provenance=provenance)
    return write_overlay(source, folder, scales=scales, config_updates=updates, metadata=metadata)
