"""Text scored as it is served, against models that generate token by token over a cache by hand."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, QuantizedCache

from fp8calib.engines.arithmetic import Numerics
from fp8calib.engines.registry import REFERENCE
from fp8calib.errors import UsageError, VerificationError
from fp8calib.numerics.formats import E4M3FN
from fp8calib.plugins.kv_types.types import CACHE_TYPES
from fp8calib.plugins.server import server
from fp8calib.plugins.server.served import ServedHooks, compare_served, count_prompt, list_served
from fp8calib.verification.candidates import build_kv_candidate, emulate_kv, make_unscaled_table
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.verify import Verification, run_verification
from tests import zoo
from tests.doors import Silent, make_plan
from tests.plugins.kv_types import by_hand as types_by_hand
from tests.plugins.kv_types.by_hand import store_all
from tests.verification.by_hand import (
    FULL,
    PADDED,
    PLAIN,
    Change,
    Subject,
    cast,
    emulate,
    opened,
    plain_forward,
    text_config,
)


class SteppedCache(DynamicCache):  # type: ignore[misc]  # transformers is untyped
    """Stores K and V quantized; the first call of a layer gets them in 16 bits."""

    def __init__(self, config: Any, changes: Sequence[tuple[Change, Change]]) -> None:
        super().__init__(config=config)
        self._changes = changes
        self._begun: set[int] = set()

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Store the new tokens, and give all of them."""
        pairs = zip(self._changes[layer_idx], (key, value), strict=True)
        changed = [change(x.float()).to(x.dtype) for change, x in pairs]
        stored = super().update(*changed, layer_idx, *args, **kwargs)
        is_first = layer_idx not in self._begun
        self._begun.add(layer_idx)
        return (key, value) if is_first else stored


@torch.no_grad()
def generate_step_by_step(model: PreTrainedModel, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Run the first half of ids [L] at once, and each other token alone: hidden states [L, C]."""
    half = len(ids) // 2
    parts = [ids[:half], *(ids[place : place + 1] for place in range(half, len(ids)))]
    hidden = []
    for part in parts:
        found = model.base_model(input_ids=part.unsqueeze(0), past_key_values=cache, use_cache=True)
        hidden.append(found.last_hidden_state[0])
    return torch.cat(hidden)


@torch.no_grad()
def generate_at_once(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Run ids [L] without a quantized cache: hidden states [L, C]."""
    hidden: torch.Tensor = model.base_model(input_ids=ids.unsqueeze(0)).last_hidden_state[0]
    return hidden


STORED: dict[str, tuple[Change, Change]] = {
    "turboquant_k8v4": (
        partial(cast, scale=1.0),
        partial(store_all, types_by_hand.uniform_value(4)),
    ),
    "int8_per_token_head": (partial(store_all, types_by_hand.int8_per_token_head),) * 2,
    "nvfp4": (partial(store_all, types_by_hand.nvfp4),) * 2,
}


def expect_steps(
    subject: Subject, found: Sequence[torch.Tensor], make_cache: Callable[[], Any]
) -> None:
    """Compare hidden states of PADDED and FULL with those of steps, in fp64: both round alike."""
    for batch, hidden in zip((PADDED, FULL), found, strict=True):
        for row, length in enumerate(batch.lengths):
            ids = batch.input_ids[row, :length]
            wanted = generate_step_by_step(subject.model, ids, make_cache())
            torch.testing.assert_close(hidden[row, :length], wanted, rtol=0, atol=5e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gemma3n_text"])
@pytest.mark.parametrize("name", STORED)
def test_prompts_in_16_bits_are_scored_as_they_generate(
    name: str, family: str, tmp_path: Path
) -> None:
    """Sliding windows of 8 tokens, and layers that share K and V, are among them."""
    cache_type = replace(CACHE_TYPES[name], is_packed=False)
    with opened(zoo.build(family, head_dim=16).double(), tmp_path) as subject:
        quantizers = cache_type.quantize(subject.geometry)
        emulation = Candidate(quantizers=quantizers)
        hooks = ServedHooks(emulation)
        found = emulate(subject, emulation, PADDED, FULL, hooks=hooks)
        config = text_config(subject.model)
        changes = [STORED[name]] * config.num_hidden_layers
        expect_steps(subject, found, partial(SteppedCache, config, changes))
        for ids, hidden in zip(FULL.input_ids, found[1], strict=True):
            plain, prompt = generate_at_once(subject.model, ids), count_prompt(len(ids))
            torch.testing.assert_close(hidden[:prompt], plain[:prompt], rtol=0, atol=5e-5)
            assert (hidden[prompt:] - plain[prompt:]).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_cache_of_transformers_is_scored_as_its_own_class_generates(
    family: str, tmp_path: Path
) -> None:
    """The scale is that of the prompt, and some later tokens exceed it."""
    with opened(zoo.build(family, head_dim=16).double(), tmp_path) as subject:
        quantizers = CACHE_TYPES["fp8_quantized_cache"].quantize(subject.geometry)
        emulation = Candidate(quantizers=quantizers)
        found = emulate(subject, emulation, PADDED, FULL, hooks=ServedHooks(emulation))
        expect_steps(subject, found, partial(QuantizedCache, "fp8", text_config(subject.model)))
        (whole,) = emulate(subject, emulation, FULL)
        assert (whole - found[1])[:, -1].abs().max() > 1e-3


def test_q_and_probabilities_of_a_prompt_stay_in_16_bits(tmp_path: Path) -> None:
    """The rows of the prompt are the model's own, and later ones those without a prompt."""
    numerics = Numerics(
        name="other", quantizes_query=True, probability_factor=256.0, prompt_reads_cache=False
    )
    with opened(zoo.build("llama", num_hidden_layers=1), tmp_path) as subject:
        quantizers = emulate_kv(make_unscaled_table(subject.geometry, E4M3FN), numerics)
        emulation = Candidate(quantizers=quantizers)
        (served,) = emulate(subject, emulation, FULL, hooks=ServedHooks(emulation))
        (everywhere,) = emulate(subject, emulation, FULL)
        prompt = count_prompt(FULL.lengths[0])
        plain = plain_forward(subject.model, FULL)
        torch.testing.assert_close(served[:, :prompt], plain[:, :prompt])
        assert torch.equal(served[:, prompt:], everywhere[:, prompt:])
        assert not torch.allclose(everywhere[:, prompt:], plain[:, prompt:], atol=1e-4)


@pytest.mark.parametrize(
    ("family", "part"), [("deepseek_v3", "attends to other K"), ("falcon", "without a hook")]
)
def test_attention_that_cannot_be_told_apart_is_refused_by_name(
    family: str, part: str, tmp_path: Path
) -> None:
    with opened(zoo.build(family), tmp_path) as subject:
        quantizers = emulate_kv(make_unscaled_table(subject.geometry, E4M3FN), PLAIN)
        (_, first), *_ = subject.geometry.attentions()
        emulation = Candidate(quantizers=quantizers)
        with pytest.raises(VerificationError, match=rf"--decode: {first.module} .*{part}"):
            emulate(subject, emulation, FULL, hooks=ServedHooks(emulation))


def test_report_shows_both_figures_of_each_cache(tmp_path: Path) -> None:
    """Against log-probabilities of a model that generates over a cache by hand."""
    model = zoo.build("llama", num_hidden_layers=6, head_dim=32)
    text = [torch.arange(3, 35) + 8 * shift for shift in range(12)]
    name = "turboquant_k8v4"
    with opened(model, tmp_path) as subject:
        own = Candidate(name=name, quantizers=CACHE_TYPES[name].quantize(subject.geometry))
        table = make_unscaled_table(subject.geometry, E4M3FN)
        candidates = (build_kv_candidate("scale-1.0", table, PLAIN), own)
        held: Any = SimpleNamespace(
            name="tiny", prepared=subject.prepared, dtype="float32", device="cpu"
        )
        asked = Verification(
            model=held,
            engine=REFERENCE,
            numerics=PLAIN,
            candidates=candidates,
            plan=make_plan(text),
            others=tuple(list_served([own])),
        )
        _, _, scores = run_verification(asked, subject.prepared, Silent())
    unscaled, found = compare_served(candidates, scores, asked.plan.lengths)
    assert (unscaled.candidate, unscaled.is_same, unscaled.tokens) == ("scale-1.0", True, 12 * 15)
    assert (unscaled.prompt_kld, unscaled.difference.difference) == (unscaled.decode_kld, 0.0)
    assert unscaled.sentence.endswith("decoding computes the same.")

    same = (torch.Tensor.float, torch.Tensor.float)
    changes = [STORED[name] if index in {2, 3} else same for index in range(6)]
    wanted = []
    for ids in text:
        hidden = generate_step_by_step(model, ids, SteppedCache(text_config(model), changes))
        both = [model.lm_head(each) for each in (generate_at_once(model, ids), hidden)]
        p, q = (torch.log_softmax(logits.double(), -1) for logits in both)
        wanted.append((p.exp() * (p - q)).sum(-1)[16:-1])
    klds = torch.stack(wanted).detach()
    assert (found.candidate, found.is_same, found.prompt_kld) == (name, False, 0.0)
    assert found.decode_kld == pytest.approx(float(klds.mean()), rel=0.02)
    assert found.decode_kld_se == pytest.approx(float(klds.mean(1).std() / 12**0.5), rel=0.05)
    assert found.difference.answer == "worse"
    assert "Scores of prompts do not show what it costs." in found.sentence


def test_sequences_without_decoded_tokens_are_refused() -> None:
    model = zoo.build("llama")
    with pytest.raises(UsageError, match="--decode: no sequence is longer than 2 tokens"):
        server("http://localhost:1", model, data=[[5, 6], [7, 8]], seq_len=2, decode=True)
