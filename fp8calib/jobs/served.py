"""Who serves files of KV scales, asked with all that `check` knows of the model."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from fp8calib.dialects.registry import find_dialect
from fp8calib.engines.replay.folder import open_folder
from fp8calib.engines.serving import Serving, find_scale_serving
from fp8calib.errors import ModelError
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.jobs.replayed_geometry import read_replayed_geometry
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
    """Find who serves each file that a recipe asks for, by the name of its format.

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
            find_file_served(
                folder / dialect.path(tp),
                out / dialect.path(tp),
                geometry,
                model=model,
                model_name=model_name,
                tp=tp,
            ),
        )
        for dialect in map(find_dialect, recipe.formats)
        for tp in dialect.degrees(recipe.tp)
    )


def find_file_served(
    written: Path, target: Path, geometry: ModelGeometry, *, model: Path, model_name: str, tp: int
) -> Serving:
    """Find who serves one file or overlay; the arguments are those of `find_scale_serving`.

    An overlay is judged with the names of all parameters, as `check` does. A model whose class is
    not known here keeps the shape that is known.
    """
    if written.is_dir():
        with suppress(ModelError):
            complete, is_foreign = read_replayed_geometry(open_folder(written))
            geometry = geometry if is_foreign else complete
    return find_scale_serving(written, target, geometry, model=model, model_name=model_name, tp=tp)
