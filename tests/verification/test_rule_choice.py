"""Rules chosen by what the model loses, with planted attention sinks and without."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

import fp8calib
from fp8calib.data.sequences import Batch
from fp8calib.errors import DataError, UsageError
from fp8calib.geometry.sites import Role
from fp8calib.numerics.formats import E4M3FN
from fp8calib.numerics.rules import parse_rule
from fp8calib.run.forward.decoder import Decoder
from fp8calib.scales.compute import compute_kv_scales
from fp8calib.scales.site_rules import SiteRules
from fp8calib.stats.calibration_stats import CalibrationStats
from fp8calib.verification.report import PairedAnswer, RuleChoiceResult, VerifyReport
from tests import zoo
from tests.verification.by_hand import HandCache, cast

VOCABULARY, LAYERS, HEAD = 96, 4, 16
SINK, KEYWORD = 1, 2
SINKS, EXACT = (1, 2), (0,)
LENGTH = 48
SIZES: dict[str, Any] = {"seq_len": LENGTH, "batch_size": 12}


def build_model(*, seed: int = 0, wide: int | None = None) -> PreTrainedModel:
    """Build a llama whose attention matters, with planted channels.

    In the layers `SINKS`, K of the token `SINK` is a thousand times the others', in a channel that
    q does not look at; half of the other channels are small, and q makes up for it. In the layers
    `EXACT`, K of the token `KEYWORD` is large in a channel that matters, and all exceed 448. In
    the layer `wide` half of the channels are so small that FP8 loses them with every scale.
    """
    model = zoo.build(
        "llama", seed=seed, vocab_size=VOCABULARY, num_hidden_layers=LAYERS, hidden_size=64,
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
            if index == wide:
                _shrink(attention, 2.0**-20)
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


def choose(model: PreTrainedModel, engine: str = "reference", **options: Any) -> RuleChoiceResult:
    """Calibrate on one text; choose and judge on another."""
    stats = fp8calib.calibrate(model, draw_text(16, seed=1), **SIZES).stats
    report = fp8calib.verify(
        model,
        stats,
        data=draw_text(24, seed=2),
        **SIZES,
        rules=["auto"],
        engine=engine,
        **options,
    )
    assert report.rule_choice is not None
    return report.rule_choice


ASKED = {
    "data": draw_text(24, seed=2),
    **SIZES,
    "rules": ["auto"],
    "engine": "reference",
    "dtype": "float32",
}


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A choice for the model with sinks, on disk, with the plan of its run and its passes."""

    folder: Path
    stats: CalibrationStats
    report: VerifyReport
    plan: dict[str, Any]
    passed_tokens: int


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> Chosen:
    folder = tmp_path_factory.mktemp("chosen") / "model"
    model = build_model()
    model.save_pretrained(folder)
    stats = fp8calib.calibrate(model, draw_text(16, seed=1), **SIZES).stats
    passes: list[int] = []
    forward = Decoder.run

    def count(self: Decoder, batch: Batch, cache: Any) -> torch.Tensor:
        passes.append(batch.num_tokens)
        return forward(self, batch, cache)

    plan = fp8calib.verify(folder, stats, **ASKED, dry_run=True).plan
    with patch.object(Decoder, "run", count):
        report = fp8calib.verify(folder, stats, **ASKED)
    return Chosen(folder=folder, stats=stats, report=report, plan=plan, passed_tokens=sum(passes))


@pytest.fixture(scope="module")
def found(chosen: Chosen) -> RuleChoiceResult:
    assert chosen.report.rule_choice is not None
    return chosen.report.rule_choice


def test_sinks_are_found_and_the_choice_beats_every_rule_on_other_text(
    found: RuleChoiceResult,
) -> None:
    assert found.is_gained
    assert found.default == "amax"
    sites = [f"model.layers.{layer}.self_attn.k" for layer in SINKS]
    assert list(found.rules) == sites
    assert set(found.rules.values()) == {"percentile:99"}
    assert (found.left_layers, found.flag) == ((), "")
    choice, *others = found.judged
    assert [one.rule for one in others] == list(found.options)
    assert choice.rule == "auto"
    for one in others:
        assert one.kld_mean > 10 * choice.kld_mean
        assert one.against_best is not None
        assert one.against_best.answer is PairedAnswer.WORSE
    assert found.sentence.startswith(f"{sites[0]}: percentile:99; ")
    assert "; all others: amax (KLD +" in found.sentence


def test_text_that_chooses_does_not_judge(found: RuleChoiceResult) -> None:
    assert (found.chosen_on_tokens, found.judged_on_tokens) == (8 * LENGTH, 12 * LENGTH)


def test_figures_of_a_site_are_those_of_that_site_alone(
    chosen: Chosen, found: RuleChoiceResult
) -> None:
    """By a cache that quantizes K of one layer by hand, with torch's cast."""
    model = build_model()
    site = next(one for one in found.sites if one.sites == ("model.layers.3.self_attn.v",))
    amax = max(
        float(each.amax.max())
        for each_site, each in chosen.stats.sites.items()
        if str(each_site) == site.sites[0]
    )
    same = (torch.Tensor.float, torch.Tensor.float)
    changes = dict.fromkeys(range(LAYERS), same)
    changes[3] = (same[0], partial(cast, scale=amax / 448))
    klds = []
    for ids in draw_text(24, seed=2)[:8]:
        with torch.no_grad():
            plain = model(ids.unsqueeze(0)).logits.double().log_softmax(-1)
            cache = HandCache(model.config, changes)
            changed = model(ids.unsqueeze(0), past_key_values=cache).logits.double()
        kld = (plain.exp() * (plain - changed.log_softmax(-1))).sum(-1)
        klds.append(kld[0, :-1])
    assert site.rule == ""
    assert site.kld == pytest.approx(float(torch.stack(klds).mean()), rel=1e-3)


def test_next_makes_the_choice_that_was_found(chosen: Chosen) -> None:
    assert chosen.report.next == f"fp8calib calibrate {chosen.folder} --rule auto"


def test_on_a_plain_model_nothing_is_gained() -> None:
    model = zoo.build("llama", seed=3, vocab_size=VOCABULARY, num_hidden_layers=2, head_dim=HEAD)
    found = choose(model)
    assert not found.is_gained
    assert (found.default, found.rules, found.left_layers) == ("amax", {}, ())
    assert found.sentence.startswith("nothing is gained over amax")


def test_a_layer_that_every_rule_spoils_stays_in_16_bits() -> None:
    found = choose(build_model(wide=3), engine="vllm-cpu")
    assert found.is_gained
    assert found.left_layers == (3,)
    assert found.flag == "--kv-cache-dtype-skip-layers 3"
    assert "; layers 3: 16 bits; all others: amax" in found.sentence
    assert "per-head" not in found.options  # the largest of a layer serves all its heads


def test_the_plan_says_what_choosing_costs_and_it_costs_no_more(chosen: Chosen) -> None:
    most = re.fullmatch(
        r"at most (\d+) passes over 384 tokens to choose among 6 rules, "
        r"(\d+) over 576 others to judge",
        chosen.plan["rule_search"],
    )
    assert most is not None
    beside = 24 * LENGTH * 4  # the comparison itself: the reference, amax, 1.0 and scales that fit
    choosing = int(most[1]) * 384 + int(most[2]) * 576
    assert choosing / 2 < chosen.passed_tokens - beside <= choosing


@pytest.mark.parametrize(
    ("count", "seed", "rules", "part"),
    [
        (1, 2, ["auto"], "1 sequences are too few"),
        (24, 1, ["auto"], r"about \d+% of this text made the statistics"),
        (24, 2, ["auto", "mse"], "auto cannot stand beside other rules"),
    ],
)
def test_text_that_cannot_choose_and_judge_is_refused(
    chosen: Chosen, count: int, seed: int, rules: list[str], part: str
) -> None:
    text = draw_text(count, seed=seed)
    with pytest.raises(UsageError, match=part):
        fp8calib.verify(chosen.folder, chosen.stats, data=text, **SIZES, rules=rules)


def test_auto_is_no_rule_of_statistics_alone(chosen: Chosen) -> None:
    stats = chosen.stats
    with pytest.raises(UsageError, match="it needs the model and held-out text"):
        stats.kv_scales(rule="auto")
    with pytest.raises(UsageError) as caught:
        stats.kv_scales(rule="x")
    known = caught.value.message.partition("known: ")[2].split(", ")
    assert known[-1] == "auto (where text is run)"
    for rule in known:
        if "(" not in rule:
            assert stats.kv_scales(rule=rule)


def test_calibrate_writes_what_it_chose_on_the_text_it_held_out(tmp_path: Path) -> None:
    """The statistics are those of the first 48 of 60 sequences, and so is every scale."""
    model = build_model()
    text = draw_text(60, seed=4)
    model.save_pretrained(tmp_path / "model")
    result = fp8calib.calibrate(
        tmp_path / "model",
        text,
        **SIZES,
        dtype="float32",
        rule="auto",
        out=tmp_path / "out",
    )
    assert (result.sequences, result.rule) == (48, "auto")
    choice = result.rule_choice
    assert choice is not None
    assert choice.is_gained
    assert choice.chosen_on_tokens == choice.judged_on_tokens == 6 * LENGTH
    assert "per-head" not in choice.options  # kv-overlay has one scale for each tensor
    stats = fp8calib.calibrate(model, text[:48], **SIZES).stats
    written: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out" / "kv-overlay").glob("*.safetensors"):
        found = load_file(file)
        written |= {name: x for name, x in found.items() if name.endswith(("k_scale", "v_scale"))}
    assert len(written) == 2 * LAYERS
    assert set(choice.rules) >= {f"model.layers.{layer}.self_attn.k" for layer in SINKS}
    for name, scale in written.items():
        site = name.removesuffix("_scale")
        rule = choice.rules.get(site, choice.default)
        assert scale.item() == stats.kv_scales(rule=rule)[name].item(), name
    saved = json.loads((tmp_path / "out" / "report.json").read_text())
    assert saved["rule_choice"]["rules"] == dict(choice.rules)


def test_heads_with_one_scale_stand_in_a_file_of_heads(chosen: Chosen) -> None:
    """In a table of heads, sites without a scale for each have the largest for all."""
    stats = chosen.stats
    (_, attention), *_ = stats.geometry.attentions()
    key, value = attention.site(Role.K), attention.site(Role.V)
    rules = SiteRules(sites={key: parse_rule("1.0")}, by_head=frozenset({value}))
    by_head = compute_kv_scales(stats, E4M3FN, per_head=True)
    found = compute_kv_scales(stats, E4M3FN, per_head=True, rule=rules)
    assert found.scales[key].values.tolist() == [[1.0] * attention.num_kv_heads]
    assert torch.equal(found.scales[value].values, by_head.scales[value].values)
    for site, scale in found.scales.items():
        if site not in {key, value}:
            assert (scale.values == by_head.scales[site].values.max()).all()


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        ({"out": None}, "nothing is written without"),
        ({"shard": "1/2"}, "has not all statistics"),
        ({"formats": ["rfc"], "recipe": "w8a8-static"}, "scales inputs of linears too"),
    ],
)
def test_auto_is_refused_where_it_is_not_about_k_and_v(
    chosen: Chosen, asked: dict[str, Any], part: str, tmp_path: Path
) -> None:
    asked = {"out": tmp_path / "out", **asked}
    with pytest.raises(UsageError, match=part):
        fp8calib.calibrate(chosen.folder, draw_text(16, seed=1), **SIZES, rule="auto", **asked)


def test_calibration_needs_enough_text_to_hold_out(chosen: Chosen, tmp_path: Path) -> None:
    text = draw_text(6, seed=1)
    with pytest.raises(DataError, match="6 sequences are too few"):
        fp8calib.calibrate(chosen.folder, text, **SIZES, rule="auto", out=tmp_path / "out")
