"""The shape of a model whose loading is replayed, from its config or from its names of tensors."""

from __future__ import annotations

from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.geometry_from_names import read_named_geometry
from fp8calib.model.shapes import ModelGeometry


def read_replayed_geometry(model: ScaleFolder) -> tuple[ModelGeometry, bool]:
    """Find the shape of a model, and whether its type is unknown to this tool.

    Raises:
        ModelError: it is no language model that generates from left to right with a KV cache.
    """
    from fp8calib.model.geometry_from_config import (  # noqa: PLC0415 -- imports transformers
        is_known,
        read_geometry,
    )

    if "auto_map" in model.config and not is_known(model.config):
        return read_named_geometry(model), True
    return read_geometry(model.path, model.config), False
