"""`fp8calib verify` as a user runs it, and what it wrote."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

PROSE = Path(os.__file__).parent / "idlelib" / "help.html"
"""The handbook of IDLE, which Python carries; calibration's builtin text has none of it."""
_SHORTEST_PARAGRAPH = 120
UNSCALED = "scale-1.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The report and the log-probabilities by candidate."""

    report: Mapping[str, Any]
    logprobs: Mapping[str, torch.Tensor]

    def candidate(self, name: str) -> Mapping[str, Any]:
        """Give the numbers of one candidate."""
        (found,) = (entry for entry in self.report["candidates"] if entry["name"] == name)
        return found

    def largest_share(self, candidate: str, role: str, share: str) -> float:
        """Give the largest `share` (clipped, flushed) among the layers' sites of `role`."""
        return max(
            layer[share]
            for layer in self.report["layers"]
            if layer["candidate"] == candidate and layer["site"].endswith(f".{role}")
        )


class _Paragraphs(HTMLParser):
    """Collects the text of a page's paragraphs."""

    def __init__(self) -> None:
        super().__init__()
        self._is_inside = False
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        if tag == "p":
            self._is_inside = True
            self.found.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "p":
            self._is_inside = False

    def handle_data(self, data: str) -> None:
        if self._is_inside:
            self.found[-1] += data


def read_prose() -> str:
    """Give the long paragraphs of the handbook, some 28,000 characters."""
    if not PROSE.is_file():
        pytest.skip(f"this Python comes without {PROSE}, the text that is scored")
    page = _Paragraphs()
    page.feed(PROSE.read_text(encoding="utf-8"))
    paragraphs = (" ".join(paragraph.split()) for paragraph in page.found)
    return "\n\n".join(text for text in paragraphs if len(text) > _SHORTEST_PARAGRAPH)


def tokenize_prose(model: Path, num_sequences: int, length: int) -> list[list[int]]:
    """Cut the beginning of the prose into sequences."""
    ids = AutoTokenizer.from_pretrained(model)(read_prose())["input_ids"]
    assert len(ids) >= num_sequences * length
    return [ids[start * length : (start + 1) * length] for start in range(num_sequences)]


def verify(
    model: Path,
    scales: Path,
    sequences: Sequence[Sequence[int]],
    folder: Path,
    *,
    engine: str = "vllm-cpu",
) -> Verification:
    """Verify scales in fp32; what it writes goes to `folder`, which need not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    data, dump = folder / "rows.jsonl", folder / "logprobs.safetensors"
    data.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in sequences))
    options = {
        "--scales": scales,
        "--engine": engine,
        "--data": data,
        "--seq-len": len(sequences[0]),
        "--dtype": "float32",
        "--dump": dump,
    }
    flat = [str(part) for option in options.items() for part in option]
    command = [sys.executable, "-m", "fp8calib", "verify", str(model), *flat, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return Verification(report=json.loads(done.stdout), logprobs=load_file(dump))


def flatten(logprobs: Sequence[Sequence[float]]) -> torch.Tensor:
    """Join an engine's log-probabilities: fp64, sequences in order."""
    return torch.tensor(logprobs, dtype=torch.float64).flatten()


def perplexity(logprobs: torch.Tensor) -> float:
    """Give exp of the mean negative log-probability."""
    return math.exp(-logprobs.double().mean().item())
