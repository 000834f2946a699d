"""Match a model with its checkpoint, and list the weights and sites that are not observed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.geometry.module_paths import group_by_pattern, list_paths
from fp8calib.geometry.sites import Role, Site
from fp8calib.model.dtype import stored_dtype
from fp8calib.model.stored_parameters import (
    check_stored_parameters,
    list_absent,
    list_leftovers,
)
from fp8calib.model.topology.find import find_geometry, find_text_decoder
from fp8calib.model.topology.linears import is_experts
from fp8calib.model.topology.search import is_linear, is_matrix
from fp8calib.model.weight_source import WeightSource
from fp8calib.recipe import Recipe, match_modules
from fp8calib.stats.header import Skipped

_UNUSED = "in the checkpoint, but not part of the text decoder: neither loaded nor run"
_LEFTOVER = "in the checkpoint, but not a parameter of the model: neither loaded nor run"
_UNCALLED = "the model does not call this linear: its input is not observed"
_ABSENT = "not in the checkpoint, and not part of the text decoder: not run"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    """A model, with or without weights, and the source of its weights."""

    geometry: ModelGeometry
    unobserved: Mapping[str, str]
    """The modules whose weights no hook can observe, with the reason."""
    weights: WeightSource
    ignored: frozenset[str]
    """The modules that the recipe excludes from calibration."""

    @property
    def model(self) -> PreTrainedModel:
        """The model itself."""
        return self.weights.model


def prepare(
    model: PreTrainedModel, checkpoint: Checkpoint, recipe: Recipe | None = None
) -> PreparedModel:
    """Find the geometry of `model` and match the recipe's patterns with its modules.

    Raises:
        ModelError: the architecture is not understood, or the checkpoint does not hold the model
            that its config describes.
        RecipeError: a pattern matches no module.
    """
    weights = WeightSource(model, checkpoint)
    check_stored_parameters(weights)
    geometry, unobserved = find_geometry(
        model, weights.single_tensors, checkpoint_dtype=stored_dtype(checkpoint)
    )
    patterns = recipe.observe.ignore if recipe else ()
    return PreparedModel(
        geometry=geometry,
        unobserved=unobserved,
        weights=weights,
        ignored=match_modules(patterns, _module_names(geometry)),
    )


def list_skipped(
    prepared: PreparedModel,
    recipe: Recipe,
    observed: Collection[Site],
    unseen: Mapping[Site, str] | None = None,
) -> list[Skipped]:
    """List the sites and weights that were not observed, each with the reason.

    `unseen` has the reasons of an engine that ran the model.
    """
    skipped = [
        Skipped(site=f"{module}.weight", why=why) for module, why in prepared.unobserved.items()
    ]
    for layer, attention in prepared.geometry.attentions():
        site = attention.site(Role.Q)
        if (
            recipe.observe.query
            and site not in observed
            and attention.module not in prepared.ignored
        ):
            why = f"{layer.mixer} does not use transformers' attention interface"
            skipped.append(Skipped(site=str(site), why=why))
    if recipe.observe.inputs:
        skipped += _uncalled(prepared, observed, unseen or {})
    skipped += _without_own_cache(prepared.geometry)
    skipped += [
        Skipped(site=module, why="excluded by the recipe (observe.ignore)")
        for module in sorted(prepared.ignored)
    ]
    skipped += _outside(prepared)
    skipped += _between_layers(prepared)
    skipped += _applied_by_modules(prepared)
    weights = prepared.weights
    drafters = {path for site in observed for path in list_paths(site.module)}
    differences = {
        _UNUSED: [name for name in weights.unused if name not in drafters],
        _LEFTOVER: list_leftovers(weights),
        _ABSENT: list_absent(weights),
    }
    skipped += [Skipped(site=name, why=why) for why, names in differences.items() for name in names]
    return skipped


def _module_names(geometry: ModelGeometry) -> list[str]:
    attentions = (attention.module for _, attention in geometry.attentions())
    return list(dict.fromkeys([*attentions, *(linear.runner for _, linear in geometry.linears())]))


def _without_own_cache(geometry: ModelGeometry) -> Iterator[Skipped]:
    for layer in geometry.layers:
        attention = layer.attention
        if attention is None:
            yield Skipped(site=layer.module, why=f"{layer.mixer} caches no K and V")
        elif attention.producer is not None:
            why = f"reads the K and V of layer {attention.producer}, and carries its scale"
            yield Skipped(site=f"{attention.module}.k/v", why=why)


def _between_layers(prepared: PreparedModel) -> Iterator[Skipped]:
    """List the linears of the text decoder that are outside the decoder layers."""
    path, decoder = find_text_decoder(prepared.model)
    layers = prepared.geometry.layers[0].module.rpartition(".")[0]
    for name, module in decoder.named_modules(prefix=path):
        if is_linear(module) and not name.startswith(f"{layers}."):
            why = "a linear outside the decoder layers, which engines do not quantize"
            yield Skipped(site=name, why=why)


def _uncalled(
    prepared: PreparedModel, observed: Collection[Site], unseen: Mapping[Site, str]
) -> Iterator[Skipped]:
    """List the linears that the model does not call, or an engine does not show."""
    for _, linear in prepared.geometry.linears():
        site = Site(linear.module, Role.INPUT)
        if linear.runner not in prepared.ignored and site not in observed:
            yield Skipped(site=str(site), why=unseen.get(site, _UNCALLED))


def _applied_by_modules(prepared: PreparedModel) -> Iterator[Skipped]:
    """List the matrices of the text decoder that belong to no linear, embedding or norm.

    They belong to routers, hyper-connections and the like; experts are observed or in `unobserved`.
    """
    path, decoder = find_text_decoder(prepared.model)
    found: dict[str, str] = {}
    for name, module in decoder.named_modules(prefix=path):
        if name in prepared.unobserved or is_experts(module) or not _applies_matrices(module):
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            if is_matrix(parameter) and not leaf.endswith("bias"):
                found[f"{name}.{leaf}"] = type(module).__name__
    for name, paths in group_by_pattern(found).items():
        why = f"{found[paths[0]]} applies it itself, outside any linear: not observed"
        yield Skipped(site=name, why=why)


def _applies_matrices(module: nn.Module) -> bool:
    """Tell whether a module other than a linear or norm may multiply by its own parameters."""
    is_depthwise = getattr(module, "groups", 1) > 1
    known = is_linear(module) or isinstance(module, nn.Embedding) or is_depthwise
    return not known and "norm" not in type(module).__name__.lower()


def _outside(prepared: PreparedModel) -> Iterator[Skipped]:
    """List the modules outside the text decoder that have weights, and are not observed."""
    model = prepared.model
    path, _ = find_text_decoder(model)
    node: nn.Module = model
    above = ""
    for step in path.split(".") if path else ():
        for name, child in node.named_children():
            if name == step or next(child.parameters(), None) is None:
                continue
            if child is model.get_output_embeddings():
                why = "not run: calibration needs no logits, engines leave it as it is"
                yield Skipped(site=name, why=why)
            else:
                why = f"{type(child).__name__}: not part of the text decoder"
                yield Skipped(site=f"{above}{name}", why=why)
        node, above = node.get_submodule(step), f"{above}{step}."
