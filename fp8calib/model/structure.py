"""A model matched with its checkpoint: its geometry, and the source of its weights."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.model.dtype import stored_dtype
from fp8calib.model.topology.find import find_geometry
from fp8calib.model.topology.search import UnobservedWeight
from fp8calib.model.weight_source import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStructure:
    """A model, with or without weights, and where to find them."""

    model: PreTrainedModel
    geometry: ModelGeometry
    unobserved: tuple[UnobservedWeight, ...]
    weights: WeightSource


def find_structure(model: PreTrainedModel, checkpoint: Checkpoint) -> ModelStructure:
    """Match a model with the checkpoint of its weights and find its geometry.

    Raises:
        ModelError: the architecture is not understood.
    """
    weights = WeightSource(model, checkpoint)
    geometry, unobserved = find_geometry(
        model, weights.single_tensors, checkpoint_dtype=stored_dtype(checkpoint)
    )
    return ModelStructure(model=model, geometry=geometry, unobserved=unobserved, weights=weights)
