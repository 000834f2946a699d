"""Rules and caches chosen by what the model loses, with planted attention sinks and without."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import PreTrainedModel

import fp8calib
from fp8calib.plugins.plan import plan
from fp8calib.plugins.plan.report import PlanResult
from tests import zoo
from tests.cli.conftest import save_tokenizer, write_rows
from tests.cli.program import succeed
from tests.kit.checkpoints import load_folder

VOCABULARY, LAYERS, HEAD = 96, 4, 16
SINK, KEYWORD = 1, 2
SINKS, EXACT = (1, 2), (0,)
LENGTH = 48
OPTIONS: dict[str, Any] = {"seq_len": LENGTH, "batch_size": 12, "dtype": "float32"}


def build_model() -> PreTrainedModel:
    """Build a llama whose attention matters, with planted channels.

    In the layers `SINKS`, K of the token `SINK` is a thousand times the others', in a channel that
    q does not look at; half of the other channels are small, and q makes up for it. In the layers
    `EXACT`, K of the token `KEYWORD` is large in a channel that matters, and all exceed 448.
    """
    model = zoo.build(
        "llama", vocab_size=VOCABULARY, num_hidden_layers=LAYERS, hidden_size=64,
        head_dim=HEAD, intermediate_size=96,
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                width = 1.0 if "embed" in name or "lm_head" in name else 1.0 / 8
                parameter.copy_(torch.randn_like(parameter) * width)
        marks = model.model.embed_tokens.weight[:, :2]  # channels that only two tokens have
        marks.zero_()
        marks[SINK, 0] = marks[KEYWORD, 1] = 8.0
        for index, layer in enumerate(model.model.layers):
            attention = layer.self_attn
            for linear in (attention.o_proj, layer.mlp.down_proj):
                linear.weight[:2] = 0
            attention.q_proj.weight.mul_(2)
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
                linear.weight[:, :2] = 0
            if index in SINKS:
                attention.k_proj.weight[2, 0] = 1000.0
                for row in range(2, attention.q_proj.weight.shape[0], HEAD // 2):
                    attention.q_proj.weight[row] = 0  # rotary embedding joins 2 and 2 + HEAD / 2
                _shrink(attention, 2.0**-8)
            if index in EXACT:
                attention.k_proj.weight[3, 1] = 8.0
                attention.k_proj.weight.mul_(2048)
                attention.q_proj.weight.div_(2048)
    return model


def _shrink(attention: Any, factor: float) -> None:
    """Shrink half of the channels of K, and let q make up for it."""
    for linear, by in ((attention.k_proj, factor), (attention.q_proj, 1 / factor)):
        for start in range(4, linear.weight.shape[0], HEAD // 2):
            linear.weight[start : start + 4] *= by


def draw_text(count: int, *, seed: int) -> list[torch.Tensor]:
    """Draw random ids: a sink in each sequence, and the keyword in 3 % of the places."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (count, LENGTH), generator=generator)
    ids[torch.rand(count, LENGTH, generator=generator) < 0.03] = KEYWORD
    ids[:, 5] = SINK
    return list(ids)


def choose(model: PreTrainedModel, folder: Path, **options: Any) -> PlanResult:
    """Plan the KV cache alone, on text that is random."""
    model.save_pretrained(folder / "model")
    save_tokenizer(folder / "model")
    rows = [{"input_ids": ids.tolist()} for ids in draw_text(60, seed=4)]
    asked = {"scheme": "none", "max_bytes": 0.01, "points": 0, "kv_tokens": 40000} | options
    asked |= {"engine": "vllm-cpu"}  # it leaves q, which is small here, in 16 bits
    text = write_rows(folder / "text.jsonl", rows)
    return plan(folder / "model", text, out=folder / "plan", **OPTIONS, **asked)


def rules_of(found: PlanResult) -> dict[str, str]:
    return {site: rule for group in found.groups for site, rule in group.rules.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sinks")


@pytest.fixture(scope="module")
def found(folder: Path) -> PlanResult:
    return choose(build_model(), folder)


def test_sinks_are_found_and_the_choice_beats_amax_on_other_text(found: PlanResult) -> None:
    assert rules_of(found) == {
        f"model.layers.{layer}.self_attn.k": "percentile:99" for layer in SINKS
    }
    assert {group.choice for group in found.groups if not group.linears} == {"fp8"}
    (amax,) = (point for point in found.frontier if point.name == "cache fp8")
    assert amax.against_chosen is not None
    assert amax.against_chosen.answer == "worse"
    assert amax.kld_mean > 10 * found.kld_mean
    # text that chooses does not judge
    assert (found.search_tokens, found.tokens) == (8 * LENGTH, 12 * (LENGTH - 1))


def test_the_recipe_writes_the_scales_of_the_rules(folder: Path, found: PlanResult) -> None:
    """By `export`, which the plan names, and by another calibration on the same text."""
    recipe = folder / "plan" / "recipe.yaml"
    assert yaml.safe_load(recipe.read_text())["scales"]["rules"] == rules_of(found)
    stats = fp8calib.load_stats(folder / "plan")
    words = found.write.split()
    assert words[:2] == ["fp8calib", "export"]
    succeed(*words[1:-1], folder / "exported")
    data = ("--data", folder / "text.jsonl", "--seq-len", LENGTH, "--batch-size", 12)
    options = ("--recipe", recipe, "--dtype", "float32", "--out", folder / "calibrated")
    succeed("calibrate", folder / "model", *data, *options)
    for place, used in (("exported", stats), ("calibrated", None)):
        known = used or fp8calib.load_stats(folder / place)
        tensors = load_folder(folder / place / "kv-overlay").items()
        written = {k: x for k, x in tensors if k.endswith(("k_scale", "v_scale"))}
        assert len(written) == 2 * LAYERS
        for name, scale in written.items():
            rule = rules_of(found).get(name.removesuffix("_scale"), "amax")
            assert scale.item() == known.kv_scales(rule=rule)[name].item(), name


def test_rules_that_are_not_named_are_not_chosen(tmp_path: Path) -> None:
    found = choose(build_model(), tmp_path, rules=["amax"])
    assert rules_of(found) == {}
