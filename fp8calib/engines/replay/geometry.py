"""The geometry of a checkpoint that is replayed, or that of a model of which little is known."""

from __future__ import annotations

from fp8calib.checkpoint.model_config import LAYER_COUNTS, MAX_LAYERS, find_dtype
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.errors import NotUnderstoodError, shorten
from fp8calib.model.drafters import count_layers
from fp8calib.model.plain_model import read_plain_geometry
from fp8calib.model.shapes import Attention, Layer, ModelGeometry


def read_replayed_geometry(model: ScaleFolder) -> ModelGeometry:
    """Find the shape of a model.

    Raises:
        NotUnderstoodError: its layers are not understood, or only its own code knows them.
        ModelError: it is no language model that generates from left to right.
    """
    if (found := read_plain_geometry(model.path, model.config)) is not None:
        return found
    from fp8calib.model.geometry_from_config import (  # noqa: PLC0415 -- imports transformers
        is_known,
        read_geometry,
    )

    if "auto_map" in model.config and not is_known(model.config):
        model_type = shorten(str(model.config.get("model_type")))
        raise NotUnderstoodError(
            f"{model.path}: model_type {model_type} is unknown to this tool: only code of its own "
            "knows it, which is not run",
            hint="use --model MODEL, a model of a known type with the same layers",
        )
    return read_geometry(model.path, model.config)


def imagine_geometry(model: ScaleFolder) -> ModelGeometry:
    """Make the shape of a model of which nothing is known but the number of its layers."""
    counts = (count_layers(model.config), *(model.config.get(key) for key in LAYER_COUNTS))
    known = (each for each in counts if isinstance(each, int) and 0 < each <= MAX_LAYERS)
    named = model.config.get("architectures")
    return ModelGeometry(
        architecture=str(named[0]) if isinstance(named, list) and named else "",
        model_type=str(model.config.get("model_type")),
        checkpoint_dtype=find_dtype(model.config),
        layers=tuple(_imagine_layer(index) for index in range(next(known, 1))),
    )


def _imagine_layer(index: int) -> Layer:
    attention = Attention(
        module=str(index),
        checkpoint_module=str(index),
        kind="heads",
        num_heads=1,
        num_kv_heads=1,
        k_head_dim=1,
        v_head_dim=1,
    )
    return Layer(index=index, module="", mixer="unknown", attention=attention, linears=())
