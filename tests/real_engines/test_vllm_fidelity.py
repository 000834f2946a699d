"""`verify --engine vllm-cpu` predicts what real vLLM does with an FP8 KV cache.

The bounds leave little room, and cannot: rounding is a step, so two correct computations that
differ in the last bit of fp32 store different codes here and there, and drift apart from layer to
layer. The emulation with another attention kernel correlates 0.96 to 0.97 with itself on prose.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.real_engines.changed_models import save_rescaled
from tests.real_engines.exports import calibrate, read_scales
from tests.real_engines.verifying import (
    UNSCALED,
    Verification,
    flatten,
    perplexity,
    tokenize_prose,
    verify,
)
from tests.real_engines.vllm_job import Answer, VllmServer

SEQUENCES = 12
LENGTH = 512
CALIBRATION = ("--samples", 8, "--seq-len", 512, "--dtype", "float32")
"""Text that every Python carries; the prose is none of it."""

RATIO_TOLERANCE = 0.002
SMALLEST_CORRELATION = 0.95

FACTOR = 4096
FEW_SEQUENCES = 8
SHORT = 256


@pytest.fixture(scope="module")
def overlay(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the demo model with calibrated scales."""
    return calibrate(demo_model, tmp_path_factory.mktemp("overlay"), (), *CALIBRATION) / (
        "kv-overlay"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One text, without FP8 and with it, in vLLM and here."""

    engine_reference: torch.Tensor
    engine: dict[str, torch.Tensor]
    ours: Verification
    scales: str

    def candidates(self) -> dict[str, str]:
        """Give our names of the candidates by the engine's."""
        return {"unscaled": UNSCALED, "calibrated": self.scales}

    def changes(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Give what FP8 adds to each token's log-probability: in vLLM, and here."""
        ours = self.ours.logprobs[self.candidates()[name]] - self.ours.logprobs["reference"]
        return self.engine[name] - self.engine_reference, ours.double()

    def ratios(self, name: str) -> tuple[float, float]:
        """Give by what factor FP8 raises the perplexity: in vLLM, and here."""
        engine, ours = (perplexity(change) for change in self.changes(name))
        return engine, ours


@pytest.fixture(scope="module")
def compared(
    demo_model: Path, overlay: Path, vllm: VllmServer, tmp_path_factory: pytest.TempPathFactory
) -> Compared:
    """Score the prose in vLLM and with `fp8calib verify`."""
    sequences = tokenize_prose(demo_model, SEQUENCES, LENGTH)

    def score(model: Path, kv_cache_dtype: str) -> torch.Tensor:
        return flatten(_score(vllm, model, sequences, kv_cache_dtype).logprobs)

    return Compared(
        engine_reference=score(demo_model, "auto"),
        engine={"unscaled": score(demo_model, "fp8"), "calibrated": score(overlay, "fp8")},
        ours=verify(demo_model, overlay, sequences, tmp_path_factory.mktemp("compared")),
        scales=str(overlay),
    )


def _score(
    vllm: VllmServer, model: Path, sequences: list[list[int]], kv_cache_dtype: str
) -> Answer:
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


def test_without_fp8_every_token_has_the_probability_it_has_in_vllm(compared: Compared) -> None:
    ours = compared.ours.logprobs["reference"].double()

    torch.testing.assert_close(ours, compared.engine_reference, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", ["unscaled", "calibrated"])
def test_the_perplexity_ratio_is_the_one_of_vllm(
    compared: Compared, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, ours = compared.ratios(name)
    with capsys.disabled():
        sys.stdout.write(f"\n  {name:10}  perplexity ratio: vLLM {engine:.4f}, here {ours:.4f}")

    reported = compared.ours.candidate(compared.candidates()[name])["ppl_ratio"]
    assert reported == pytest.approx(ours, rel=1e-5)
    assert reported == pytest.approx(engine, abs=RATIO_TOLERANCE)


@pytest.mark.parametrize("name", ["unscaled", "calibrated"])
def test_every_tokens_change_goes_with_that_in_vllm(
    compared: Compared, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    correlation = torch.corrcoef(torch.stack(compared.changes(name)))[0, 1].item()
    with capsys.disabled():
        sys.stdout.write(f"\n  {name:10}  correlation of the tokens' changes: {correlation:.4f}")

    assert correlation >= SMALLEST_CORRELATION


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescaled:
    """A rescaled model in vLLM and here."""

    keys: float
    values: float
    overlay: Path
    unscaled: torch.Tensor
    calibrated: torch.Tensor
    ours: Verification
    """For vLLM on a CPU."""
    rounding_to_nearest: Verification
    """For an engine that does as GPUs do, and leaves q alone."""


@pytest.fixture(
    scope="module",
    params=[(1 / FACTOR, FACTOR), (FACTOR, 1 / FACTOR)],
    ids=["small-keys-large-values", "large-keys-small-values"],
)
def rescaled(
    request: pytest.FixtureRequest,
    demo_model: Path,
    vllm: VllmServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Rescaled]:
    """Give a rescaled model, scored in vLLM and with `fp8calib verify`."""
    keys, values = request.param
    folder = tmp_path_factory.mktemp("rescaled")
    model = save_rescaled(demo_model, folder / "model", keys=keys, values=values)
    scales = calibrate(model, folder / "out", (), *CALIBRATION) / "kv-overlay"
    sequences = tokenize_prose(demo_model, FEW_SEQUENCES, SHORT)
    calibrated = _score(vllm, scales, sequences, "fp8")
    assert calibrated.scales() == read_scales(scales)
    yield Rescaled(
        keys=keys,
        values=values,
        overlay=scales,
        unscaled=flatten(_score(vllm, model, sequences, "fp8").logprobs),
        calibrated=flatten(calibrated.logprobs),
        ours=verify(model, scales, sequences, folder / "ours"),
        rounding_to_nearest=verify(
            model, scales, sequences, folder / "nearest", engine="reference"
        ),
    )
    shutil.rmtree(folder)


def test_the_scales_follow_the_rescaling_to_the_last_bit(rescaled: Rescaled, overlay: Path) -> None:
    assert read_scales(rescaled.overlay) == {
        layer: ([k * rescaled.keys], [v * rescaled.values])
        for layer, ([k], [v]) in read_scales(overlay).items()
    }


def test_a_rescaled_model_breaks_with_scales_of_one_and_is_whole_with_its_own(
    rescaled: Rescaled, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = perplexity(rescaled.ours.logprobs["reference"])
    engine = [perplexity(run) / reference for run in (rescaled.unscaled, rescaled.calibrated)]
    ours = [
        rescaled.ours.candidate(name)["ppl_ratio"] for name in (UNSCALED, str(rescaled.overlay))
    ]
    with capsys.disabled():
        for name, (unscaled, calibrated) in {"vLLM": engine, "here": ours}.items():
            sys.stdout.write(f"\n  {name}: scales 1.0 {unscaled:.4g}, calibrated {calibrated:.4f}")

    assert engine[0] > 10
    assert engine[1] < 1.05
    assert ours == [pytest.approx(engine[0], rel=0.05), pytest.approx(engine[1], abs=0.005)]


def test_verify_fails_scales_of_one_and_passes_its_own(
    rescaled: Rescaled, capsys: pytest.CaptureFixture[str]
) -> None:
    unscaled, calibrated = (
        rescaled.rounding_to_nearest.candidate(name) for name in (UNSCALED, str(rescaled.overlay))
    )
    with capsys.disabled():
        sys.stdout.write(f"\n  {unscaled['verdict_why']}; {calibrated['verdict_why']}")

    assert rescaled.ours.candidate(UNSCALED)["verdict"] == "fail"
    assert unscaled["verdict"] == "fail"
    assert calibrated["verdict"] in {"pass", "no-difference"}


def test_verify_finds_keys_and_values_broken_each_in_its_own_way(rescaled: Rescaled) -> None:
    small, large = ("k", "v") if rescaled.keys < 1 else ("v", "k")

    assert rescaled.ours.largest_share(UNSCALED, large, "clipped") > 0.5
    assert rescaled.ours.largest_share(UNSCALED, small, "flushed") > 0.5
    assert rescaled.ours.largest_share(str(rescaled.overlay), large, "clipped") < 0.001
    assert rescaled.ours.largest_share(str(rescaled.overlay), small, "flushed") < 0.05
