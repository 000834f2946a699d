"""`fp8calib.emulate`: a model in memory that computes as an engine does, and is as before after."""

import copy
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

import fp8calib
from fp8calib.calibration.calibration_stats import load_stats_file
from fp8calib.errors import ModelError, UsageError
from fp8calib.numerics.formats import E4M3FN
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.fake_quantize import Quantizer
from tests import zoo
from tests.cli.conftest import write_rows
from tests.cli.program import succeed
from tests.kit.minutes import in_minutes

LENGTH, NEW_TOKENS = 32, 12
FAMILIES = ["gemma3n_text", "gpt_oss", "deepseek_v3"]
PROMPTS = torch.stack(zoo.draw([9, 9, 9], seed=3))
OPTIONS = ("--samples", 8, "--seq-len", LENGTH, "--batch-size", 2, "--dtype", "float32")
Made = dict[str, Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Make a model, rows, and its statistics, whose scales clip most values."""
    made: dict[str, Made] = {}

    def build(family: str) -> Made:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            zoo.save(family, folder / "model")
            rows = [{"input_ids": ids.tolist()} for ids in zoo.draw([LENGTH] * 8)]
            data = write_rows(folder / "rows.jsonl", rows)
            run = ("calibrate", folder / "model", "--data", data, *OPTIONS, "--no-check")
            succeed(*run, "--rule", "percentile:60", "--out", folder / "out")
            made[family] = {
                "model": folder / "model",
                "data": data,
                "overlay": folder / "out" / "kv-overlay",
                "stats": folder / "out" / "stats.safetensors",
            }
        return made[family]

    return build


def load(made: Made) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(made["model"], dtype=torch.float32).eval()


@torch.no_grad()
def score(model: PreTrainedModel, sequences: list[torch.Tensor]) -> torch.Tensor:
    """Give the log-probability of every token but the first, in batches of two: [N]."""
    found = []
    for start in range(0, len(sequences), 2):
        ids = torch.stack(sequences[start : start + 2])
        scored = torch.arange(LENGTH - 1)  # of as many rows as `verify` gives to the head
        logprobs = model(input_ids=ids, logits_to_keep=scored).logits.float().log_softmax(-1)
        found.append(logprobs.gather(-1, ids[:, 1:, None]).flatten())
    return torch.cat(found)


def generate(model: PreTrainedModel, **options: Any) -> tuple[list[list[int]], torch.Tensor]:
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
def decode_step_by_step(model: PreTrainedModel) -> tuple[list[list[int]], torch.Tensor]:
    """Decode greedily over a cache of the caller: the prompt, then one token at a time."""
    cache = DynamicCache(config=model.config)
    tokens, steps = PROMPTS, []
    for _ in range(NEW_TOKENS):
        new = tokens if not steps else tokens[:, -1:]
        steps.append(model(new, past_key_values=cache, logits_to_keep=1).logits[:, -1])
        allowed = steps[-1].clone()
        allowed[:, model.generation_config.eos_token_id] = -torch.inf
        tokens = torch.cat([tokens, allowed.argmax(-1, keepdim=True)], 1)
    return tokens[:, PROMPTS.shape[1] :].tolist(), torch.stack(steps, 1)


@torch.no_grad()
def decode_anew(model: PreTrainedModel, tokens: list[list[int]]) -> torch.Tensor:
    """Compute the logits of given tokens without a cache that goes from step to step: [B, N, V]."""
    ids = torch.cat([PROMPTS, torch.tensor(tokens)], 1)
    start = PROMPTS.shape[1]
    return torch.stack([model(ids[:, : start + i]).logits[:, -1] for i in range(NEW_TOKENS)], 1)


@pytest.mark.parametrize("family", [FAMILIES[0], *in_minutes(*FAMILIES[1:])])
@pytest.mark.parametrize("candidate", ["overlay", "fp8-dynamic"])
def test_log_probabilities_are_those_of_verify(
    make: Callable[[str], Made], family: str, candidate: str, tmp_path: Path
) -> None:
    made = make(family)
    name = str(made.get(candidate, candidate))
    given = ("--scheme", name) if candidate == "fp8-dynamic" else ("--scales", name)
    command = ("verify", made["model"], *given, "--data", made["data"], *OPTIONS)
    succeed(*command, "--dump", tmp_path / "dump.safetensors")
    expected = load_file(tmp_path / "dump.safetensors")
    model, sequences = load(made), zoo.draw([LENGTH] * 8)
    with fp8calib.emulate(model, name):
        found = score(model, sequences)
    assert torch.equal(found, expected[name])
    assert torch.equal(score(model, sequences), expected["reference"])
    assert not torch.allclose(found, expected["reference"], atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_generating_equals_decoding_step_by_step(make: Callable[[str], Made], family: str) -> None:
    made = make(family)
    model = load(made)
    _, plain = generate(model)
    with fp8calib.emulate(model, made["overlay"]):
        tokens, logits = generate(model)
        expected_tokens, expected = decode_step_by_step(model)
        anew = decode_anew(model, tokens)
    assert tokens == expected_tokens
    assert torch.equal(logits, expected)
    torch.testing.assert_close(logits, anew, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(logits[:, 1], plain[:, 1], atol=1e-3)


def test_callers_without_a_cache_or_with_padding_meet_the_same_emulation(
    make: Callable[[str], Made],
) -> None:
    """Padding to the left, as lm-evaluation-harness and `generate` pad."""
    model = load(make("llama"))
    ids = torch.cat([torch.zeros(3, 4, dtype=torch.int64), PROMPTS], 1)
    mask = (torch.arange(ids.shape[1]) >= 4).long().expand_as(ids)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with fp8calib.emulate(model, make("llama")["overlay"]), torch.no_grad():
        expected = model(PROMPTS).logits
        uncached = model(PROMPTS, use_cache=False)
        assert torch.equal(uncached.logits, expected)
        assert uncached.past_key_values is None
        assert generate(model, use_cache=False)[0] == generate(model)[0]
        padded = model(ids, attention_mask=mask, position_ids=positions).logits[:, 4:]
    torch.testing.assert_close(padded, expected, atol=1e-4, rtol=1e-4)


def make_harsh(model: PreTrainedModel) -> Candidate:
    """Quantize K and V so that most of them clip, with one scale: 2**-11."""
    with fp8calib.emulate(model, "scale-1.0") as unscaled:
        sites = unscaled.quantizers
    harsh = Quantizer(fmt=E4M3FN, scale=torch.tensor(2.0**-11))
    return Candidate(name="harsh", quantizers=dict.fromkeys(sites, harsh))


def test_a_copy_of_a_cache_is_a_cache_of_its_own(make: Callable[[str], Made]) -> None:
    """Emulated in the context, plain after it, and emulated again in another one."""
    model = load(make("llama"))
    token = PROMPTS[:, :1]
    with torch.no_grad():
        with fp8calib.emulate(model, make_harsh(model)):
            cache = DynamicCache(config=model.config)
            model(PROMPTS, past_key_values=cache)
            branch = copy.deepcopy(cache)
            expected = model(token, past_key_values=copy.deepcopy(branch)).logits
            model(token, past_key_values=cache)
            assert branch.get_seq_length() == PROMPTS.shape[1] == cache.get_seq_length() - 1
        assert type(cache) is DynamicCache
        plain = copy.deepcopy(branch)
        model(token, past_key_values=plain)
        last = plain.layers[0].keys[:, :, -1] / 2.0**-11
        assert not torch.equal(last.to(torch.float8_e4m3fn).float(), last)
        with fp8calib.emulate(model, make_harsh(model)):
            again = model(token, past_key_values=branch).logits
    assert torch.equal(again, expected)


def test_two_models_may_be_emulated_and_left_in_any_order(make: Callable[[str], Made]) -> None:
    made = make("qwen3_moe")
    one, two = load(made), load(made)
    plain = generate(one)[1]
    with fp8calib.emulate(one, made["overlay"]):
        expected = generate(one)[1]
    first, second = ExitStack(), ExitStack()
    first.enter_context(fp8calib.emulate(one, made["overlay"]))
    second.enter_context(fp8calib.emulate(two, "fp8-dynamic"))
    assert torch.equal(generate(one)[1], expected)
    first.close()
    assert torch.equal(generate(one)[1], plain)
    assert not torch.equal(generate(two)[1], plain)
    second.close()
    assert torch.equal(generate(two)[1], plain)


def test_a_model_is_emulated_once_at_a_time(make: Callable[[str], Made]) -> None:
    made = make("llama")
    model = load(made)
    second = fp8calib.emulate(model, "fp8-dynamic")
    context = fp8calib.emulate(model, made["overlay"])
    with context:
        expected = generate(model)[1]
        with pytest.raises(UsageError, match="is under emulation already"), second:
            pass
        assert torch.equal(generate(model)[1], expected)
        with pytest.raises(AttributeError), context:
            pass


def test_a_model_in_another_dtype_takes_the_statistics_of_its_files(
    make: Callable[[str], Made],
) -> None:
    """A class may also drop or add keys of its config in memory."""
    made = make("llama")
    model = AutoModelForCausalLM.from_pretrained(made["model"], dtype=torch.bfloat16).eval()
    model.config.note = "in memory"
    in_memory = SimpleNamespace(stats=load_stats_file(made["stats"]))  # as `calibrate` returns it
    with fp8calib.emulate(model, in_memory) as candidate:
        assert "statistics" in candidate.description
        assert generate(model)[1].isfinite().all()


def test_statistics_of_another_model_are_refused(make: Callable[[str], Made]) -> None:
    other = zoo.build("llama", seed=1)
    for given in ("stats", "overlay"):
        context = fp8calib.emulate(other, make("llama")[given])
        with pytest.raises(ModelError, match="another model"), context:
            pass


@pytest.mark.parametrize(
    ("candidate", "engine", "says"),
    [
        ("missing", "vllm", "missing"),
        ("fp8-static", "vllm", "its input scales come from calibration"),
        (3, "vllm", "neither a path nor scales"),
        ("scale-1.0", "vlm", "did you mean vllm"),
    ],
)
def test_what_cannot_be_emulated_is_named(candidate: Any, engine: str, says: str) -> None:
    model = zoo.build("llama").eval()
    with pytest.raises(UsageError) as error, fp8calib.emulate(model, candidate, engine):
        pass
    assert says in f"{error.value.message} {error.value.hint}"
