"""What each type of the KV cache costs a model, by a cache that stores each vector by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel

from tests.plugins.kv_types import by_hand
from tests.plugins.kv_types.by_hand import OneVector, Vector
from tests.verification.by_hand import Change, HandCache, cast, changed_queries, text_config


def _cast_one(x: Vector) -> Vector:
    return np.asarray(cast(torch.from_numpy(x), 1.0))


def _e5m2(x: Vector) -> Vector:
    return np.asarray(cast(torch.from_numpy(x), 1.0, torch.float8_e5m2))


def _rotated_e4m3(x: Vector) -> Vector:
    """Cast the rotated q, as it multiplies the rotated K."""
    matrix = by_hand.hadamard_matrix(len(x))
    codes = _cast_one((matrix @ x).astype(np.float32)).astype(np.float64)
    return np.asarray(matrix @ codes, np.float32)


@dataclass(frozen=True)
class Stored:
    """How a type stores one vector of K and of V, what it makes of q, and which ends it leaves."""

    key: OneVector
    value: OneVector
    query: OneVector | None = None
    plain_ends: int = 0


def _both(store: OneVector, query: OneVector | None = None) -> Stored:
    return Stored(store, store, query)


def _turboquant(key: OneVector, bits: int) -> Stored:
    return Stored(key, by_hand.uniform_value(bits), plain_ends=2)


TYPES: Mapping[str, Stored] = {
    "scale-1.0": _both(_cast_one),
    "fp8_e5m2": _both(_e5m2),
    "fp8_per_token_head": _both(by_hand.fp8_per_token_head),
    "int8_per_token_head": _both(by_hand.int8_per_token_head),
    "int4_per_token_head": _both(partial(by_hand.int4_per_token_head, dtype=np.float32)),
    "nvfp4": _both(by_hand.nvfp4),
    "nvfp4_4over6": _both(by_hand.nvfp4_4over6),
    "turboquant_k8v4": _turboquant(_cast_one, 4),
    "turboquant_4bit_nc": _turboquant(by_hand.turboquant_key(4), 4),
    "turboquant_k3v4_nc": _turboquant(by_hand.turboquant_key(3), 4),
    "turboquant_3bit_nc": _turboquant(by_hand.turboquant_key(3), 3),
    "ultraquant_4bit": Stored(
        by_hand.ultraquant_key, by_hand.ultraquant, _rotated_e4m3, plain_ends=2
    ),
    "mxfp8": _both(by_hand.mxfp8, by_hand.mxfp8),
    "fp4_mx_block16": _both(by_hand.mx_block16),
}


def score(model: PreTrainedModel, text: Sequence[torch.Tensor]) -> Iterator[tuple[str, float]]:
    """Give each type and the mean divergence of the model's next tokens with it."""
    with torch.no_grad():
        plain = [model(ids[None]).logits.double().log_softmax(-1) for ids in text]
        for name, stored in TYPES.items():
            klds = [
                (wanted.exp() * (wanted - _run(model, stored, ids))).sum(-1)[0, :-1]
                for ids, wanted in zip(text, plain, strict=True)
            ]
            yield name, float(torch.cat(klds).mean())


def _run(model: PreTrainedModel, stored: Stored, ids: torch.Tensor) -> torch.Tensor:
    layers = range(text_config(model).num_hidden_layers)
    quantized = layers[stored.plain_ends : len(layers) - stored.plain_ends]
    key, value = _store_all(stored.key), _store_all(stored.value)
    query = _keep if stored.query is None else _store_all(stored.query)
    changes = {i: (key, value) if i in quantized else (_keep, _keep) for i in layers}
    queries = [query if i in quantized else _keep for i in layers]
    cache = HandCache(text_config(model), changes)
    with changed_queries(model, queries):
        logits: torch.Tensor = model(ids[None], past_key_values=cache).logits
    return logits.double().log_softmax(-1)


def _keep(x: torch.Tensor) -> torch.Tensor:
    return x


def _store_all(store: OneVector) -> Change:
    return partial(_store_rows, store)


def _store_rows(store: Callable[[Vector], Vector], x: torch.Tensor) -> torch.Tensor:
    rows = [store(row.numpy()) for row in x.float().reshape(-1, x.shape[-1])]
    return torch.from_numpy(np.stack(rows)).reshape(x.shape).to(x.dtype)
