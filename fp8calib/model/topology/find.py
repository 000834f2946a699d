"""Find the geometry of a model from its modules: layers, attention, projections and experts.

The only facts known per architecture are in `layouts`, such as the order of rows in fused q/k/v
weights. Anything ambiguous is a ModelError that names the class and what was searched for.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature

from torch import nn
from transformers import PreTrainedModel

from fp8calib.errors import Fp8CalibError, ModelError, first_line
from fp8calib.model.shapes import Layer, ModelGeometry
from fp8calib.model.topology.attention import find_mixer
from fp8calib.model.topology.linears import find_linears
from fp8calib.model.topology.search import GeometrySearch, name_class


def find_text_decoder(model: PreTrainedModel) -> tuple[str, nn.Module]:
    """Find the module that computes the last hidden state from tokens, with its path.

    Raises:
        ModelError: the model's `get_decoder()` is not one of its modules.
    """
    decoder = model.get_decoder()
    if isinstance(decoder, nn.Linear):  # modernbert-decoder's output layer has this name
        decoder = model.base_model
    if isinstance(decoder, PreTrainedModel) and decoder.get_output_embeddings() is not None:
        # Llama4ForCausalLM names itself, lm_head included, as its decoder
        inner = [child for child in decoder.children() if isinstance(child, PreTrainedModel)]
        decoder = inner[0] if len(inner) == 1 else decoder
    for name, module in model.named_modules():
        if module is decoder:
            return name, module
    raise ModelError(f"{type(model).__name__}: get_decoder() gives none of its modules")


def name_cache_argument(decoder: nn.Module) -> str:
    """Name the argument of a forward pass that takes the cache; the output has it by that name.

    Transformers 5.24 renamed `past_key_values`, which it still takes, with a warning.
    """
    parameters = signature(decoder.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def find_geometry(
    model: PreTrainedModel, checkpoint_names: Mapping[str, str], *, checkpoint_dtype: str
) -> tuple[ModelGeometry, Mapping[str, str]]:
    """Describe the decoder layers of `model`.

    Args:
        model: the model, with or without weights (meta tensors suffice).
        checkpoint_names: parameter -> name of its tensor, if it is one whole tensor.
        checkpoint_dtype: the dtype of the stored weights, such as `bfloat16`.

    Returns:
        The geometry, and the modules in decoder layers whose weights calibration cannot observe,
        with the reason.

    Raises:
        ModelError: there are no decoder layers, a layer has neither attention nor a known other
            mixer, or a fused layout is unknown.
    """
    prefix, decoder = find_text_decoder(model)
    config = model.config.get_text_config(decoder=True)
    search = GeometrySearch(
        config=config,
        checkpoint_names=checkpoint_names,
        family=name_class(decoder).removesuffix("Model"),
    )
    try:
        layers = _find_layers(search, prefix, decoder)
    except Fp8CalibError:
        raise
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__}: its layers are not understood: {first_line(error)}",
            hint="this architecture is not supported",
        ) from error
    if not any(layer.attention for layer in layers):
        raise ModelError(
            f"{type(model).__name__}: none of its {len(layers)} layers has a KV cache",
            hint="this architecture has no KV cache to calibrate",
        )
    drafters = getattr(config, "num_nextn_predict_layers", None)
    geometry = ModelGeometry(
        architecture=name_class(model),
        model_type=type(config).model_type,
        checkpoint_dtype=checkpoint_dtype,
        layers=tuple(layers),
        num_draft_layers=max(drafters, 0) if isinstance(drafters, int) else 0,
    )
    return geometry, search.unobserved


def _find_layers(search: GeometrySearch, prefix: str, decoder: nn.Module) -> list[Layer]:
    name, blocks = _decoder_layers(decoder, search.config.num_hidden_layers)
    path = f"{prefix}.{name}" if prefix else name
    layers: list[Layer] = []
    for index, block in enumerate(blocks):
        module = f"{path}.{index}"
        attention, mixer = find_mixer(search, layers, index, module, block)
        linears = tuple(find_linears(search, attention, module, block))
        layers.append(
            Layer(index=index, module=module, mixer=mixer, attention=attention, linears=linears)
        )
    return layers


def _decoder_layers(decoder: nn.Module, num_layers: int) -> tuple[str, nn.ModuleList]:
    """Find the list of the decoder layers; lists inside the elements of a list do not count."""
    lists: list[str] = []
    for name, module in decoder.named_modules():
        if not isinstance(module, nn.ModuleList) or name.startswith(tuple(lists)):
            continue
        if len(module) == num_layers:
            return name, module
        lists.append(f"{name}.")
    raise ModelError(
        f"{type(decoder).__name__}: no list of {num_layers} decoder layers found "
        "(looked for an nn.ModuleList of num_hidden_layers blocks)"
    )
