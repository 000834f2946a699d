"""Apply the command line to a calibration's recipe, and refuse options that contradict it."""

from __future__ import annotations

from fp8calib.cli.console import warn
from fp8calib.dialects.registry import find_dialect
from fp8calib.errors import UsageError
from fp8calib.jobs.recipe_options import override_recipe
from fp8calib.model.prepared import PreparedModel
from fp8calib.recipe import Recipe
from fp8calib.requests.calibrate import CalibrateRequest
from fp8calib.requests.shared import split_names


def resolve_recipe(settings: CalibrateRequest) -> Recipe:
    """Apply the command line to the recipe, and warn of options that have no effect.

    Raises:
        RecipeError: the recipe itself is wrong.
        UsageError: an option has an invalid value.
    """
    data = {
        "sources": settings.data,
        "text_column": settings.text_column,
        "samples": settings.samples,
        "seq_len": settings.seq_len,
        "batch_size": settings.batch_size,
        "pack": False if settings.no_pack else None,
        "seed": settings.seed,
    }
    formats = split_names(settings.formats)
    recipe = override_recipe(
        settings.recipe,
        data=data,
        scales={
            "rule": settings.rule,
            "fallback": settings.fallback,
            "fp8_dtype": settings.fp8_dtype,
        },
        top={"formats": formats, "tp": settings.tp, "query_scale": settings.query_scale},
    )
    if settings.shard is None:
        return recipe
    if formats:
        warn("--format has no effect on a shard: run `fp8calib export` after `fp8calib merge`")
    # a shard has no outputs that need the statistics of all
    return recipe.model_copy(update={"formats": (), "quantize": None, "query_scale": False})


def check_excluded(recipe: Recipe, prepared: PreparedModel) -> None:
    """Refuse formats whose K and V the recipe excludes, before text is run."""
    modules = (attention.module for _, attention in prepared.geometry.attentions())
    excluded = next((module for module in modules if module in prepared.ignored), None)
    if recipe.formats and excluded is not None:
        raise UsageError(
            f"{', '.join(recipe.formats)}: needs K and V of {excluded}, which recipe "
            f"{recipe.name} excludes",
            hint="take it out of observe.ignore, or write `formats: []`",
        )


def check_observed(recipe: Recipe) -> None:
    """Refuse unknown formats, and those whose scales the recipe does not observe."""
    observe = recipe.observe
    with_linears = [name for name in recipe.formats if find_dialect(name).has_linears]
    if recipe.formats and not observe.kv:
        raise UsageError(
            f"{', '.join(recipe.formats)}: recipe {recipe.name} does not observe K and V",
            hint="choose another recipe",
        )
    if with_linears and not (observe.inputs and observe.weights):
        raise UsageError(
            f"{', '.join(with_linears)}: needs inputs and weights, and recipe {recipe.name} does "
            "not observe both",
            hint="choose another recipe",
        )
    if recipe.query_scale is True and not observe.query:
        raise UsageError(f"--query-scale: recipe {recipe.name} does not observe q")
