"""`plan`: recipes that quantize takes, whose files have the size and the loss that it says."""

import itertools
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml

from fp8calib.verification import score
from tests import zoo
from tests.cli.conftest import save_tokenizer, write_rows
from tests.cli.program import fail, run, succeed
from tests.kit.checked import list_commands, list_verdicts
from tests.kit.checkpoints import load_folder
from tests.kit.minutes import in_minutes, takes_minutes

LENGTH = 32
QUICK = ("--seq-len", 32, "--dtype", "float32", "--batch-size", 12)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


def plant(folder: Path, change: Callable[[Any], None], **sizes: int) -> tuple[Path, Path]:
    """Write a changed llama, of four layers unless `sizes` says it, and text that it wrote."""
    model: Any = zoo.build("llama", **{"num_hidden_layers": 4, **sizes})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        change(model)
        tokens = torch.randint(3, 95, (60, 1), generator=generator)
        for _ in range(LENGTH - 1):
            shares = torch.softmax(model(tokens).logits[:, -1, :95], -1)
            tokens = torch.cat([tokens, torch.multinomial(shares, 1, generator=generator)], 1)
    model.save_pretrained(folder / "model")
    save_tokenizer(folder / "model")
    rows = [{"input_ids": row.tolist()} for row in tokens]
    return folder / "model", write_rows(folder / "text.jsonl", rows)


def sharpen(model: Any) -> None:
    """Make the output depend on all layers."""
    model.lm_head.weight.mul_(6)
    for parameter in model.model.layers.parameters():
        if parameter.ndim == 2:
            parameter.mul_(4)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return plant(tmp_path_factory.mktemp("plan"), sharpen, **SIZES)


def plan(planted: tuple[Path, Path], out: Path, *options: object) -> Any:
    model, text = planted
    command = ("plan", model, "--data", text, *QUICK, *options, "--out", out, "--json")
    return run(*command)


def count_stored(folder: Path) -> int:
    return sum(each.numel() * each.element_size() for each in load_folder(folder).values())


def verify(planted: tuple[Path, Path], *options: object) -> list[Any]:
    """Verify on the text that a plan holds out."""
    model, text = planted
    rows = [json.loads(line) for line in text.read_text().splitlines()]
    held_out = write_rows(text.with_name("held-out.jsonl"), rows[-12:])
    command = ("verify", model, "--data", held_out, *QUICK, *options, "--json")
    candidates: list[Any] = run(*command).json["candidates"]
    return candidates


def test_the_recipe_gives_a_file_of_the_planned_size_that_loses_what_was_measured(
    planted: tuple[Path, Path], tmp_path: Path
) -> None:
    model, _ = planted
    outcome = plan(planted, tmp_path / "plan", "--max-bytes", 0.5, "--kv-tokens", 0, "--points", 0)
    assert outcome.code == 0, outcome.err
    found = outcome.json
    recipe = yaml.safe_load((tmp_path / "plan" / "recipe.yaml").read_text())
    assert recipe["quantize"]["layer_schemes"] or recipe["quantize"]["ignore"]
    out = tmp_path / "fp8"
    stats = tmp_path / "plan" / "stats.safetensors"
    recipe_file = tmp_path / "plan" / "recipe.yaml"
    succeed("quantize", model, "--scheme", recipe_file, "--stats", stats, "--out", out)
    assert count_stored(out) == found["bytes"]["after"] <= 0.5 * found["bytes"]["before"]
    verified = verify(planted, "--scales", out)[0]
    assert verified["kld_mean"] == pytest.approx(found["kld_mean"], rel=1e-5)
    assert verified["ppl_ratio"] == pytest.approx(found["ppl_ratio"], rel=1e-6)


@pytest.fixture(scope="module")
def measured(planted: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("measured") / "plan"
    options = ("--scheme", "w8a16", "--passes", 60, "--points", 1)
    assert plan(planted, out, "--max-bytes", 0.7, "--kv-tokens", 40, *options).code == 0
    return out


def test_another_budget_takes_what_was_measured(
    planted: tuple[Path, Path], measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "plan"
    shutil.copytree(measured, out)

    def run_nothing(*_: object, **__: object) -> None:
        raise AssertionError("text is calibrated on")

    monkeypatch.setattr("fp8calib.plugins.plan.command.run_calibration", run_nothing)
    options = ("--scheme", "w8a16", "--passes", 60, "--points", 0, "--kv-tokens", 40)
    found = plan(planted, out, "--max-kld", 0.02, *options, "--resume").json
    (chosen,) = [point for point in found["frontier"] if point["is_chosen"]]
    assert found["searched_kld"] <= 0.02
    assert found["bytes"]["after"] == chosen["size_bytes"]
    again = plan(planted, out, "--max-ratio", 1.01, *options, "--resume").json
    size = plan(planted, out, "--max-bytes", "1M", *options, "--resume").json
    assert size["budget"] == "least KLD with at most 1M"
    assert again["budget"] == "least bytes with a perplexity ratio of at most 1.01"
    text = fail(2, "plan", planted[0], "--data", planted[1], *QUICK, "--max-kld", 1, "--out", out)
    assert "--force" in text


BUDGETS = {"max_bytes": 0.6, "max_kld": 0.02, "max_ratio": 1.03}
NEEDED = 60
"""With fewer passes whole layers are decided together, each of which loses more than the budget."""


@pytest.mark.parametrize(
    ("key", "passes"),
    [
        pytest.param(*case, marks=() if case == ("max_kld", 2) else takes_minutes)
        for case in itertools.product(BUDGETS, (2, 7, 20, 60))
    ],
)
def test_a_search_keeps_to_its_passes(
    planted: tuple[Path, Path], tmp_path: Path, key: str, passes: int
) -> None:
    """Counted where they are run: emulations on the text, and the unquantized model beside them."""
    counts: Counter[int] = Counter()

    def count(model: Any, candidates: Sequence[Any], batches: Sequence[Any], **others: Any) -> Any:
        counts[sum(each.num_tokens for each in batches)] += len(candidates) + 1
        return plain_score(model, candidates, batches, **others)

    plain_score = score.score
    limit = BUDGETS[key]
    options = (f"--{key.replace('_', '-')}", limit, "--passes", passes, "--kv-tokens", 40)
    with patch.object(score, "score", count):
        found = plan(planted, tmp_path / "out", *options, "--points", 1).json
    searched = counts[8 * LENGTH]
    uniform = sum(point["is_uniform"] for point in found["frontier"])
    assert found["passes"] == searched <= passes + score.count_in_rounds(uniform)
    if passes >= NEEDED:
        assert found["bytes"]["after"] < 0.8 * found["bytes"]["before"]
    elif key == "max_bytes":
        assert found["bytes"]["after"] <= limit * found["bytes"]["before"]
    else:
        assert found["searched_kld"] <= BUDGETS["max_kld"]


def test_caches_are_left_in_16_bits_by_the_option_of_the_engine(
    planted: tuple[Path, Path], tmp_path: Path
) -> None:
    options = ("--scheme", "w8a16", "--points", 0, "--kv-tokens", 4000, "--passes", 60)
    found = plan(planted, tmp_path / "out", "--max-bytes", 0.75, *options).json
    caches = {
        group["layers"][0]: group["choice"] for group in found["groups"] if not group["linears"]
    }
    plain = [str(layer) for layer, choice in caches.items() if choice == "16 bits"]
    assert 0 < len(plain) < 4
    assert found["serve"].endswith(f"--kv-cache-dtype-skip-layers {' '.join(plain)}")
    recipe, stats, out = (tmp_path / "out" / n for n in ("recipe.yaml", "stats.safetensors", "fp8"))
    command = ("quantize", planted[0], "--scheme", recipe, "--stats", stats, "--out", out)
    written = succeed(*command, "--json").json
    served = list_commands(written)
    flag = f"--kv-cache-dtype fp8 --kv-cache-dtype-skip-layers {' '.join(plain)}"
    assert set(served) == {"vLLM"}
    assert served["vLLM"] == f"vllm serve {out} {flag}"
    assert "cannot leave" in list_verdicts(written)["SGLang"]
    skipped = ("--kv-cache-dtype-skip-layers", *plain)
    verified = verify(planted, "--scales", out, *skipped)[0]
    assert verified["kld_mean"] == pytest.approx(found["kld_mean"], rel=1e-5)
    options = (*options, "--engine", "sglang", "--passes", 2)
    joined = plan(planted, tmp_path / "both", "--max-bytes", 0.75, *options)
    names = [group["name"] for group in joined.json["groups"] if not group["linears"]]
    assert names == ["all KV caches"]


@pytest.mark.parametrize(
    "family", in_minutes("deepseek_v3", "mixtral", "qwen3_next", "gemma3n_text")
)
def test_experts_latents_and_linear_attention_are_planned(family: str, tmp_path: Path) -> None:
    """What is written loses what was measured, and passes `check`."""
    zoo.save(family, tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    rows = [{"input_ids": [3 + (i * j) % 90 for j in range(1, 33)]} for i in range(12)]
    text = write_rows(tmp_path / "text.jsonl", rows)
    place = (tmp_path / "model", text)
    options = ("--points", 0, "--kv-tokens", 0)
    found = plan(place, tmp_path / "plan", "--max-bytes", 0.7, *options).json
    has_experts = any(group["name"].endswith(".experts") for group in found["groups"])
    assert has_experts or family == "gemma3n_text"
    recipe, stats = (tmp_path / "plan" / name for name in ("recipe.yaml", "stats.safetensors"))
    out = tmp_path / "fp8"
    succeed("quantize", place[0], "--scheme", recipe, "--stats", stats, "--out", out)
    succeed("check", out, "--engine", "vllm")
    held_out = write_rows(tmp_path / "held-out.jsonl", rows[-2:])
    judged = ("--scales", out, "--data", held_out, *QUICK, "--json")
    verified = succeed("verify", place[0], *judged).json["candidates"][0]
    assert verified["kld_mean"] == pytest.approx(found["kld_mean"], rel=1e-5)


def test_the_page_draws_each_plan_and_names_what_is_no_choice(measured: Path) -> None:
    page = (measured / "plan.html").read_text()
    report = json.loads((measured / "report.json").read_text())
    assert "<title>FP8 plan of " in page
    assert "<script" not in page
    marks = re.findall(r'd="([^"]*)" class="marks"', page)
    assert sum(path.count("M") for path in marks) == sum(
        point["kld_mean"] > 0 for point in report["frontier"]
    )
    for group in report["groups"]:
        assert group["name"] in page
    assert report["write"].replace("'", "&#39;") in page
    caches = [each["choice"] for each in report["groups"] if not each["linears"]]
    stored = sum(2 * 2 * 16 * 40 * (1 if each == "fp8" else 2) for each in caches) / 1000
    assert f"(KV cache of 40 tokens: {stored:.1f} kB of 20.5 kB), KLD" in page
    losses = [f"{report[key]:.4f}" for key in ("searched_kld", "summed_kld")]
    assert f"the plan has KLD {losses[0]} nats, and its groups alone add up to {losses[1]}" in page


def test_the_choices_are_those_of_the_recipe_where_nothing_fits(
    planted: tuple[Path, Path], tmp_path: Path
) -> None:
    """The smallest plan may have a scheme that the search has dropped: another loses less."""
    options = ("--max-bytes", 0.1, "--kv-tokens", 0, "--passes", 2, "--points", 0)
    found = plan(planted, tmp_path / "plan", *options).json
    recipe = tmp_path / "plan" / "recipe.yaml"
    stats = ("--stats", tmp_path / "plan" / "stats.safetensors")
    command = (
        "quantize",
        planted[0],
        "--scheme",
        recipe,
        *stats,
        "--out",
        tmp_path / "fp8",
        "--json",
    )
    quantized = succeed(*command).json["quantized"]
    chosen = [each for each in found["groups"] if each["choice"] != "16 bits"]
    assert sorted(name for each in chosen for name in each["linears"]) == sorted(quantized)
    assert sum(each["saved_bytes"] for each in chosen) > 0


def test_a_recipe_has_schemes_and_options_replace_them(
    planted: tuple[Path, Path], tmp_path: Path
) -> None:
    options = ("--scheme", "w8a16", "--points", 0, "--kv-tokens", 0, "--passes", 2)
    found = plan(planted, tmp_path / "plan", "--max-bytes", 0.7, *options).json
    recipe = tmp_path / "plan" / "recipe.yaml"
    command = ("quantize", planted[0], "--scheme", recipe, "--out", tmp_path / "fp8")
    outcome = succeed(*command, "--json").json
    planned = [linear for g in found["groups"] if g["choice"] == "w8a16" for linear in g["linears"]]
    assert sorted(outcome["quantized"]) == sorted(planned)
    fewer = succeed(*command, "--force", "--ignore", "*.o_proj", "--json").json["quantized"]
    assert fewer
    assert not any(linear.endswith(".o_proj") for linear in fewer)
    empty = tmp_path / "kv.yaml"
    empty.write_text("name: kv\n")
    other = ("quantize", planted[0], "--scheme", empty, "--out", tmp_path / "other")
    assert "it has no section quantize" in fail(3, *other)
