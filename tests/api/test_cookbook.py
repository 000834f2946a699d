"""Entries for vLLM's recipes and SGLang's cookbook: the forms that their own builders accept."""

from __future__ import annotations

import datetime
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from fp8calib.commands import card
from fp8calib.engines.registry import find_replayed
from fp8calib.jobs.reporter import PythonReporter
from fp8calib.requests.check import CheckRequest
from tests import zoo
from tests.cli.conftest import save_tokenizer
from tests.cli.program import fail, run, succeed

KEYS = {
    "": "meta model dependencies features opt_in_features variants compatible_strategies "
    "hardware_overrides strategy_overrides guide",
    "meta": "title slug provider description date_added date_updated difficulty tasks",
    "model": "model_id min_vllm_version architecture parameter_count active_parameters "
    "context_length base_args base_env",
}
"""The order of keys that CONTRIBUTING.md of vllm-project/recipes asks for."""


def write(folder: Path, out: Path, *more: object) -> tuple[Any, Any]:
    recipe, cookbook = out / "recipe.yaml", out / "cookbook.yaml"
    base = ("--base-model", "org/tiny-llama", "--repo", "me/tiny-llama-FP8", "--force")
    entries = ("--vllm-recipe", recipe, "--sglang-cookbook", cookbook)
    succeed("card", folder, *base, *entries, *more)
    return yaml.safe_load(recipe.read_text()), yaml.safe_load(cookbook.read_text())


def count_parameters(model: Path) -> int:
    return sum(tensor.numel() for tensor in load_file(model / "model.safetensors").values())


def test_a_checkpoint_becomes_a_variant(model: Path, data: Path, tmp_path: Path) -> None:
    quick = ("--data", data, "--seq-len", 32, "--dtype", "float32", "--batch-size", 8)
    stats, folder = tmp_path / "out" / "stats.safetensors", tmp_path / "fp8"
    succeed("calibrate", model, *quick, "--out", stats.parent)
    succeed("quantize", model, "--scheme", "fp8-dynamic", "--stats", stats, "--out", folder)
    loss = tmp_path / "loss.json"
    loss.write_text(run("verify", model, "--scales", folder, *quick, "--json").out)
    report, verified = json.loads(loss.read_text()), ("--verify-report", loss)
    recipe, cookbook = write(folder, tmp_path, *verified)
    assert " ".join(recipe) == KEYS[""]
    assert " ".join(recipe["meta"]) == KEYS["meta"]
    assert " ".join(recipe["model"]) == KEYS["model"]
    assert recipe["model"]["model_id"] == "org/tiny-llama"
    assert recipe["model"]["architecture"] == "dense"
    assert recipe["model"]["parameter_count"] == f"{count_parameters(model)}"
    assert recipe["model"]["active_parameters"] == recipe["model"]["parameter_count"]
    assert recipe["model"]["context_length"] == 128
    vllm = find_replayed("vllm")
    known = [each.version for each in (vllm, *vllm.releases)]
    assert recipe["model"]["min_vllm_version"] == known[-1]  # llama loads in all of them
    measured = datetime.datetime.fromisoformat(report["provenance"]["date"]).date()
    assert recipe["meta"]["date_added"] == measured
    assert recipe["variants"]["default"]["precision"] == "bf16"
    variant = recipe["variants"]["fp8"]
    assert variant["model_id"] == "me/tiny-llama-FP8"
    assert variant["precision"] == "fp8"
    assert variant["extra_args"] == ["--kv-cache-dtype", "fp8"]
    assert f"{report['candidates'][0]['ppl_ratio']:.4f}" in variant["description"]
    assert "vllm serve me/tiny-llama-FP8 --kv-cache-dtype fp8" in recipe["guide"]
    (family,) = cookbook["families"]
    (found,) = family["models"]
    assert (cookbook["vendor"], family["name"]) == ("me", "tiny-llama")
    assert (found["name"], found["quantization"]) == ("tiny-llama-FP8", "fp8")
    options = ["--kv-cache-dtype", "fp8_e4m3"]
    assert found["hardware"] == {"H100": {"tp": 1, "extra_args": options}}
    assert family["llm"] == {"thinking_capability": "non_thinking"}
    template = folder / "chat_template.jinja"
    for text, answer in (("{{ enable_thinking }}", "hybrid"), ("<think>", "thinking")):
        template.write_text(text)
        _, cookbook = write(folder, tmp_path, *verified)
        assert cookbook["families"][0]["llm"]["thinking_capability"] == answer


def test_an_overlay_is_a_variant_in_16_bits_with_an_fp8_cache(
    model: Path, data: Path, tmp_path: Path
) -> None:
    quick = ("--samples", 4, "--seq-len", 16, "--dtype", "float32")
    succeed("calibrate", model, "--data", data, *quick, "--out", tmp_path / "out")
    recipe, cookbook = write(tmp_path / "out" / "kv-overlay", tmp_path)
    variant = recipe["variants"]["fp8_kv"]
    assert (variant["precision"], variant["extra_args"]) == ("bf16", ["--kv-cache-dtype", "fp8"])
    assert cookbook["families"][0]["models"][0]["quantization"] == "bf16"
    assert recipe["model"]["parameter_count"] == f"{count_parameters(model)}"


def test_experts_that_a_token_does_not_use_are_not_active(tmp_path: Path) -> None:
    zoo.save("mixtral", tmp_path / "moe")
    save_tokenizer(tmp_path / "moe")
    succeed("quantize", tmp_path / "moe", "--scheme", "fp8-dynamic", "--out", tmp_path / "fp8")
    recipe, _ = write(tmp_path / "fp8", tmp_path)
    config = json.loads((tmp_path / "moe" / "config.json").read_text())
    tensors = load_file(tmp_path / "moe" / "model.safetensors")
    experts = sum(t.numel() for name, t in tensors.items() if ".experts." in name)
    idle = experts * (1 - config["num_experts_per_tok"] / config["num_local_experts"])
    total = count_parameters(tmp_path / "moe")
    assert 0 < idle < total
    assert recipe["model"]["architecture"] == "moe"
    assert recipe["model"]["active_parameters"] == f"{total - idle:.0f}"


def test_what_vllm_does_not_load_and_scales_alone_have_no_recipe(
    model: Path, tmp_path: Path
) -> None:
    succeed("quantize", model, "--scheme", "fp8-dynamic", "--out", tmp_path / "fp8")
    base = ("--base-model", "org/name", "--vllm-recipe", tmp_path / "r.yaml")
    config = tmp_path / "fp8" / "config.json"
    text = json.loads(config.read_text())
    text["architectures"] = ["UnknownForCausalLM"]
    config.write_text(json.dumps(text))
    assert "does not load" in fail(8, "card", tmp_path / "fp8", *base)
    assert not (tmp_path / "r.yaml").exists()
    assert not (tmp_path / "fp8" / "README.md").exists()
    shutil.copytree(tmp_path / "fp8", tmp_path / "pack")
    for path in (tmp_path / "pack").iterdir():
        path.unlink()
    from safetensors.torch import save_file  # noqa: PLC0415

    scales = {f"model.layers.{i}.self_attn.{r}_scale": torch.ones(1) for i in (0, 1) for r in "kv"}
    save_file(scales, tmp_path / "pack" / "kv_scales.safetensors", {"format": "pt"})
    assert "scales alone" in fail(2, "card", tmp_path / "pack", *base)


@pytest.mark.parametrize("option", ["--vllm-recipe", "--sglang-cookbook"])
def test_an_entry_that_exists_is_kept(model: Path, tmp_path: Path, option: str) -> None:
    succeed("quantize", model, "--scheme", "w8a16", "--out", tmp_path / "fp8")
    (tmp_path / "r.yaml").write_text("mine")
    base = ("--base-model", "org/name", option, tmp_path / "r.yaml")
    assert "exists" in fail(2, "card", tmp_path / "fp8", *base)
    assert (tmp_path / "r.yaml").read_text() == "mine"


def test_the_oldest_release_is_the_one_since_which_all_load_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answers = {"0.33.0": True, "0.32.0": True, "0.31.0": False, "0.30.0": True}

    def answer(request: CheckRequest, _: object) -> SimpleNamespace:
        versions = [name.partition("==")[2] for name in request.engine]
        return SimpleNamespace(
            engines={
                each: SimpleNamespace(version=each, ok=answers.get(each, False))
                for each in versions
            }
        )

    monkeypatch.setattr(card, "check", answer)
    assert card._find_oldest(tmp_path, PythonReporter(None)) == "0.32.0"
