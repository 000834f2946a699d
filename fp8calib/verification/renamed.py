"""Statistics of a model under the module paths that another class of it has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp8calib.calibration.calibration_stats import CalibrationStats
from fp8calib.errors import ModelError
from fp8calib.model.shapes import Layer, ModelGeometry, Site


def rename_sites(stats: CalibrationStats, geometry: ModelGeometry) -> CalibrationStats:
    """Rename the sites to the paths of `geometry`, which is of the same checkpoint.

    A multimodal model in memory has its text decoder at another path than the decoder alone that is
    loaded from its folder. Layers correspond by index, and modules by their order in a layer.

    Raises:
        ModelError: a layer of one has no counterpart in the other; the message names it.
    """
    own, other = stats.geometry.layers, geometry.layers
    if len(own) != len(other):
        raise ModelError(
            f"the statistics are of {len(own)} layers, and the model has {len(other)}",
            hint="calibrate this model",
        )
    paths = {old: new for pair in zip(own, other, strict=True) for old, new in _pair(*pair)}
    if all(old == new for old, new in paths.items()):
        return stats
    sites = {
        Site(paths.get(site.module, site.module), site.role): found
        for site, found in stats.sites.items()
    }
    renamed = stats.header.model_copy(update={"geometry": geometry})
    return replace(stats, header=renamed, sites=sites)


def _pair(own: Layer, other: Layer) -> Iterator[tuple[str, str]]:
    if _find_shape(own) != _find_shape(other):
        raise ModelError(
            f"the statistics of {own.module} have another shape than {other.module} of the model",
            hint="calibrate this model",
        )
    if own.attention is not None and other.attention is not None:
        yield own.attention.module, other.attention.module
    for one, two in zip(own.linears, other.linears, strict=True):
        yield one.module, two.module


def _find_shape(layer: Layer) -> tuple[object, ...]:
    linears = ((each.out_features, each.in_features, each.num_experts) for each in layer.linears)
    return layer.attention is None, *linears
