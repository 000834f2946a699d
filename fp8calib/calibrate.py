"""The verb: run calibration data through a model and gather its statistics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from fp8calib.checkpoint.reader import Checkpoint
from fp8calib.data.plan import DataPlan, batches
from fp8calib.errors import CalibrationError
from fp8calib.geometry import ModelGeometry
from fp8calib.model.load import ModelSource
from fp8calib.model.survey import Unobserved, is_linear
from fp8calib.model.topology import find_geometry, text_decoder
from fp8calib.model.weight_stats import check_other_weights, observe_weights
from fp8calib.model.weights import WeightSource
from fp8calib.observe.observing import ObservingTaps
from fp8calib.observe.recorder import HISTOGRAM_SEQUENCES, INPUT_HISTOGRAM_TOKENS, Recorder
from fp8calib.observe.seams import tapped
from fp8calib.provenance import fingerprint_model, versions
from fp8calib.recipe import Recipe, match_modules
from fp8calib.run.streamed import Streaming, open_streamed
from fp8calib.run.streamed_calibration import LayerObserver
from fp8calib.run.whole import WholeRunner
from fp8calib.sites import Role, Site
from fp8calib.stats import CalibrationStats, SiteStats, Skipped, StatsHeader

_UNUSED = "in the checkpoint, but no part of the text decoder: neither loaded nor run"


class Progress(Protocol):
    """Is told how far the run is."""

    def stage(self, name: str, total: int | None, *, unit: str = "steps") -> None:
        """Begin a stage of `total` units."""

    def advance(self, steps: int) -> None:
        """Go on by `steps`."""


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


def calibrate(
    prepared: Prepared,
    plan: DataPlan | None,
    source: ModelSource,
    checkpoint: Checkpoint,
    *,
    recipe: Recipe,
    batch_size: int,
    progress: Progress,
    streaming: Streaming | None = None,
) -> CalibrationStats:
    """Gather the statistics that `recipe` asks for; `plan` is None when it asks for weights alone.

    With `streaming` the model has no weights yet: they are read layer by layer, each once. The
    statistics are the same, bit for bit.

    Raises:
        ModelError: a weight is NaN or inf.
        CalibrationError: an activation is NaN or inf, or a site that must be seen was not.
    """
    sites: dict[Site, SiteStats] = {}
    if streaming is not None:
        sites |= _layer_by_layer(
            prepared, plan, checkpoint, recipe, batch_size, progress, streaming
        )
    else:
        if recipe.observe.weights:
            sites |= _weights(prepared, checkpoint, progress)
        if plan is not None:
            sites |= _activations(prepared, plan, recipe, batch_size, progress)
    header = StatsHeader(
        geometry=prepared.geometry,
        model_fingerprint=fingerprint_model(source.raw_config, checkpoint),
        data_fingerprint=plan.fingerprint if plan else "",
        data_sources=plan.sources if plan else (),
        num_sequences=len(plan.sequences) if plan else 0,
        num_tokens=plan.num_tokens if plan else 0,
        recipe_name=recipe.name,
        recipe_hash=recipe.observation_hash,
        compute_dtype=str(prepared.model.dtype).removeprefix("torch."),
        histogram_sequences=HISTOGRAM_SEQUENCES,
        input_histogram_tokens=INPUT_HISTOGRAM_TOKENS,
        skipped=tuple(_skipped(prepared, recipe, sites)),
        versions=versions(),
    )
    text = plan.text.hashes if plan else torch.zeros(0, dtype=torch.int64)
    return CalibrationStats(header=header, sites=sites, text_hashes=text)


def _weights(
    prepared: Prepared, checkpoint: Checkpoint, progress: Progress
) -> dict[Site, SiteStats]:
    linears = list(prepared.geometry.linears())
    progress.stage("reading weights", len(linears))
    found: dict[Site, SiteStats] = {}
    for site, stats in observe_weights(
        prepared.model,
        (linear for _, linear in linears),
        prepared.weights,
        ignored=prepared.ignored,
    ):
        found[site] = stats
        progress.advance(1)
    read = prepared.weights.names_of({linear.weight_name for _, linear in linears})
    check_other_weights(checkpoint, [name for name in checkpoint.tensors if name not in read])
    return found


def _layer_by_layer(
    prepared: Prepared,
    plan: DataPlan | None,
    checkpoint: Checkpoint,
    recipe: Recipe,
    batch_size: int,
    progress: Progress,
    streaming: Streaming,
) -> dict[Site, SiteStats]:
    num_layers = len(prepared.geometry.layers)
    used = [torch.zeros(1, dtype=torch.int64), *(plan.sequences if plan else ())]
    with open_streamed(
        prepared.model,
        prepared.geometry,
        prepared.weights,
        checkpoint,
        torch.unique(torch.cat(used)),
        streaming,
    ) as streamed:
        observer = LayerObserver(streamed, checkpoint, recipe.observe, ignored=prepared.ignored)
        if plan is None:
            progress.stage("reading weights", num_layers, unit="layers")
            return observer.observe_weights(progress.advance)
        progress.stage("layer by layer", plan.num_tokens * num_layers, unit="layer tokens")
        sites = observer.observe(list(batches(plan, batch_size)), streaming, progress.advance)
    if recipe.observe.kv:
        _require_kv(prepared, observer.recorder)
    return sites


def _activations(
    prepared: Prepared, plan: DataPlan, recipe: Recipe, batch_size: int, progress: Progress
) -> dict[Site, SiteStats]:
    observe = recipe.observe
    recorder = Recorder()
    runner = WholeRunner(
        prepared.model, prepared.geometry, observe_kv=observe.kv, ignored=prepared.ignored
    )
    progress.stage("calibrating", plan.num_tokens, unit="tokens")
    with tapped(
        prepared.model,
        prepared.geometry,
        ObservingTaps(recorder),
        query=observe.query,
        inputs=observe.inputs,
        ignored=prepared.ignored,
    ):
        runner.run(batches(plan, batch_size), recorder, progress.advance)
    if observe.kv:
        _require_kv(prepared, recorder)
    return recorder.stats()


def _require_kv(prepared: Prepared, recorder: Recorder) -> None:
    counts = recorder.counts()
    for layer, attention in prepared.geometry.attentions():
        is_own = attention.producer is None and attention.module not in prepared.ignored
        if is_own and not counts.get(attention.site(Role.K)):
            raise CalibrationError(
                f"layer {layer.index} ({layer.mixer}) never wrote to the KV cache, though its "
                "topology says it keeps one"
            )


def _skipped(prepared: Prepared, recipe: Recipe, sites: dict[Site, SiteStats]) -> list[Skipped]:
    skipped = [Skipped(site=f"{item.module}.weight", why=item.why) for item in prepared.unobserved]
    for layer, attention in prepared.geometry.attentions():
        site = attention.site(Role.Q)
        if recipe.observe.query and site not in sites and attention.module not in prepared.ignored:
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
