"""What vLLM's weight loader does with single names, in a fork of `vllm_forks.py`.

The model is built, and its weights are not loaded: the loader gets one small tensor at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm import LLM
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm_worker import TINY_SERVER


class AskedError(Exception):
    """All names have been tried."""


def try_names(model: str, names: Iterable[str]) -> dict[str, Any]:
    """Give for each name the parameters that a tensor is loaded into, or the error."""
    answer: dict[str, Any] = {}

    def ask(_: Any, module: torch.nn.Module, *__: Any) -> None:
        parameters = dict(module.named_parameters())
        for name in names:
            answer[name] = _load(module, parameters, name)
        raise AskedError

    DefaultModelLoader.load_weights = ask
    try:
        LLM(
            model=model,
            dtype="bfloat16",
            **TINY_SERVER,
        )
    except AskedError:
        return answer
    raise AssertionError(f"{model}: vLLM never came to its weights")


def _load(module: Any, parameters: dict[str, Any], name: str) -> list[str] | str:
    """Give the parameters that one tensor is loaded into, or the error."""
    try:
        loaded = module.load_weights(iter([(name, torch.tensor([0.25]))]))
    except Exception as error:  # noqa: BLE001 -- whatever the engine says is the answer
        return f"{type(error).__name__}: {error}"
    return sorted(set(loaded) & parameters.keys())
