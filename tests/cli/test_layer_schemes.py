"""`--layer-scheme`, `layer_schemes` in recipes and in Python: one checkpoint, several schemes."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests import zoo
from tests.cli.program import fail, succeed
from tests.plugins.gptq.test_checkpoints import command

CHOICE = {"*.o_proj": "fp8-static", "*.layers.1.mlp": "w8a16", "*.down_proj": "fp8-block"}
OPTIONS = [part for pair in CHOICE.items() for part in ("--layer-scheme", "=".join(pair))]


def round_mixed(folder: Path, out: str = "mixed") -> tuple[Any, ...]:
    return (*command(folder / "model", folder, "fp8-dynamic", out), *OPTIONS)


def find_scheme(module: str) -> str:
    """Find the scheme of a linear of the llama by hand."""
    if module.endswith("o_proj"):
        return "fp8-static"
    if ".layers.1.mlp." in module:
        return "w8a16"
    return "fp8-block" if module.endswith("down_proj") else "fp8-dynamic"


def test_a_finished_checkpoint_of_other_patterns_is_not_taken_for_this_one(
    model: Path, tmp_path: Path
) -> None:
    """Both have the same tensors of the same shapes."""
    made = ("quantize", model, "--scheme", "fp8-dynamic", "--out", tmp_path / "out")
    first, second = ("--layer-scheme", "*.o_proj=w8a16"), ("--layer-scheme", "*.down_proj=w8a16")
    succeed(*made, *first)
    assert "finished already" in succeed(*made, *first, "--resume").err
    assert "the folder is not empty" in fail(2, *made, *second, "--resume")


def compare(folder: Path, count: int) -> None:
    """Compare all tensors of each linear with those of the checkpoint of its scheme."""
    mixed = load_file(folder / "mixed" / "model.safetensors")
    linears = [name.removesuffix("_scale") for name in mixed if name.endswith("weight_scale")]
    assert len(linears) == count
    for weight in linears:
        module = weight.removesuffix(".weight")
        single = load_file(folder / find_scheme(module) / "model.safetensors")
        names = {name for name in single if name.startswith(f"{module}.")}
        assert names == {name for name in mixed if name.startswith(f"{module}.")}
        for name in names:
            assert torch.equal(mixed[name].float(), single[name].float()), name


# --- what reads the checkpoint --------------------------------------------------------------------


def test_gptq_rounds_each_linear_as_a_run_of_its_scheme_does(tmp_path: Path) -> None:
    """A run does not change the model, so inputs and Hessians are the same in all runs."""
    zoo.save("llama", tmp_path / "model")
    report = succeed(*round_mixed(tmp_path), "--json").json
    for scheme in ("fp8-static", "fp8-dynamic", "w8a16", "fp8-block"):
        succeed(*command(tmp_path / "model", tmp_path, scheme, scheme))
    compare(tmp_path, 14)
    chosen = {find_scheme(e["module"]) for e in report["rounded"] if e["rounding"] == "gptq"}
    assert chosen == {"fp8-static", "fp8-dynamic", "w8a16", "fp8-block"}
