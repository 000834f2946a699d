"""Per-token scores against log_softmax of full logits that the whole model computed in one go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from fp8calib.data.sequences import Batch
from fp8calib.errors import VerificationError
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.score import Scores
from fp8calib.verification.token_scores import TokenScores, score_batch
from tests import zoo
from tests.kit.models import build_gemma3
from tests.verification.by_hand import (
    Subject,
    make_batch,
    opened,
    score_all,
)

BATCHES = [make_batch([5, 20, 13]), make_batch([20, 20], seed=12, first=3)]
WITH_A_HEAD_OF_THEIR_OWN = {
    "gemma2": {"final_logit_softcapping": 2.0},
    "cohere": {"logit_scale": 0.0625},
    "granite": {"logits_scaling": 8.0},
    "cohere2": {"logit_scale": 0.25},
    "gemma3n_text": {"final_logit_softcapping": 1.5},
    "llama": {},
    "gpt2": {},
    "opt": {},
    "falcon": {},
}


@pytest.fixture(scope="module", params=[*WITH_A_HEAD_OF_THEIR_OWN, "gemma3"])
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    family = request.param
    if family == "gemma3":
        model = build_gemma3(final_logit_softcapping=3.0)
    else:
        model = zoo.build(family, **WITH_A_HEAD_OF_THEIR_OWN[family])
    with opened(model, tmp_path_factory.mktemp(family) / "m") as found:
        yield found


def targets(batch: Batch) -> list[torch.Tensor]:
    """Give the tokens that are predicted."""
    rows = zip(batch.input_ids, batch.lengths, strict=True)
    return [row[1:length] for row, length in rows]


def compare(subject: Subject, emulations: dict[str, Candidate]) -> Scores:
    return score_all(subject, emulations, BATCHES)


# --- blocks ------------------------------------------------------------------------------------


def score(batch: Batch, *, seed: int = 0) -> list[TokenScores]:
    """Score random hidden states with a head that is one matrix."""
    generator = torch.Generator().manual_seed(seed)
    width = batch.input_ids.shape
    hidden = [torch.randn(*width, 16, generator=generator) for _ in range(3)]
    matrix = torch.randn(16, 128, generator=generator)
    return score_batch(batch, hidden[0], hidden[1:], lambda rows: rows @ matrix, 128)


def test_a_divergence_by_hand() -> None:
    """P = (1/2, 1/4, 1/4), q = (1/4, 1/2, 1/4): KL = 1/2 ln 2 - 1/4 ln 2."""
    batch = Batch(first=0, input_ids=torch.tensor([[0, 2]]), lengths=(2,))
    states = [torch.zeros(1, 2, 1), torch.ones(1, 2, 1)]
    rows = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]]).log()
    reference, candidate = score_batch(
        batch, states[0], states[1:], lambda x: rows[x[:, 0].long()] + 7.0, 3
    )
    assert reference.logprobs.tolist() == pytest.approx([np.log(0.25)])
    assert candidate.klds.tolist() == pytest.approx([0.25 * np.log(2)], rel=1e-6)
    assert candidate.agrees.tolist() == [False]


# --- the comparison ----------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "place"), [(0, 2), (1, 11), (2, 0)])
def test_nan_names_the_model_and_the_sample(row: int, place: int, tmp_path: Path) -> None:
    batch = Batch(first=40, input_ids=BATCHES[0].input_ids.clone(), lengths=BATCHES[0].lengths)
    batch.input_ids[batch.input_ids == 77] = 76
    batch.input_ids[row, place] = 77
    model = zoo.build("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[77] = torch.nan
    with (
        opened(model, tmp_path / "m") as subject,
        pytest.raises(
            VerificationError,
            match=rf"the unquantized model: NaN or inf in the logits at sample {40 + row} ",
        ),
    ):
        score_all(subject, {}, [batch])
