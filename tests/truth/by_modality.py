"""What a model's text decoder sees of text, images and sound, by transformers alone.

The whole model runs one row of messages, and everything is kept by position. Where a position's
input is not the plain embedding of its token, a medium filled it. Which medium, the id of the
placeholder in the config tells.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from transformers import (
    AutoModelForMultimodalLM,
    AutoProcessor,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
    ProcessorMixin,
    cache_utils,
)

MEDIA = ("image", "audio")


@dataclass
class Seen:
    """What one row is to the text decoder, by position."""

    layers: str
    """The name of the list of the decoder's layers."""
    arguments: dict[str, Any]
    """The keyword arguments of the module that holds this list."""
    received: torch.Tensor
    """The embeddings that it received, [positions, width]."""
    filled: np.ndarray
    """Which of them are not the plain embedding of their token, [positions]."""
    placeholder: np.ndarray
    """The medium whose placeholder each token is, or `text`, [positions]."""
    kv: dict[int, list[tuple[torch.Tensor, torch.Tensor]]]
    """Arguments K and V of each call of `update`, [1, heads, positions, width], by layer."""
    inputs: dict[str, list[torch.Tensor]]
    """Inputs of each linear inside the decoder, [..., positions, channels]."""

    @property
    def modality(self) -> np.ndarray:
        """The modality of each position: that of its placeholder where it is filled."""
        return np.where(self.filled, self.placeholder, "text")

    @property
    def tokens(self) -> dict[str, int]:
        """The number of positions of each modality that the row has."""
        names, counts = np.unique(self.modality, return_counts=True)
        return dict(zip(names.tolist(), counts.tolist(), strict=True))

    def head_amax(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Largest magnitude of a layer's K and V, [heads] each."""
        keys, values = zip(*self.kv[layer], strict=True)
        return tuple(
            np.stack([x[0].abs().amax((1, 2)).numpy() for x in each]).max(0)
            for each in (keys, values)
        )

    def channel_amax(self, linear: str) -> np.ndarray:
        """Largest magnitude of a linear's input, [channels]."""
        return np.stack(
            [x.abs().reshape(-1, x.shape[-1]).amax(0) for x in self.inputs[linear]]
        ).max(0)


def run(folder: Path, row: list[dict[str, Any]]) -> Seen:
    """Run a row through the model of a folder, in fp32, on the inputs of its own processor."""
    model, processor = _open(folder)
    template = processor.chat_template or processor.tokenizer.chat_template
    inputs = processor.apply_chat_template(
        row, chat_template=template, tokenize=True, return_dict=True, return_tensors="pt"
    )
    return watch(model, dict(inputs.to(torch.float32)))


@lru_cache(maxsize=1)
def _open(folder: Path) -> tuple[PreTrainedModel, ProcessorMixin]:
    """Open a folder, from which several rows are run one after another."""
    model = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoProcessor.from_pretrained(folder)


def watch(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> Seen:
    """Run a model on inputs of one row and keep what its text decoder saw.

    A linear that saw other rows than the row's positions is an error.
    """
    ids = inputs["input_ids"][0]
    layers = _find_layers(model, inputs)
    kv: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
    linears: dict[str, list[torch.Tensor]] = defaultdict(list)
    given: list[tuple[dict[str, Any], torch.Tensor]] = []
    with ExitStack() as stack, torch.no_grad():
        stack.enter_context(_keep_updates(lambda layer, k, v: kv[layer].append((k, v))))
        stack.enter_context(_keep_inputs(model, layers, linears))
        stack.enter_context(_keep_arguments(model, layers, given))
        _forward(model, inputs)
        plain = _embed(model, ids)
    for name, rows in linears.items():
        if any(x.shape[-2] != len(ids) for x in rows):
            raise ValueError(f"{name} saw {rows[0].shape[-2]} rows, not {len(ids)}")
    [(arguments, received)] = given
    return Seen(
        layers=layers,
        arguments=arguments,
        received=received,
        filled=(received != plain).any(-1).numpy(),
        placeholder=_find_placeholders(model.config, ids),
        kv=dict(kv),
        inputs=dict(linears),
    )


def _forward(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> None:
    """Run with a cache from outside, as generation does; some decoders make none themselves."""
    config = model.config.get_text_config(decoder=True)
    model(**inputs, past_key_values=DynamicCache(config=config), use_cache=True)


def _embed(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Embed tokens; ids beyond the table have no embedding of their own, which is NaN here."""
    embedding = model.get_input_embeddings()
    inside = ids < embedding.weight.shape[0]
    return torch.where(inside[:, None], embedding(ids * inside), torch.nan)


def _find_placeholders(config: PreTrainedConfig, ids: torch.Tensor) -> np.ndarray:
    found = np.full(len(ids), "text", dtype="U5")
    for medium in reversed(MEDIA):
        for each in (config, *(getattr(config, key) for key in config.sub_configs_defaults)):
            token = getattr(each, f"{medium}_token_id", None)
            if token is not None:
                found[(ids == token).numpy()] = medium
    return found


def _find_layers(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> str:
    """Find the list whose modules write the cache, by looking who runs when it is written."""
    running: list[str] = []
    writers: list[str] = []
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
        handles.append(module.register_forward_hook(lambda *_: (running.pop(), None)[1]))
    try:
        with torch.no_grad(), _keep_updates(lambda *_: writers.append(running[-1])):
            _forward(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    [layers] = {re.split(r"\.\d+\.", name)[0] for name in writers}
    return layers


@contextmanager
def _keep_updates(keep: Any) -> Iterator[None]:
    original = cache_utils.Cache.update

    def update(self: Any, key: Any, value: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        keep(layer_idx, key.clone(), value.clone())
        return original(self, key, value, layer_idx, *args, **kwargs)

    with patch.object(cache_utils.Cache, "update", update):
        yield


@contextmanager
def _keep_inputs(
    model: nn.Module, layers: str, kept: dict[str, list[torch.Tensor]]
) -> Iterator[None]:
    """Keep inputs of linears inside and beside the layers; a tower beside them has its own list."""
    decoder = layers.rpartition(".")[0]
    beside = [
        f"{decoder}.{name}"
        for name, child in model.get_submodule(decoder).named_children()
        if not any(isinstance(each, nn.ModuleList) for each in list(child.modules())[1:])
    ]
    inside = tuple(f"{name}." for name in {*beside, layers})
    handles = [
        module.register_forward_pre_hook(
            lambda _, args, name=name: kept[name].append(args[0].clone())
        )
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and f"{name}.".startswith(inside)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _keep_arguments(
    model: nn.Module, layers: str, kept: list[tuple[dict[str, Any], torch.Tensor]]
) -> Iterator[None]:
    """Keep the decoder's arguments and its embeddings, which are the first layer's without any."""
    arguments: dict[str, Any] = {}

    def keep_all(_: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
        arguments.update(kwargs)

    def keep_first(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        embeddings = arguments.get("inputs_embeds")
        if embeddings is None:
            embeddings = args[0] if args else kwargs["hidden_states"]
        kept.append((dict(arguments), embeddings[0].clone()))

    decoder = model.get_submodule(layers.rpartition(".")[0])
    handles = [
        decoder.register_forward_pre_hook(keep_all, with_kwargs=True),
        model.get_submodule(f"{layers}.0").register_forward_pre_hook(keep_first, with_kwargs=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
