"""What vLLM's weight loader does with single names: `vllm_names.py JOB RESULT`.

Runs in vLLM's own environment. JOB lists model folders with names of tensors; RESULT gives for each
name the parameters it was loaded into, or the error. The model is built, and its weights are not
loaded: the loader gets one small tensor at a time.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from vllm import LLM
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm_worker import TINY_SERVER


class AskedError(Exception):
    """All names have been tried."""


def main() -> None:
    """Answer the job of the command line, each model in a process of its own."""
    job_path, result_path = map(Path, sys.argv[1:])
    answers = {}
    for model, names in json.loads(job_path.read_text()).items():
        part = result_path.with_suffix(".part")
        child = os.fork()
        if child == 0:
            part.write_text(json.dumps(_ask(model, names)))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status == 0, f"{model}: the process ended with {status}"
        answers[model] = json.loads(part.read_text())
    result_path.write_text(json.dumps(answers))


def _ask(model: str, names: Iterable[str]) -> dict[str, Any]:
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


if __name__ == "__main__":
    main()
