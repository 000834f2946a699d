"""`verify --engine vllm-cpu` predicts what real vLLM does with an FP8 KV cache.

The bounds leave little room, and cannot: rounding is a step, so two correct computations that
differ in the last bit of fp32 store different codes here and there, and drift apart from layer to
layer. The emulation with another attention kernel correlates 0.96 to 0.97 with itself on prose.
"""

import html
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.cli.conftest import write_rows
from tests.cli.program import succeed
from tests.real_engines.changed_models import save_rescaled
from tests.real_engines.exports import calibrate, read_scales
from tests.real_engines.vllm_job import Answer, VllmServer

PROSE = Path(os.__file__).parent / "idlelib" / "help.html"
"""The handbook of IDLE, which Python carries; calibration's builtin text has none of it."""
SHORTEST_PARAGRAPH = 120
SEQUENCES, LENGTH = 12, 512
FEW_SEQUENCES, SHORT = 8, 256
CALIBRATION = ("--samples", 8, "--seq-len", 512, "--dtype", "float32")
UNSCALED = "scale-1.0"
RATIO_TOLERANCE = 0.002
SMALLEST_CORRELATION = 0.95
FACTOR = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What `verify` reported, and the log-probabilities by candidate."""

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


def verify(
    model: Path, scales: Path, sequences: Sequence[Sequence[int]], folder: Path, engine: str
) -> Verification:
    """Verify scales in fp32; what it writes goes to `folder`, which need not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    data = write_rows(folder / "rows.jsonl", [{"input_ids": ids} for ids in sequences])
    dump = folder / "logprobs.safetensors"
    size = ("--seq-len", len(sequences[0]), "--dtype", "float32", "--engine", engine)
    asked = ("verify", model, "--scales", scales, "--data", data, *size, "--dump", dump, "--json")
    return Verification(report=succeed(*asked).json, logprobs=load_file(dump))


def tokenize_prose(model: Path, num_sequences: int, length: int) -> list[list[int]]:
    """Cut the beginning of the handbook's long paragraphs into sequences."""
    if not PROSE.is_file():
        pytest.skip(f"this Python comes without {PROSE}, the text that is scored")
    found = re.findall(r"<p>(.*?)</p>", PROSE.read_text(encoding="utf-8"), re.DOTALL)
    plain = (" ".join(html.unescape(re.sub("<[^>]*>", "", each)).split()) for each in found)
    text = "\n\n".join(each for each in plain if len(each) > SHORTEST_PARAGRAPH)
    ids = AutoTokenizer.from_pretrained(model)(text)["input_ids"]
    assert len(ids) >= num_sequences * length
    return [ids[start * length : (start + 1) * length] for start in range(num_sequences)]


def score(vllm: VllmServer, model: Path, sequences: list[list[int]], kv_cache_dtype: str) -> Answer:
    answer = vllm(
        model,
        kv_cache_dtype=kv_cache_dtype,
        dtype="float32",
        max_model_len=len(sequences[0]) + 1,
        logprobs=sequences,
    )
    assert answer.error == ""
    assert answer.cache_bytes() == {1 if kv_cache_dtype == "fp8" else 4}
    return answer


def flatten(answer: Answer) -> torch.Tensor:
    """Join an engine's log-probabilities: fp64, sequences in order."""
    return torch.tensor(answer.logprobs, dtype=torch.float64).flatten()


def perplexity(logprobs: torch.Tensor) -> float:
    """Give exp of the mean negative log-probability."""
    return math.exp(-logprobs.double().mean().item())


@pytest.fixture(scope="module")
def overlay(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the demo model with scales that are calibrated on text that every Python carries."""
    out = tmp_path_factory.mktemp("overlay")
    return calibrate(demo_model, out, (), *CALIBRATION) / "kv-overlay"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One text, without FP8 and with it, in vLLM and here."""

    engine_reference: torch.Tensor
    engine: Mapping[str, torch.Tensor]
    """By our name of the candidate."""
    ours: Verification

    def changes(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Give what FP8 adds to each token's log-probability: in vLLM, and here."""
        ours = self.ours.logprobs[name] - self.ours.logprobs["reference"]
        return self.engine[name] - self.engine_reference, ours.double()


@pytest.fixture(scope="module")
def compared(
    demo_model: Path, overlay: Path, vllm: VllmServer, tmp_path_factory: pytest.TempPathFactory
) -> Compared:
    """Score the prose in vLLM and with `fp8calib verify`."""
    sequences = tokenize_prose(demo_model, SEQUENCES, LENGTH)
    folder = tmp_path_factory.mktemp("compared")
    models = {UNSCALED: demo_model, str(overlay): overlay}
    return Compared(
        engine_reference=flatten(score(vllm, demo_model, sequences, "auto")),
        engine={
            name: flatten(score(vllm, each, sequences, "fp8")) for name, each in models.items()
        },
        ours=verify(demo_model, overlay, sequences, folder, "vllm-cpu"),
    )


def test_without_fp8_every_token_has_the_probability_it_has_in_vllm(compared: Compared) -> None:
    ours = compared.ours.logprobs["reference"].double()

    torch.testing.assert_close(ours, compared.engine_reference, atol=1e-3, rtol=0)


def test_perplexities_and_the_changes_of_tokens_are_those_of_vllm(compared: Compared) -> None:
    for name in compared.engine:
        engine, ours = (perplexity(change) for change in compared.changes(name))
        reported = compared.ours.candidate(name)["ppl_ratio"]
        assert reported == pytest.approx(ours, rel=1e-5)
        assert reported == pytest.approx(engine, abs=RATIO_TOLERANCE)
        correlation = torch.corrcoef(torch.stack(compared.changes(name)))[0, 1].item()
        assert correlation >= SMALLEST_CORRELATION


@pytest.mark.parametrize(
    ("keys", "values"),
    [(1 / FACTOR, FACTOR), (FACTOR, 1 / FACTOR)],
    ids=["small-keys-large-values", "large-keys-small-values"],
)
def test_a_rescaled_model_breaks_with_scales_of_one_and_is_whole_with_its_own(
    demo_model: Path, overlay: Path, vllm: VllmServer, tmp_path: Path, keys: float, values: float
) -> None:
    """In vLLM as here; for an engine that rounds to nearest, and leaves q alone, too."""
    model = save_rescaled(demo_model, tmp_path / "model", keys=keys, values=values)
    scales = calibrate(model, tmp_path / "out", (), *CALIBRATION) / "kv-overlay"
    assert read_scales(scales) == {
        layer: ([k * keys], [v * values]) for layer, ([k], [v]) in read_scales(overlay).items()
    }
    sequences = tokenize_prose(demo_model, FEW_SEQUENCES, SHORT)
    calibrated = score(vllm, scales, sequences, "fp8")
    assert calibrated.scales() == read_scales(scales)
    runs = [flatten(score(vllm, model, sequences, "fp8")), flatten(calibrated)]
    ours = verify(model, scales, sequences, tmp_path / "ours", "vllm-cpu")
    reference = perplexity(ours.logprobs["reference"])
    engine = [perplexity(each) / reference for each in runs]
    assert engine[0] > 10
    assert engine[1] < 1.05
    found = [ours.candidate(name)["ppl_ratio"] for name in (UNSCALED, str(scales))]
    assert found == [pytest.approx(engine[0], rel=0.05), pytest.approx(engine[1], abs=0.005)]
    small, large = ("k", "v") if keys < 1 else ("v", "k")
    assert ours.largest_share(UNSCALED, large, "clipped") > 0.5
    assert ours.largest_share(UNSCALED, small, "flushed") > 0.5
    assert ours.largest_share(str(scales), large, "clipped") < 0.001
    assert ours.largest_share(str(scales), small, "flushed") < 0.05

    nearest = verify(model, scales, sequences, tmp_path / "nearest", "reference")
    verdicts = [each.candidate(UNSCALED)["verdict"] for each in (ours, nearest)]
    assert verdicts == ["fail", "fail"]
    assert nearest.candidate(str(scales))["verdict"] in {"pass", "no-difference"}
