"""Who serves the files of KV scales that a recipe asks for."""

from __future__ import annotations

from pathlib import Path

from fp8calib.dialects.registry import find_dialect
from fp8calib.engines.serving import find_scale_serving
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.jobs.replayed_geometry import complete_geometry
from fp8calib.recipe import Recipe
from fp8calib.results.served import Served


def find_served(
    recipe: Recipe,
    folder: Path,
    out: Path,
    geometry: ModelGeometry,
    *,
    model: Path,
    model_name: str,
) -> Served:
    """Find who serves each file, by the name of its format.

    Args:
        recipe: the formats, and the ranks.
        folder: where the files are now.
        out: where they will be.
        geometry: the shape of the model.
        model: the model's folder.
        model_name: the model as the user named it.
    """
    return Served.of(
        (
            dialect.name,
            find_scale_serving(
                folder / dialect.path(tp),
                out / dialect.path(tp),
                complete_geometry(geometry, folder / dialect.path(tp)),
                model=model,
                model_name=model_name,
                tp=tp,
            ),
        )
        for dialect in map(find_dialect, recipe.formats)
        for tp in dialect.degrees(recipe.tp)
    )
