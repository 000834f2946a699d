"""Batches that do not fit into memory are halved, and no sequence counts twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fp8calib.errors import CalibrationError
from tests import zoo
from tests.calibration.running import Subject, opened

CPU_MESSAGE = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 1024 bytes. Error code 12 (Cannot allocate memory)"
)
ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory."),
    MemoryError("std::bad_alloc"),
    RuntimeError(CPU_MESSAGE),
    RuntimeError("could not create a primitive"),
]


def limit_memory(
    subject: Subject, error: Exception, *, sequences: int, from_call: int = 0, layer: int = -1
) -> Any:
    """Let the last layer fail in batches of more sequences, as when memory runs out."""
    calls = 0
    last = subject.prepared.model.get_submodule(subject.prepared.geometry.layers[layer].module)

    def check(_module: object, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> None:
        nonlocal calls
        hidden = args[0] if args else kwargs["hidden_states"]
        calls += 1
        if len(hidden) > sequences and calls > from_call:
            raise error

    return last.mlp.down_proj.register_forward_pre_hook(check, with_kwargs=True)


@pytest.mark.parametrize(
    ("error", "sequences", "says"),
    [
        (ERRORS[1], 0, "out of memory at sample 0, with 1 sequences"),
        (RuntimeError("shapes differ"), 2, "shapes differ"),  # of the type of some of ERRORS
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_what_a_smaller_batch_does_not_help_is_an_error(
    tmp_path: Path, error: Exception, sequences: int, says: str, streamed: bool
) -> None:
    zoo.save("llama", tmp_path / "model")
    with opened(tmp_path / "model", streamed=streamed) as subject:
        handle = limit_memory(subject, error, sequences=sequences)
        with pytest.raises(CalibrationError, match=says):
            subject.calibrate(batch_size=4)
        handle.remove()
