"""Statistics of a model under the module paths that another class of it has."""

from __future__ import annotations

from dataclasses import replace

from fp8calib.calibration.calibration_stats import CalibrationStats
from fp8calib.errors import ModelError
from fp8calib.model.shapes import Layer, ModelGeometry, Site


def rename_sites(stats: CalibrationStats, geometry: ModelGeometry) -> CalibrationStats:
    """Rename the sites to the paths of `geometry`, which is of the same checkpoint.

    A multimodal model in memory has its text decoder at another path than the decoder alone that is
    loaded from its folder. Layers correspond by index, and modules by their order in a layer.

    Raises:
        ModelError: a layer of one has no counterpart in the other.
    """
    own, other = stats.geometry.layers, geometry.layers
    if list(map(_find_shape, own)) != list(map(_find_shape, other)):
        raise ModelError(
            f"the statistics are of {len(own)} layers, and not of the {len(other)} of the model",
            hint="calibrate this model",
        )
    paths = {}
    for one, two in zip(own, other, strict=True):
        if one.attention is not None and two.attention is not None:
            paths[one.attention.module] = two.attention.module
        paths |= {a.module: b.module for a, b in zip(one.linears, two.linears, strict=True)}
    if all(old == new for old, new in paths.items()):
        return stats
    sites = {
        Site(paths.get(site.module, site.module), site.role): found
        for site, found in stats.sites.items()
    }
    renamed = stats.header.model_copy(update={"geometry": geometry})
    return replace(stats, header=renamed, sites=sites)


def _find_shape(layer: Layer) -> tuple[object, ...]:
    linears = ((each.out_features, each.in_features, each.num_experts) for each in layer.linears)
    return layer.attention is None, *linears
