"""The shape of a model whose loading is replayed, from its config or from its names of tensors."""

from __future__ import annotations

from pathlib import Path

from fp8calib.engines.replay.folder import ScaleFolder, open_folder
from fp8calib.engines.replay.geometry_from_names import read_named_geometry
from fp8calib.errors import ModelError
from fp8calib.geometry.model_geometry import ModelGeometry


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


def complete_geometry(geometry: ModelGeometry, written: Path) -> ModelGeometry:
    """Add to the shape of a model what `check` knows of a checkpoint: the names of all parameters.

    A file of scales, and a model whose class is not known here, keep the shape that is known.
    """
    if not written.is_dir():
        return geometry
    try:
        complete, is_foreign = read_replayed_geometry(open_folder(written))
    except ModelError:
        return geometry
    return geometry if is_foreign else complete
