"""Calibrations of tiny models inside vLLM, whose workers' answers are recorded.

`goldens/` has what the workers of vLLM 0.32.0 answered; `scripts/test-engines --record` writes it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests import zoo

GOLDENS = Path(__file__).with_name("goldens")
WIDTH = {"hidden_size": 128}
"""vLLM's CPU kernels want heads of a multiple of 32 elements: 4 heads of 32."""
SEQ_LEN = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and the ranks that run it."""

    family: str
    tp: int = 1
    pp: int = 1

    def save_model(self, folder: Path) -> Path:
        """Write the model, float32 with random weights."""
        zoo.save(self.family, folder, **WIDTH)
        return folder

    @property
    def arguments(self) -> Mapping[str, Any]:
        """How `calibrate` runs it."""
        return {
            "tensor_parallel_size": self.tp,
            "pipeline_parallel_size": self.pp,
        }


CASES = {
    "llama": Case(family="llama"),
    "llama-tp2": Case(family="llama", tp=2),
    "llama-tp4": Case(family="llama", tp=4),
    "llama-pp2": Case(family="llama", pp=2),
    "mixtral-tp2": Case(family="mixtral", tp=2),
}


def make_rows() -> list[dict[str, list[int]]]:
    """Make nine rows of three lengths, as token ids."""
    ids = torch.randint(3, 128, (9, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row[: SEQ_LEN - 5 * (i % 3)]} for i, row in enumerate(ids.tolist())]
