"""Candidates that share a batch with the unquantized model: the figures of those one by one."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from fp8calib.calibration.decoder import Decoder
from fp8calib.data.sequences import Batch, batches
from fp8calib.errors import VerificationError
from fp8calib.formats.compute import compute_kv_scales
from fp8calib.model.geometry import Role
from fp8calib.numerics.formats import E4M3FN
from fp8calib.verification.candidates import emulate_kv, make_unscaled_table
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.emulate import MeasurementHooks
from fp8calib.verification.emulation.fake_quantize import Quantizer
from fp8calib.verification.score import Scores, score
from tests import zoo
from tests.doors import LENGTHS, opened, rows_of, run_calibration
from tests.kit.minutes import in_minutes
from tests.simulated_gpus import gpu
from tests.verification.test_streamed_compare import VLLM, make_emulations

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="simulated GPUs are compiled by g++"
)


def without_p(quantizers: Any) -> dict[Any, Quantizer]:
    return {site: each for site, each in quantizers.items() if site.role is not Role.P}


@pytest.mark.parametrize("family", ["mixtral", *in_minutes("deepseek_v3", "gemma3n_text", "llama")])
def test_figures_are_those_of_candidates_one_by_one(family: str, tmp_path: Path) -> None:
    """Padded batches; two candidates share, one has other weights and one P in tiles."""
    zoo.save(family, tmp_path / "model")
    plan = rows_of(LENGTHS)
    stats = run_calibration(tmp_path / "model", plan, batch_size=3)[1]
    text, rows = list(batches(plan, 3)), list[int]()
    run = Decoder.run

    def spy(self: Decoder, batch: Batch, cache: object) -> torch.Tensor:
        rows.append(len(batch.lengths))
        return run(self, batch, cache)

    found: list[tuple[Scores, MeasurementHooks]] = []
    with gpu(), opened(tmp_path / "model", device="cuda") as subject:
        prepared = subject.prepared
        unscaled = emulate_kv(make_unscaled_table(stats.geometry, E4M3FN), VLLM)
        scaled = emulate_kv(compute_kv_scales(stats, E4M3FN), VLLM)
        made = make_emulations(prepared.model, stats.geometry, stats, subject.checkpoint)
        candidates = [
            Candidate(name="1.0", quantizers=without_p(unscaled)),
            Candidate(name="weights", weights=made["w8a16"].weights),
            Candidate(name="scaled", quantizers=without_p(scaled)),
            Candidate(name="P", quantizers=scaled),
        ]
        for shares_batch in (False, True):
            rows.clear()
            plain = without_p(unscaled)
            hooks = MeasurementHooks([Candidate(name="1.0", quantizers=plain)])
            told: list[int] = []
            silent: Any = SimpleNamespace(advance=told.append)
            with mock.patch.object(Decoder, "run", spy):
                scores = score(
                    *(prepared, candidates, text, hooks),
                    progress=silent,
                    shares_batch=shares_batch,
                )
            found.append((scores, hooks))
            assert sum(told) == 5 * plan.num_tokens
            alone_too = [9, 3, 3] if len(without_p(scaled)) < len(scaled) else [12, 3]  # MLA: no P
            sizes = alone_too if shares_batch else [3] * 5
            # the last batch has one sequence
            assert sorted(rows) == sorted([*(sizes * 4), *(size // 3 for size in sizes)])
    (alone, looked), (shared, saw) = found
    pairs = [(alone.reference, shared.reference)]
    pairs += [(alone.candidates[name], shared.candidates[name]) for name in alone.candidates]
    for expected, mine in pairs:
        torch.testing.assert_close(mine.logprobs, expected.logprobs, rtol=0, atol=1e-5)
        torch.testing.assert_close(mine.klds, expected.klds, rtol=0, atol=1e-5)
    assert shared.candidates["scaled"].klds.sum() > 0
    for name, hooks in alone.hooks.items():
        assert hooks.damage.keys() == shared.hooks[name].damage.keys()
        for site, sums in hooks.damage.items():
            torch.testing.assert_close(shared.hooks[name].damage[site], sums, rtol=1e-4, atol=1e-6)
    assert saw.found.keys() == looked.found.keys()
    for key, sums in looked.found.items():
        torch.testing.assert_close(saw.found[key], sums, rtol=1e-4, atol=1e-6)


def test_an_error_in_a_shared_batch_is_about_its_candidate(tmp_path: Path) -> None:
    zoo.save("llama", tmp_path / "model")

    def fail(*_: object, **__: object) -> torch.Tensor:
        raise VerificationError("rounds no such value")

    with gpu(), opened(tmp_path / "model", device="cuda") as subject:
        made = emulate_kv(make_unscaled_table(subject.prepared.geometry, E4M3FN), VLLM)
        good = without_p(made)
        bad = {
            site: Quantizer(fmt=E4M3FN, scale=torch.tensor(1.0), round_trip=fail) for site in good
        }
        candidates = [
            Candidate(name="good", quantizers=good),
            Candidate(name="bad", quantizers=bad),
        ]
        silent: Any = SimpleNamespace(advance=lambda _tokens: None)
        text = list(batches(rows_of(LENGTHS[:2]), 2))
        with pytest.raises(VerificationError, match="rounds no such value") as caught:
            score(subject.prepared, candidates, text, progress=silent, shares_batch=True)
    assert caught.value.candidate == "bad"
