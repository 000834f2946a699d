"""A model held under emulation: called, generating, and afterwards as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from fp8calib.engines.numerics import Numerics
from fp8calib.fp8.formats import E4M3FN
from fp8calib.fp8.schemes import find_scheme
from fp8calib.geometry.sites import Role
from fp8calib.run.forward.lm_head import open_lm_head
from fp8calib.verification.emulated_model import emulated_model
from fp8calib.verification.emulation.emulate import Emulation
from fp8calib.verification.emulation.fake_quantize import Quantizer
from fp8calib.verification.emulation.kv import emulate_kv, make_unscaled_table
from tests.verification.by_hand import (
    PLAIN,
    Subject,
    emulate,
    emulate_scheme,
    make_batch,
    padding_mask,
)

BATCHES = (make_batch([5, 20, 13]), make_batch([20, 20], seed=12))
NEW_TOKENS = 12
PROMPTS = make_batch([9, 9, 9], seed=3).input_ids


def make_harsh(subject: Subject) -> Emulation:
    """Quantize K and V so that most of them clip."""
    table = make_unscaled_table(subject.geometry, E4M3FN)
    harsh = Quantizer(fmt=E4M3FN, scale=torch.tensor(2.0**-11))
    return Emulation(quantizers=dict.fromkeys(emulate_kv(table, PLAIN), harsh))


def make_w8a8(subject: Subject) -> Emulation:
    """Quantize every weight, every input, q and the KV cache."""
    made = emulate_scheme(subject, find_scheme("fp8-dynamic"), PLAIN)
    engine = Numerics(name="query", quantizes_query=True)
    cache = emulate_kv(make_unscaled_table(subject.geometry, E4M3FN), engine)
    assert Role.Q in {site.role for site in cache}
    quantizers = {**made.quantizers, **cache, **make_harsh(subject).quantizers}
    return replace(made, quantizers=quantizers)


@torch.no_grad()
def call(model: PreTrainedModel) -> list[torch.Tensor]:
    """Call the model as lm-evaluation-harness does, without a word on caches."""
    return [model(b.input_ids, attention_mask=padding_mask(b)).logits for b in BATCHES]


def emulated_logits(subject: Subject, emulation: Emulation) -> list[torch.Tensor]:
    """Give the logits that verify would score."""
    hidden = emulate(subject, emulation, *BATCHES)
    with open_lm_head(subject.model) as head:
        return [head.logits(h.flatten(0, 1)).reshape(*h.shape[:2], -1) for h in hidden]


def generate(model: PreTrainedModel, **options: object) -> tuple[list[list[int]], torch.Tensor]:
    """Generate greedily from three prompts: the tokens, and the logits behind them [B, N, V]."""
    found = model.generate(
        PROMPTS,
        attention_mask=torch.ones_like(PROMPTS),
        do_sample=False,
        min_new_tokens=NEW_TOKENS,
        max_new_tokens=NEW_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return found.sequences[:, PROMPTS.shape[1] :].tolist(), torch.stack(found.logits, 1)


@torch.no_grad()
def generate_anew(model: PreTrainedModel) -> tuple[list[list[int]], torch.Tensor]:
    """Generate greedily, everything computed anew for each token."""
    tokens, steps = PROMPTS, []
    for _ in range(NEW_TOKENS):
        steps.append(model(tokens).logits[:, -1])
        allowed = steps[-1].clone()
        allowed[:, model.generation_config.eos_token_id] = -torch.inf
        tokens = torch.cat([tokens, allowed.argmax(-1, keepdim=True)], 1)
    return tokens[:, PROMPTS.shape[1] :].tolist(), torch.stack(steps, 1)


def test_a_model_called_under_emulation_gives_the_logits_that_verify_scores(
    subject: Subject,
) -> None:
    emulation = make_harsh(subject)
    expected = emulated_logits(subject, emulation)
    plain = call(subject.model)
    with emulated_model(subject, emulation):
        found = call(subject.model)
    for a, b, c in zip(found, expected, plain, strict=True):
        assert torch.equal(a, b)
        assert not torch.allclose(a, c)


def test_weights_and_inputs_are_quantized_too(llama: Subject) -> None:
    emulation = make_w8a8(llama)
    expected = emulated_logits(llama, emulation)
    with emulated_model(llama, emulation):
        found = call(llama.model)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_generating_with_a_cache_equals_computing_every_token_anew(subject: Subject) -> None:
    _, plain = generate(subject.model)
    with emulated_model(subject, make_harsh(subject)):
        tokens, logits = generate(subject.model)
        expected_tokens, expected = generate_anew(subject.model)
    assert tokens == expected_tokens
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(logits[:, 1], plain[:, 1], atol=1e-3)


def test_a_caller_that_wants_no_cache_meets_the_same_emulation(llama: Subject) -> None:
    with emulated_model(llama, make_harsh(llama)):
        tokens = BATCHES[1].input_ids
        with torch.no_grad():
            expected = llama.model(tokens).logits
            uncached = llama.model(tokens, use_cache=False)
        assert torch.equal(uncached.logits, expected)
        assert uncached.past_key_values is None
        assert generate(llama.model, use_cache=False)[0] == generate(llama.model)[0]


def test_the_cache_holds_what_the_format_can_hold(llama: Subject) -> None:
    with emulated_model(llama, make_harsh(llama)):
        cache = DynamicCache(config=llama.model.config)
        llama.model(BATCHES[1].input_ids, past_key_values=cache)
    for layer in cache.layers:
        for stored in (layer.keys, layer.values):
            codes = stored / 2.0**-11
            assert torch.equal(codes.to(torch.float8_e4m3fn).float(), codes)
            assert codes.abs().max() == 448


def fail_inside(subject: Subject, emulation: Emulation) -> None:
    """Raise while the model is under emulation."""
    update = Cache.update
    with emulated_model(subject, emulation):
        assert Cache.update is not update
        raise ZeroDivisionError


@pytest.mark.parametrize("make", [make_harsh, make_w8a8])
def test_nothing_is_left_even_after_an_error(
    llama: Subject, make: Callable[[Subject], Emulation]
) -> None:
    before = call(llama.model)
    update = Cache.update
    with pytest.raises(ZeroDivisionError):
        fail_inside(llama, make(llama))
    assert Cache.update is update
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in llama.model.modules())
    assert all(torch.equal(a, b) for a, b in zip(call(llama.model), before, strict=True))
