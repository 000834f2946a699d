"""A model that is ready to be calibrated: its geometry, and what a recipe leaves out of it."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.model.survey import Unobserved
from fp8calib.model.topology import find_geometry
from fp8calib.model.weights import WeightSource
from fp8calib.recipe import Recipe, match_modules


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A model, its geometry and what the recipe leaves out of it: ready to run."""

    model: PreTrainedModel
    geometry: ModelGeometry
    unobserved: tuple[Unobserved, ...]
    ignored: frozenset[str]
    weights: WeightSource


def prepare(
    model: PreTrainedModel, checkpoint: Checkpoint, recipe: Recipe, *, checkpoint_dtype: str
) -> Prepared:
    """Find the geometry of `model` and resolve the recipe's patterns against it.

    Raises:
        ModelError: the architecture is not understood.
        RecipeError: a pattern matches no module.
    """
    weights = WeightSource(model, checkpoint)
    geometry, unobserved = find_geometry(model, weights.whole, checkpoint_dtype=checkpoint_dtype)
    return Prepared(
        model=model,
        geometry=geometry,
        unobserved=unobserved,
        ignored=match_modules(recipe.observe.ignore, _module_names(geometry)),
        weights=weights,
    )


def _module_names(geometry: ModelGeometry) -> list[str]:
    names = [attention.module for _, attention in geometry.attentions()]
    for _, linear in geometry.linears():
        experts = linear.module.rpartition(".")[0] if linear.num_experts else linear.module
        names.append(experts)
    return list(dict.fromkeys(names))
