"""Match a model with its checkpoint, and list the weights and sites that are not observed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import dot_natural_key

from fp8calib.checkpoint.checkpoint import Checkpoint, stored_dtype
from fp8calib.model.module_paths import group_by_pattern, list_paths, match_modules
from fp8calib.model.shapes import ModelGeometry, Role, Site
from fp8calib.model.stored_parameters import (
    check_stored_parameters,
    find_absent,
    list_leftovers,
)
from fp8calib.model.topology.find import find_geometry, find_text_decoder
from fp8calib.model.topology.linears import is_experts
from fp8calib.model.topology.search import is_linear, is_matrix
from fp8calib.model.weight_source import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    """A model, with or without weights, and the source of its weights."""

    geometry: ModelGeometry
    unobserved: Mapping[str, str]
    """The modules whose weights no hook can observe, with the reason."""
    weights: WeightSource
    ignored: frozenset[str]
    """The modules that are excluded from calibration."""

    @property
    def model(self) -> PreTrainedModel:
        """The model itself."""
        return self.weights.model


def prepare(
    model: PreTrainedModel, checkpoint: Checkpoint, ignore: Collection[str] = ()
) -> PreparedModel:
    """Find the geometry of `model`, and the modules that the patterns of `ignore` match.

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
    names = [attention.module for _, attention in geometry.attentions()]
    names += dict.fromkeys(linear.runner for _, linear in geometry.linears())
    return PreparedModel(
        geometry=geometry,
        unobserved=unobserved,
        weights=weights,
        ignored=match_modules(ignore, names),
    )


def list_skipped(
    prepared: PreparedModel,
    observed: Collection[Site],
    unseen: Mapping[Site, str],
    *,
    query: bool,
    inputs: bool,
) -> Iterator[tuple[str, str]]:
    """List the sites and weights that were not observed, each with the reason.

    `unseen` has the reasons of an engine that ran the model. Sites of q and of inputs are listed
    only if they were to be observed.
    """
    geometry, ignored = prepared.geometry, prepared.ignored
    for module, why in prepared.unobserved.items():
        yield f"{module}.weight", why
    for layer, attention in geometry.attentions() if query else ():
        site = attention.site(Role.Q)
        if site not in observed and attention.module not in ignored:
            yield str(site), f"{layer.mixer} does not use transformers' attention interface"
    for _, linear in geometry.linears() if inputs else ():
        site = Site(linear.module, Role.INPUT)
        if site not in observed and linear.runner not in ignored:
            why = "the model does not call this linear: its input is not observed"
            yield str(site), unseen.get(site, why)
    for layer in geometry.layers:
        if layer.attention is None:
            yield layer.module, f"{layer.mixer} caches no K and V"
        elif (producer := layer.attention.producer) is not None:
            why = f"reads the K and V of layer {producer}, and carries its scale"
            yield f"{layer.attention.module}.k/v", why
    for module in sorted(ignored):
        yield module, "excluded by the recipe (observe.ignore)"
    yield from _list_outside(prepared.model)
    yield from _list_inside(prepared)
    weights = prepared.weights
    drafters = {path for site in observed for path in list_paths(site.module)}
    absent = sorted(group_by_pattern(find_absent(weights)), key=dot_natural_key)
    for names, why in (
        (
            [name for name in weights.unused if name not in drafters],
            "in the checkpoint, but not part of the text decoder: neither loaded nor run",
        ),
        (
            list_leftovers(weights),
            "in the checkpoint, but not a parameter of the model: neither loaded nor run",
        ),
        (absent, "not in the checkpoint, and not part of the text decoder: not run"),
    ):
        yield from ((name, why) for name in names)


def _list_outside(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """List the modules outside the text decoder that have weights, and are not observed."""
    path, _ = find_text_decoder(model)
    node: nn.Module = model
    above = ""
    for step in path.split(".") if path else ():
        for name, child in node.named_children():
            if name == step or next(child.parameters(), None) is None:
                continue
            if child is model.get_output_embeddings():
                yield name, "calibration needs no logits"
            else:
                yield f"{above}{name}", f"{type(child).__name__}: not part of the text decoder"
        node, above = node.get_submodule(step), f"{above}{step}."


def _list_inside(prepared: PreparedModel) -> Iterator[tuple[str, str]]:
    """List what multiplies in the text decoder, and is neither a linear of a layer nor an expert.

    These are linears outside the layers, and matrices that other modules (routers,
    hyper-connections) apply themselves. Experts are observed or in `unobserved`.
    """
    path, decoder = find_text_decoder(prepared.model)
    layers = prepared.geometry.layers[0].module.rpartition(".")[0]
    applied: dict[str, str] = {}
    for name, module in decoder.named_modules(prefix=path):
        kind = type(module).__name__
        if is_linear(module):
            if not name.startswith(f"{layers}."):
                yield name, "a linear outside the decoder layers, which engines do not quantize"
            continue
        is_depthwise = getattr(module, "groups", 1) > 1
        is_other = isinstance(module, nn.Embedding) or is_depthwise or "norm" in kind.lower()
        if is_other or is_experts(module) or name in prepared.unobserved:
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            if is_matrix(parameter) and not leaf.endswith("bias"):
                applied[f"{name}.{leaf}"] = kind
    for name, paths in group_by_pattern(applied).items():
        yield name, f"{applied[paths[0]]} applies it itself, outside any linear: not observed"
