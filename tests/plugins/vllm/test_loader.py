"""`vllm check`: what the report takes from vLLM's own loader, and what it does not."""

import json
import shutil
import stat
from pathlib import Path

import pytest
import torch

import fp8calib
from fp8calib.errors import UsageError
from fp8calib.plugins import vllm
from fp8calib.plugins.vllm.loader import find_release
from fp8calib.plugins.vllm.loader_script import _list_missing, _make_mode
from tests import zoo
from tests.engines.test_odd_scales import write_overlay
from tests.kit.checkpoints import change_config, change_tensors
from tests.quantization.by_hand import run as quantize

MX_SIZES = {"hidden_size": 64, "intermediate_size": 96}


@pytest.fixture(scope="module")
def overlay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    zoo.save("llama", folder / "model")
    scales = {(layer, role): 0.0005 for layer in (0, 1) for role in "kv"}
    return write_overlay(folder / "model", folder / "overlay", scales)


def write_script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def make_python(path: Path, noise: str = "echo noise", **answer: object) -> Path:
    """Write a program that answers as the script does in an environment with vLLM."""
    whole = {"stage": "done", "rank": 0, "error": "", "trace": [], "version": "9.9", "files": []}
    whole |= {"runner": "generate", "missing": [], "casts": [], "scales": []} | answer
    return write_script(path, f"{noise}\ncat <<'END'\n{json.dumps(whole)}\nEND")


def hold(k: str, v: str) -> list[dict[str, object]]:
    return [{f"model.layers.{i}.self_attn.attn": {"k": [k], "v": [v]} for i in (0, 1)}]


def test_the_loader_that_agrees_changes_nothing(overlay: Path, tmp_path: Path) -> None:
    """It is told the number of ranks, and a few of the files are named."""
    files = [f"model-{i}.safetensors" for i in range(1, 6)]
    noise, scales = f'echo "$5" > {tmp_path}/tp', hold("0.0005", "0.0005")
    python = make_python(tmp_path / "python", noise, scales=scales, files=files)

    report = vllm.check(overlay, python=python, tp=2)

    assert (tmp_path / "tp").read_text() == "2\n"
    assert report.ok
    said = "vLLM 9.9 loaded it, from model-1.safetensors, model-2.safetensors, model-3.safetensors"
    assert f"{said} and 2 more" in report.engines["vllm"].problems
    assert not [each for each in report.engines["vllm"].problems if "defect" in each]


def test_a_release_whose_rules_are_known_answers_under_the_same_name(
    overlay: Path, tmp_path: Path
) -> None:
    python = make_python(tmp_path / "python", "echo 0.32.0", scales=hold("0.0005", "0.0005"))

    found = vllm.check(overlay, python=python).engines["vllm"]

    assert (found.ok, found.engine, found.version) == (True, "vllm", "0.32.0")


@pytest.mark.parametrize(("k", "status"), [("1.0", "defaulted"), ("0.25", "used"), ("nan", "bad")])
def test_the_loader_counts_where_it_differs(
    overlay: Path, tmp_path: Path, k: str, status: str
) -> None:
    python = make_python(tmp_path / "python", scales=hold(k, "0.0005"))

    found = vllm.check(overlay, python=python).engines["vllm"]

    assert [(layer.k.status, layer.v.status) for layer in found.layers] == [(status, "used")] * 2
    assert any("a defect of the replay" in each for each in found.problems)


def test_a_stop_that_the_replay_foresaw_is_no_defect(tmp_path: Path) -> None:
    """It stops at FP8 codes of a linear that the config excludes (0.32.0, run)."""
    zoo.save("llama", tmp_path / "model")
    quantize(tmp_path / "model", tmp_path / "fp8", "fp8-dynamic")
    codes = torch.ones(128, 32).to(torch.float8_e4m3fn)
    change_tensors(
        tmp_path / "fp8", {"lm_head.weight": codes, "lm_head.weight_scale": torch.ones(128, 1)}
    )
    python = make_python(
        tmp_path / "python", stage="load", error="ValueError: lm_head.weight_scale"
    )

    found = vllm.check(tmp_path / "fp8", python=python).engines["vllm"]

    assert found.weights is not None
    assert found.weights.status == "refused"
    assert not [each for each in found.problems if "defect" in each]


def test_a_model_that_vllm_runs_for_pooling_is_misread(overlay: Path, tmp_path: Path) -> None:
    python = make_python(
        tmp_path / "python", runner="pooling", scales=hold("0.0005", "0.0005"), missing=["a.weight"]
    )

    report = vllm.check(overlay, python=python)

    weights = report.engines["vllm"].weights
    assert not report.ok
    assert weights is not None
    assert weights.status == "misread"
    assert weights.why == "vLLM takes it for a model of kind pooling, which generates no text"


@pytest.mark.parametrize("is_doubted", [True, False])
def test_experts_that_the_loader_does_not_report_are_misread_where_there_are_doubts(
    overlay: Path, tmp_path: Path, is_doubted: bool
) -> None:
    """Experts in one tensor, which vLLM 0.32 left out, are under names that no class has."""
    folder = Path(shutil.copytree(overlay, tmp_path / "o"))
    if is_doubted:
        change_tensors(folder, {"model.layers.0.mlp.experts.w1": torch.ones(2, 4, 4)})
    name = "model.layers.0.mlp.experts.routed_experts.w13_weight"
    python = make_python(tmp_path / "p", scales=hold("0.0005", "0.0005"), missing=[name])

    found = vllm.check(folder, python=python).engines["vllm"]

    assert found.ok is not is_doubted
    assert not found.unknown
    if is_doubted:
        assert found.weights is not None
        assert name in found.weights.why


ERRORS = [
    row.split("\t") for row in Path(__file__).with_name("errors.tsv").read_text().splitlines()
]
"""Of builds, with the place; then those of files without one, which only cite words of builds."""


@pytest.mark.parametrize(("error", "place"), ERRORS)
def test_an_error_of_the_build_is_unknown_and_one_of_the_file_a_refusal(
    overlay: Path, tmp_path: Path, error: str, place: str
) -> None:
    trace = ["vllm/model_executor/models/llama.py:__init__", place] if place else []
    stage = "model" if place else "weights"
    python = make_python(tmp_path / "python", stage=stage, error=error, trace=trace)

    report = vllm.check(overlay, python=python)

    assert report.exit_code == (9 if place else 8)
    (found,) = report.engines.values()
    is_named = f"stops at the weights: {error[:20]}" in found.layers[0].k.why
    assert is_named is not bool(place)


def test_code_of_the_checkpoint_runs_only_where_it_is_trusted(
    overlay: Path, tmp_path: Path
) -> None:
    """As vLLM 0.32.0 words it, through transformers."""
    error = "ValidationError: Value error, The repository m contains custom code which must be"
    noise = f'echo "$6" > {tmp_path}/trust'
    python = make_python(tmp_path / "python", noise, stage="config", error=error)

    report = vllm.check(overlay, python=python)
    assert (tmp_path / "trust").read_text() == "\n"
    vllm.check(overlay, python=python, trust_remote_code=True)

    assert (tmp_path / "trust").read_text() == "--trust-remote-code\n"
    assert report.exit_code == 9
    assert any("--trust-remote-code" in each for each in report.engines["vllm"].unknown)


@pytest.mark.parametrize(
    ("printed", "name"),
    [
        ("0.32.0", "vllm==0.32.0"),
        ("0.32.0+cpu", "vllm==0.32.0"),
        ("0.2", "vllm"),
        ("noise", "vllm"),
    ],
)
def test_the_rules_are_those_of_the_vllm_that_loads(
    printed: str, name: str, tmp_path: Path
) -> None:
    assert find_release(write_script(tmp_path / "python", f"echo {printed}")) == name


def test_an_interpreter_that_does_not_answer_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp8calib.plugins.vllm.loader._VERSION_TIMEOUT_S", 0.5)
    with pytest.raises(UsageError, match="did not name its vLLM within"):
        find_release(write_script(tmp_path / "python", "exec sleep 20"))


def test_an_environment_without_vllm_is_an_error(overlay: Path, tmp_path: Path) -> None:
    answer = {"stage": "import", "error": "ModuleNotFoundError: No module named 'vllm'"}
    for python, kind in (
        (make_python(tmp_path / "python", **answer), UsageError),
        (tmp_path / "none", UsageError),
    ):
        with pytest.raises(kind):
            vllm.check(overlay, python=python)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo bad >&2; kill -9 $$", "vLLM's loader ended with -9, without an answer: bad"),
        ("[ $2 = -c ] || exec sleep 20", "vLLM's loader did not end within 0.5 s"),
    ],
)
def test_a_loader_that_dies_or_does_not_end_says_nothing_about_the_checkpoint(
    script: str, says: str, overlay: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp8calib.plugins.vllm.loader._TIMEOUT_S", 0.5)

    report = vllm.check(overlay, python=write_script(tmp_path / "python", script))

    assert report.exit_code == 9
    assert any(says in each for each in report.engines["vllm"].unknown)


def test_a_weight_that_is_filled_under_another_name_is_not_missing() -> None:
    """The experts of vLLM hold the router that the layer holds too."""
    router, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    model = torch.nn.ModuleDict({"experts": torch.nn.ModuleDict({"gate": router}), "up": other})
    model["gate"] = router
    model["experts"].register_parameter("w13_weight", torch.nn.Parameter(torch.ones(2)))

    loaded = {"gate.weight", "gate.bias", "up.bias"}

    assert list(_list_missing(model, loaded)) == ["experts.w13_weight", "up.weight"]


def test_exponents_that_become_floats_are_noted(overlay: Path, tmp_path: Path) -> None:
    casts: list[str] = []
    with _make_mode(casts):
        torch.empty(2).copy_(torch.tensor([127, 126], dtype=torch.uint8))
        torch.empty(2).copy_(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    assert casts == ["torch.uint8 to torch.float32"]
    python = make_python(tmp_path / "p", scales=hold("0.0005", "0.0005"), casts=casts)

    found = vllm.check(overlay, python=python).engines["vllm"]

    assert not found.ok
    assert found.weights is not None
    assert "takes stored integers for floats" in found.weights.why


@pytest.mark.parametrize("casts", [["torch.uint8 to torch.float32"], []])
def test_a_model_whose_refusal_was_expected_is_not_ok_because_it_loads(
    casts: list[str], tmp_path: Path
) -> None:
    """A joined projection of which `ignore` names a part: vLLM refuses it."""
    zoo.save("llama", tmp_path / "m", architectures=["LlamaForCausalLM"], **MX_SIZES)
    out = quantize(tmp_path / "m", tmp_path / "q", "fp8-dynamic", "compressed-tensors").out
    part = "model.layers.0.self_attn.q_proj"
    change_config(out, lambda config: config["quantization_config"]["ignore"].append(part))
    before = fp8calib.check(out, engine="vllm").engines["vllm"].weights
    assert before is not None
    assert before.status == "refused"
    python = make_python(tmp_path / "p", casts=casts, scales=hold("0.5", "0.5"))

    report = vllm.check(out, python=python)

    found = report.engines["vllm"]
    assert any("the replay expected a refusal" in each for each in found.problems)
    if casts:
        assert found.weights is not None
        assert "takes stored integers for floats" in found.weights.why
    else:
        assert found.unknown == ("what its weights and their scales hold is not judged",)
        assert report.exit_code == 9


def test_small_tensors_take_values_and_only_the_shape_of_large_ones() -> None:
    with _make_mode([]):
        scale, large = torch.empty(4), torch.empty(64, 65)
        scale.copy_(0.5)

        assert large.is_meta
        assert scale.tolist() == [0.5] * 4
        assert scale.copy_(large[0, :4]) is scale
        with pytest.raises(RuntimeError, match="must match"):
            scale.copy_(large[0, :5])
