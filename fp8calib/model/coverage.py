"""What a calibration did not observe, and why."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn
from transformers import PreTrainedModel

from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.geometry.sites import Role, Site
from fp8calib.model.prepared import Prepared
from fp8calib.model.survey import is_linear
from fp8calib.model.topology import text_decoder
from fp8calib.recipe import Recipe
from fp8calib.stats.calibration_stats import Skipped

_UNUSED = "in the checkpoint, but no part of the text decoder: neither loaded nor run"


def list_skipped(prepared: Prepared, recipe: Recipe, observed: Collection[Site]) -> list[Skipped]:
    """List what is missing from the sites that were observed."""
    skipped = [Skipped(site=f"{item.module}.weight", why=item.why) for item in prepared.unobserved]
    for layer, attention in prepared.geometry.attentions():
        site = attention.site(Role.Q)
        if (
            recipe.observe.query
            and site not in observed
            and attention.module not in prepared.ignored
        ):
            why = f"{layer.mixer} does not go through transformers' attention interface"
            skipped.append(Skipped(site=str(site), why=why))
    skipped += _without_own_cache(prepared.geometry)
    skipped += [
        Skipped(site=module, why="left out by the recipe (observe.ignore)")
        for module in sorted(prepared.ignored)
    ]
    skipped += [Skipped(site=name, why=why) for name, why in _outside(prepared.model)]
    skipped += [Skipped(site=name, why=why) for name, why in _between_layers(prepared)]
    skipped += [Skipped(site=name, why=_UNUSED) for name in prepared.weights.unused]
    return skipped


def _without_own_cache(geometry: ModelGeometry) -> Iterator[Skipped]:
    for layer in geometry.layers:
        attention = layer.attention
        if attention is None:
            yield Skipped(site=layer.module, why=f"{layer.mixer} keeps no K and V")
        elif attention.producer is not None:
            why = f"reads the K and V of layer {attention.producer}, and carries its scale"
            yield Skipped(site=f"{attention.module}.k/v", why=why)


def _between_layers(prepared: Prepared) -> Iterator[tuple[str, str]]:
    """Name the linears of the text decoder that are no part of a decoder layer."""
    path, decoder = text_decoder(prepared.model)
    layers = prepared.geometry.layers[0].module.rpartition(".")[0]
    for name, module in decoder.named_modules(prefix=path):
        if is_linear(module) and not name.startswith(f"{layers}."):
            yield name, "a linear outside the decoder layers, which engines leave as it is"


def _outside(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """Name what lies beside the text decoder and holds weights of its own."""
    path, _ = text_decoder(model)
    node: nn.Module = model
    above = ""
    for step in path.split(".") if path else ():
        for name, child in node.named_children():
            if name == step or next(child.parameters(), None) is None:
                continue
            if child is model.get_output_embeddings():
                yield name, "not run: calibration needs no logits, engines leave it as it is"
            else:
                yield f"{above}{name}", f"{type(child).__name__}: not part of the text decoder"
        node, above = node.get_submodule(step), f"{above}{step}."
