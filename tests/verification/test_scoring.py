"""Per-token scores against log_softmax of full logits that the whole model computed in one go."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from fp8calib.data.sequences import Batch
from fp8calib.errors import VerificationError
from fp8calib.verification import token_scores as scoring
from fp8calib.verification.token_scores import open_lm_head, score_batch, scoring_bytes
from tests import zoo
from tests.kit.allocations import peak_allocated
from tests.kit.multimodal import build_multimodal
from tests.simulated_gpus import gpu
from tests.verification.by_hand import Subject, make_batch, opened, padding_mask, score_all

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
        model, _ = build_multimodal("gemma3", final_logit_softcapping=3.0)
    else:
        model = zoo.build(family, **WITH_A_HEAD_OF_THEIR_OWN[family])
    with opened(model, tmp_path_factory.mktemp(family) / "m") as found:
        yield found


def full_logprobs(model: PreTrainedModel, batch: Batch) -> list[torch.Tensor]:
    """Run the whole model at once: per sequence, log-probabilities [L - 1, V] in fp64."""
    with torch.no_grad():
        logits = model(input_ids=batch.input_ids, attention_mask=padding_mask(batch)).logits
    everything = torch.log_softmax(logits.double(), -1)
    return [row[: length - 1] for row, length in zip(everything, batch.lengths, strict=True)]


def targets(batch: Batch) -> list[torch.Tensor]:
    """Give the tokens that are predicted."""
    rows = zip(batch.input_ids, batch.lengths, strict=True)
    return [row[1:length] for row, length in rows]


def test_the_reference_has_the_logprobs_of_the_whole_model(subject: Subject) -> None:
    found = score_all(subject, {}, BATCHES).reference
    logprobs = torch.cat([row for b in BATCHES for row in full_logprobs(subject.model, b)])
    tokens = torch.cat([row for batch in BATCHES for row in targets(batch)])
    expected = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    assert found.logprobs.shape == (4 + 19 + 12 + 19 + 19,)
    torch.testing.assert_close(found.logprobs.double(), expected, rtol=2e-5, atol=2e-5)
    assert float(found.klds.abs().max()) == 0.0
    assert bool(found.agrees.all())


def test_a_candidate_has_the_divergence_of_two_whole_models(subject: Subject) -> None:
    """The other model's decoder is disturbed by a hook; it too is run in one go."""
    batch = BATCHES[0]
    generator = torch.Generator().manual_seed(8)
    hidden = subject.model.get_decoder()(
        input_ids=batch.input_ids, attention_mask=padding_mask(batch)
    ).last_hidden_state.detach()
    disturbed = hidden + torch.randn(hidden.shape, generator=generator) * 0.1
    with open_lm_head(subject.model) as logits:
        scores = score_batch(batch, hidden, [disturbed], logits, 128)

    def disturb(_module: nn.Module, _args: Any, output: Any) -> Any:
        output.last_hidden_state = disturbed
        return output

    ours = torch.cat(full_logprobs(subject.model, batch))
    hook = subject.model.get_decoder().register_forward_hook(disturb)
    theirs = torch.cat(full_logprobs(subject.model, batch))
    hook.remove()
    klds = (ours.exp() * (ours - theirs)).sum(-1)
    logprobs = theirs.gather(1, torch.cat(targets(batch)).unsqueeze(1)).squeeze(1)
    assert float(klds.min()) > 0
    torch.testing.assert_close(scores[1].klds.double(), klds, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(scores[1].logprobs.double(), logprobs, rtol=2e-5, atol=2e-5)
    assert torch.equal(scores[1].agrees, ours.argmax(-1) == theirs.argmax(-1))


# --- blocks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [3, 64, 130, 1000])
def test_equal_logits_agree_only_if_the_first_of_them_does(vocab_size: int) -> None:
    """In bfloat16 the largest logit often stands at several tokens; greedy decoding takes one."""
    generator = torch.Generator().manual_seed(3)
    tables = torch.randn(2, 40, vocab_size, generator=generator)
    tables[1] = tables[0] + tables[1] * 0.3
    found = tables.round().bfloat16()
    ids = torch.zeros(1, 41, dtype=torch.int64)
    batch = Batch(first=0, input_ids=ids, lengths=(41,))
    rows = torch.arange(41.0).view(1, 41, 1)
    _, candidate = score_batch(
        batch, rows, [rows + 100], lambda x: found[int(x[0, 0]) // 100][x[:, 0].long() % 100], 128
    )
    ours, theirs = (each.float().numpy() for each in found)
    best = ours.argmax(-1)
    agrees = theirs.argmax(-1) == best
    is_largest = theirs[np.arange(40), best] == theirs.max(-1)
    assert candidate.agrees.tolist() == agrees.tolist()
    assert candidate.ties.tolist() == (is_largest & ~agrees).tolist()
    assert bool(candidate.ties.any())


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


@pytest.mark.skipif(shutil.which("g++") is None, reason="simulated GPUs are compiled by g++")
def test_a_gpu_reduces_logits_within_the_planned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits are counted as they are; the sizes of a GPU are made smaller."""
    monkeypatch.setattr(scoring, "_BYTES_AT_ONCE_GPU", 2**22)
    monkeypatch.setattr(scoring, "_REDUCED_AT_ONCE_GPU", 2**18)
    vocab_size, length, peaks = 4096, 1024, list[int]()
    batch = Batch(input_ids=torch.ones(1, length, dtype=torch.int64), lengths=(length,), first=0)
    with gpu():
        hidden = torch.zeros(1, length, 8, dtype=torch.bfloat16, device="cuda")
        head = torch.zeros(8, vocab_size, dtype=torch.bfloat16, device="cuda")
        planned = scoring_bytes(hidden.device, vocab_size, 2, num_tokens=length)
        with peak_allocated(peaks):
            score_batch(batch, hidden, [hidden, hidden], lambda x: x @ head, vocab_size)
    assert planned / 3 < peaks[0] < planned
