"""Notes on what an engine may quantize but the emulation does not."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from fp8calib.dialects.fp8.checkpoint import Fp8Checkpoint
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.model.load import LoadedModel
from fp8calib.model.topology.find import find_text_decoder
from fp8calib.model.topology.search import is_linear
from fp8calib.model.weight_source import WeightSource
from fp8calib.verification.emulation.weights import WeightChange, is_router


def find_scheme_gaps(
    name: str, geometry: ModelGeometry, unobserved: Collection[str], model: LoadedModel
) -> Iterator[str]:
    """Note the linears of the text decoder that the emulation of a scheme does not quantize.

    `unobserved`: paths of modules in decoder layers that multiply by their weights themselves.
    """
    path, decoder = find_text_decoder(model)
    known = {linear.module for _, linear in geometry.linears()}
    linears = {f"{path}.{n}" if path else n for n, m in decoder.named_modules() if is_linear(m)}
    missed = sorted(m for m in (linears - known) | set(unobserved) if not is_router(m))
    if missed:
        yield f"{name}: not quantized here, though an engine may: {_first_of(missed)}"


def find_checkpoint_gaps(
    name: str,
    changes: Sequence[WeightChange],
    checkpoint: Fp8Checkpoint,
    source: WeightSource,
    model: LoadedModel,
) -> Iterator[str]:
    """Note what a checkpoint quantizes outside the linears of the decoder layers.

    `source` reads the checkpoint by the model's parameter names.
    """
    linears = {p.name for change in changes for p in change.parameters if p.sites}
    others = {parameter for parameter, _ in model.named_parameters()} - linears
    quantized = {p for p in others if source.tensor_names([p]) & checkpoint.quantized}
    inside = {parameter for parameter in quantized if is_of_decoder(parameter, model)}
    if inside:
        yield (
            f"{name}: {_first_of(sorted(inside))}: only the weights are quantized here, not the "
            "inputs: not a linear of a decoder layer"
        )
    if quantized - inside:
        beside = _first_of(sorted(quantized - inside))
        yield f"{name}: ignored, as it is not part of the text decoder: {beside}"


def is_of_decoder(parameter: str, model: LoadedModel) -> bool:
    """Tell whether a parameter belongs to the text decoder (tokens to last hidden state)."""
    path = find_text_decoder(model)[0]
    return not path or parameter.startswith(f"{path}.")


def list_embedding_and_head(model: LoadedModel) -> list[str]:
    """List the parameters of the embedding and of the output head."""
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    weights = [module.weight for module in modules if module is not None]
    return [name for name, value in model.named_parameters() if any(value is w for w in weights)]


def _first_of(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if names[1:] else ""
    return f"{names[0]}{more}"
