"""`fp8calib check`: its contract, our own exports by docs/formats.md, and models of its own."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import zoo
from tests.architectures import families
from tests.cli.program import Outcome, run, succeed
from tests.kit.checkpoints import change_config, change_tensors

ENGINES = ("vllm", "sglang", "transformers")
U8 = torch.uint8
DEFAULTS = ("vllm", "sglang")


def check(code: int, *arguments: object) -> Any:
    """Check with --json, require the exit code, and give the object on stdout."""
    outcome = run("check", *arguments, "--json")
    assert outcome.code == code, outcome.err
    assert "Traceback" not in outcome.err
    return outcome.json


@pytest.fixture
def overlay(calibrated: tuple[Path, Outcome], tmp_path: Path) -> Path:
    """Give a copy of the overlay of the tiny llama, to be changed."""
    return Path(shutil.copytree(calibrated[0] / "kv-overlay", tmp_path / "overlay"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, ""),
        (("layers.1.mlp.up_proj.weight_scale", lambda x: x.flip(0)), "up_proj.weight differs by "),
        (("layers.0.self_attn.o_proj.weight", lambda x: x.view(U8).roll(1, 0)), "o_proj.weight "),
        (("layers.1.input_layernorm.weight", lambda x: x * 1.5), "input_layernorm.weight differs"),
    ],
)
def test_weights_are_compared_with_statistics(
    calibrated: tuple[Path, Outcome], model: Path, tmp_path: Path, change: Any, words: str
) -> None:
    fp8 = tmp_path / "fp8"
    succeed("quantize", model, "--scheme", "fp8-dynamic", "--out", fp8)
    if change is not None:
        name, edit = f"model.{change[0]}", change[1]
        change_tensors(fp8, lambda held: {**held, name: edit(held[name]).view(held[name].dtype)})
    options = ("--read-weights", "--stats", calibrated[0])
    report = check(8 if words else 0, fp8, *options)
    for engine in ("vllm", "sglang"):
        assert words in " ".join(report["engines"][engine]["suspicious"])
    check(0, model, *options)


def test_statistics_do_not_hide_that_a_config_is_missing(
    calibrated: tuple[Path, Outcome], model: Path, tmp_path: Path
) -> None:
    succeed("quantize", model, "--scheme", "fp8-dynamic", "--out", tmp_path / "fp8")
    shutil.copy(model / "config.json", tmp_path / "fp8")
    report = check(8, tmp_path / "fp8", "--stats", calibrated[0])
    assert report == check(8, tmp_path / "fp8")


def test_tables_say_the_same_for_people(calibrated: tuple[Path, Outcome]) -> None:
    outcome = run("check", calibrated[0] / "kv-overlay-head")

    assert outcome.code == 8
    assert "vllm 0.33.0: ok, 2 of 2 layers served" in outcome.out
    assert "sglang 0.5.23: not ok, 0 of 2 layers served" in outcome.out
    assert "fix for sglang: " in outcome.out
    assert outcome.out.startswith(f"{calibrated[0] / 'kv-overlay-head'}: not ok\n")
    report = check(8, calibrated[0] / "kv-overlay-head")
    assert set(report) == {"schema_version", "ok", "passed", "engines"}
    assert tuple(report["engines"]) == DEFAULTS
    assert "FlashAttention 3" in outcome.out


# --- models on the hub, and models with code of their own ----------------------------------------


@pytest.mark.parametrize("family", ["jetmoe", "deepseek_v4", "gpt_neo"])
def test_layers_that_are_not_understood_are_no_fault(family: str, tmp_path: Path) -> None:
    changes = families.REFUSED[family][0] if family in families.REFUSED else families.ROUTED
    families.save(family, changes, tmp_path / "model")

    report = check(9, tmp_path / "model")

    for engine in report["engines"].values():
        assert (engine["status"], engine["layers"]) == ("unknown", [])
        assert "its layers are not understood" in engine["unknown"][0]
    assert "fp8calib vllm check" in report["engines"]["vllm"]["unknown"][0]


@zoo.NEEDS_5_23
def test_an_engine_that_does_not_know_a_model_says_so_whatever_its_layers_are(
    tmp_path: Path,
) -> None:
    families.save("lfm3", {"layer_types": ["conv", "conv"]}, tmp_path / "model")

    done = run("check", tmp_path / "model")

    assert done.code == 8
    assert done.out.splitlines()[1] == "vllm 0.33.0: not ok"
    assert re.search("weights refused: vLLM 0.33 demands .*, but lfm3 needs 5.23", done.out)


def test_the_command_that_asks_the_loader_trusts_code_that_the_checkpoint_has(
    tmp_path: Path,
) -> None:
    zoo.save("llama", tmp_path / "model")
    change_config(tmp_path / "model", model_type="own", auto_map={"AutoConfig": "own.Own"})

    report = check(9, tmp_path / "model")

    assert "fp8calib vllm check --trust-remote-code`" in report["engines"]["vllm"]["unknown"][0]


# --- what is no checkpoint ------------------------------------------------------------------------


def test_what_a_checkpoint_has_to_have_fails_the_check(model: Path) -> None:
    """No KV scales, and KV heads that three ranks cannot share."""
    check(0, model)
    check(8, model, "--require-kv")
    check(8, model, "--tp", 3)
