"""Batches that do not fit into memory are halved, and no sequence counts twice."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fp8calib.errors import CalibrationError
from tests import zoo
from tests.doors import Subject, opened


def limit_memory(subject: Subject, error: Exception, *, sequences: int, layer: int = -1) -> Any:
    """Let a layer fail in batches of more sequences, as when memory runs out."""
    last = subject.prepared.model.get_submodule(subject.prepared.geometry.layers[layer].module)

    def check(_module: object, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> None:
        if len(args[0] if args else kwargs["hidden_states"]) > sequences:
            raise error

    return last.mlp.down_proj.register_forward_pre_hook(check, with_kwargs=True)


@pytest.mark.parametrize(
    ("error", "sequences", "says"),
    [
        (MemoryError("std::bad_alloc"), 0, "out of memory at sample 0, with 1 sequences"),
        (RuntimeError("shapes differ"), 2, "shapes differ"),  # of the type of torch's own
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_what_a_smaller_batch_does_not_help_is_an_error(
    tmp_path: Path, error: Exception, sequences: int, says: str, streamed: bool
) -> None:
    zoo.save("llama", tmp_path / "model")
    with opened(tmp_path / "model", streamed=streamed) as subject:
        limit_memory(subject, error, sequences=sequences)
        with pytest.raises(CalibrationError, match=says):
            subject.calibrate(batch_size=4)
