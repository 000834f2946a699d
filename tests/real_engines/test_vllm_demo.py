"""A real model runs in vLLM with our overlay: FP8 KV cache, our scales, and hardly any loss."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from fp8calib.data.sources import iter_builtin_rows
from tests.real_engines.exports import calibrate, read_scales
from tests.real_engines.vllm_job import Answer, VllmServer

SEQUENCES = 8
LENGTH = 512
PROMPT = "The capital of France is"
LARGEST_RATIO = 1.05


@dataclass(frozen=True, slots=True)
class Runs:
    """The same text and prompt through three servers."""

    overlay: Path
    plain: Answer
    unscaled: Answer
    calibrated: Answer


def _perplexity(answer: Answer) -> float:
    values = [value for sequence in answer.logprobs for value in sequence]
    assert len(values) == SEQUENCES * (LENGTH - 1)
    return math.exp(-sum(values) / len(values))


def _tokenize(model: Path) -> list[list[int]]:
    """Cut text that calibration does not read into sequences."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids: list[int] = []
    for row in iter_builtin_rows("verify"):
        ids += tokenizer(row.text)["input_ids"]
        if len(ids) >= SEQUENCES * LENGTH:
            break
    return [ids[start : start + LENGTH] for start in range(0, SEQUENCES * LENGTH, LENGTH)]


@pytest.fixture(scope="module")
def runs(demo_model: Path, vllm: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Calibrate the model and serve it plain, with scales of 1.0, and with its own."""
    data = ("--samples", SEQUENCES, "--seq-len", LENGTH)
    out = calibrate(demo_model, tmp_path_factory.mktemp("demo") / "smollm2" / "out", (), *data)
    overlay = out / "kv-overlay"
    options = {
        "dtype": "float32",
        "max_model_len": LENGTH + 1,
        "logprobs": _tokenize(demo_model),
        "prompt": PROMPT,
    }
    return Runs(
        overlay=overlay,
        plain=vllm(demo_model, kv_cache_dtype="auto", **options),
        unscaled=vllm(demo_model, kv_cache_dtype="fp8", **options),
        calibrated=vllm(overlay, kv_cache_dtype="fp8", **options),
    )


def test_the_overlay_runs_with_an_fp8_cache_and_our_scales(runs: Runs) -> None:
    expected = read_scales(runs.overlay)

    assert runs.calibrated.scales() == expected
    assert len(expected) == 30
    assert all(k != [1.0] and v != [1.0] for k, v in expected.values())
    assert runs.calibrated.cache_bytes() == {1}


def test_the_runs_it_is_compared_with_are_what_they_should_be(runs: Runs) -> None:
    ones = dict.fromkeys(range(30), ([1.0], [1.0]))

    assert (runs.plain.scales(), runs.plain.cache_bytes()) == (ones, {4})
    assert (runs.unscaled.scales(), runs.unscaled.cache_bytes()) == (ones, {1})
    assert runs.unscaled.logprobs != runs.plain.logprobs
    assert runs.calibrated.logprobs != runs.unscaled.logprobs


def test_the_perplexity_with_calibrated_scales_stays_under_five_percent_more(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = _perplexity(runs.plain)
    rows = {
        "KV cache fp32": reference,
        "KV cache FP8, scales 1.0": _perplexity(runs.unscaled),
        "KV cache FP8, calibrated": _perplexity(runs.calibrated),
    }
    with capsys.disabled():
        sys.stdout.write(f"\nSmolLM2-135M-Instruct in vLLM, {SEQUENCES} x {LENGTH} tokens\n")
        for name, value in rows.items():
            sys.stdout.write(f"  {name:26} ppl {value:9.4f}  ratio {value / reference:.4f}\n")

    assert 1 < reference < 100
    assert rows["KV cache FP8, calibrated"] / reference < LARGEST_RATIO


@pytest.mark.parametrize("name", ["plain", "calibrated"])
def test_the_capital_of_france_is_still_known(runs: Runs, name: str) -> None:
    assert "Paris" in getattr(runs, name).text
