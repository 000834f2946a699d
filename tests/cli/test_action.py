"""`action.yml` and the hooks of pre-commit: their steps run as GitHub and pre-commit run them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.cli.program import succeed
from tests.docs.pages import DOCS, ROOT
from tests.kit.minutes import takes_minutes

ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
HOOKS = {each["id"]: each for each in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())}
QUICK = "--samples 8 --seq-len 32 --dtype float32"
PYTHON = f"""#!/usr/bin/env bash
[ "${{2:-}}" = pip ] && {{ echo "$@" >>"$PIP_LOG"; exit 0; }}
exec {shlex.quote(sys.executable)} "$@"
"""
PROGRAM = f"""#!/usr/bin/env bash
exec {shlex.quote(sys.executable)} -m fp8calib "$@"
"""


@dataclass(frozen=True)
class Job:
    """What a job that uses the action gives."""

    code: int
    """0, or that of the first step that failed."""
    summary: str
    annotations: list[tuple[str, str]]
    outputs: dict[str, str]
    installed: str


@pytest.fixture(scope="module")
def place(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write an FP8 checkpoint, and statistics with files of scales."""
    folder = tmp_path_factory.mktemp("action")
    succeed("quantize", model, "--scheme", "fp8-dynamic", "--out", folder / "fp8")
    quick = (*QUICK.split(), "--format", "kv-scales", "vllm-json", "rfc", "lightllm")
    succeed("calibrate", model, *quick, "--out", folder / "scales")
    for name, text in (("python", PYTHON), ("fp8calib", PROGRAM)):
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return folder


def use(place: Path, tmp_path: Path, **inputs: object) -> Job:
    """Run the steps of the action as a runner does, each in a shell of its own."""
    declared = {name: each.get("default", "") for name, each in ACTION["inputs"].items()}
    required = {name for name, each in ACTION["inputs"].items() if each.get("required")}
    assert required <= inputs.keys() <= declared.keys()
    given = declared | {name: str(value) for name, value in inputs.items()}
    files = {name: tmp_path / name for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY", "PIP_LOG")}
    for path in files.values():
        path.write_text("")
    environment = {
        **os.environ,
        **{name: str(path) for name, path in files.items()},
        "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "GITHUB_ACTION_PATH": str(ROOT),
        "RUNNER_TEMP": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
    }
    code, printed = 0, ""
    for step in ACTION["runs"]["steps"]:
        assert step["shell"] == "bash"
        assert "${{" not in step["run"]  # an input in a script would be run as one
        if step.get("if") == "inputs.package != '-'" and given["package"] == "-":
            continue
        own = {name: _fill(text, given) for name, text in step.get("env", {}).items()}
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=tmp_path,
            env=environment | own,
            capture_output=True,
            text=True,
            check=False,
        )
        code, printed = done.returncode, printed + done.stdout
        assert "Traceback" not in done.stderr
        if code:
            break
    outputs = dict(line.split("=", 1) for line in files["GITHUB_OUTPUT"].read_text().splitlines())
    named = {name: each["value"] for name, each in ACTION["outputs"].items()}
    assert named == {name: f"${{{{ steps.summary.outputs.{name} }}}}" for name in named}
    return Job(
        code=code,
        summary=files["GITHUB_STEP_SUMMARY"].read_text(),
        annotations=re.findall(r"^::(\w+)(?: title=[\w ]+)?::(.*)$", printed, re.M),
        outputs=outputs,
        installed=files["PIP_LOG"].read_text(),
    )


def _fill(text: str, given: dict[str, str]) -> str:
    found = re.fullmatch(r"\$\{\{ inputs\.(\w+) \}\}", text)
    assert found is not None, text
    return given[found[1]]


@takes_minutes
def test_a_checkpoint_that_loads_and_costs_little_passes(
    place: Path, model: Path, tmp_path: Path
) -> None:
    gate = {"model": model, "gate": "w8a8", "options": QUICK.replace(" --", "\n--", 1)}
    job = use(place, tmp_path, path=place / "fp8", engines="vllm sglang", **gate)
    assert job.code == 0, job
    assert job.outputs == {"verdict": "pass", "receipt": "fp8calib-receipt.json"}
    assert re.search(r"^\| vllm \| [\d.]+ \| yes \| 0 of 2 \|$", job.summary, re.M)
    assert re.search(
        r"^\| fp8 \| (pass|warn|no-difference) \| \S+ ± \S+ \| \S+ ± \S+ \|$", job.summary, re.M
    )
    assert {level for level, _ in job.annotations} == {"warning"}  # there is little text
    assert job.installed.split() == ["-m", "pip", "install", "--quiet", str(ROOT)]
    receipt = tmp_path / "fp8calib-receipt.json"
    succeed("receipt", "verify", receipt, "--model", model, "--scales", place / "fp8")
    text = json.loads(receipt.read_text())["text"]
    assert (text["samples"], text["seq_len"]) == (8, 32)  # options of two lines


def test_what_an_engine_refuses_fails_and_is_annotated(place: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in (place / "fp8").iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    config = json.loads((broken / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "nonsense"
    (broken / "config.json").write_text(json.dumps(config))
    job = use(place, tmp_path, path=broken, engines="vllm", package="-")
    assert job.code == 8
    assert job.installed == ""
    assert job.outputs == {"verdict": "fail", "receipt": ""}
    assert re.search(r"^\| vllm \| [\d.]+ \| no \|", job.summary, re.M)
    assert [text for level, text in job.annotations if level == "error"]


@takes_minutes
def test_statistics_are_gated_and_a_strict_gate_fails(
    place: Path, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "gate.yaml").write_text("pass_at: 1.0\nfail_above: 1.0\nkld_fail_above: 0.0\n")
    gate = {"model": model, "gate": "gate.yaml", "options": QUICK, "package": "a b"}
    job = use(place, tmp_path, path=place / "scales" / "stats.safetensors", **gate)
    assert job.code == 8
    assert job.outputs["verdict"] == "fail"
    assert "| engine |" not in job.summary
    assert [level for level, text in job.annotations if "stats.safetensors: fail" in text] == [
        "error"
    ]
    assert job.installed.endswith("--quiet a b\n")
    job = use(place, tmp_path, path=place / "scales", package="-")
    assert (job.code, job.annotations[0][0]) == (2, "error")


@takes_minutes
def test_an_error_of_the_program_is_an_annotation(place: Path, tmp_path: Path) -> None:
    job = use(place, tmp_path, path="no-such-folder/x", package="-")
    assert job.code == 4
    assert "no-such-folder" in job.annotations[0][1]
    assert "`fp8calib check` failed" in job.summary


def test_inputs_are_not_run_as_a_script(place: Path, tmp_path: Path) -> None:
    job = use(place, tmp_path, path="$(touch ran); touch ran", package="-")
    assert job.code != 0
    assert not (tmp_path / "ran").exists()


def _hook(name: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    python, *rest = shlex.split(HOOKS[name]["entry"])
    assert python == "python"
    assert all(re.search(HOOKS[name]["files"], path.as_posix()) for path in paths)
    command = [sys.executable, *rest, *map(str, paths)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@takes_minutes
def test_the_hooks_accept_what_is_valid_and_name_what_is_not(place: Path, tmp_path: Path) -> None:
    recipes = sorted((ROOT / "recipes").glob("*.yaml"))[:2]
    assert _hook("fp8calib-recipes", *recipes).returncode == 0
    wrong = tmp_path / "recipes" / "wrong.yaml"
    wrong.parent.mkdir()
    wrong.write_text("name: a\nscale: {}\n")
    found = _hook("fp8calib-recipes", recipes[0], wrong)
    assert (found.returncode, "scale" in found.stderr) == (3, True)
    scales = place / "scales"
    names = ("kv_scales.safetensors", "kv_cache_scales.tp1.json", "stats.safetensors")
    names += ("rfc.tp1.json", "kv_cache_calib.json")
    assert _hook("fp8calib-scales", *(scales / name for name in names)).returncode == 0
    damaged = tmp_path / "kv_scales.safetensors"
    damaged.write_bytes((scales / "kv_scales.safetensors").read_bytes()[:-3])
    assert _hook("fp8calib-scales", damaged).returncode == 4
    tensors = load_file(scales / "kv_scales.safetensors")
    name = min(tensors)
    for number in (0.0, -1.0, float("nan"), float("inf")):
        save_file({**tensors, name: torch.full_like(tensors[name], number)}, damaged)
        found = _hook("fp8calib-scales", damaged, scales / "kv_scales.safetensors")
        assert (found.returncode, name in found.stderr) == (8, True)
    receipt = tmp_path / "receipt.json"
    receipt.write_text("{}")
    found = _hook("fp8calib-receipts", receipt)
    assert (found.returncode, str(receipt) in found.stderr) == (4, True)


def test_the_page_names_every_input_and_hook() -> None:
    page = (DOCS / "ci.md").read_text()
    assert [name for name in [*ACTION["inputs"], *HOOKS] if f"`{name}`" not in page] == []
