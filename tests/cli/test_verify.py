"""`verify`: what it prints and writes, gates, and candidates that are refused alone."""

import json
import math
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fp8calib.calibration.calibration_stats import save_stats
from fp8calib.commands.suggest import suggest_command
from fp8calib.commands.verify import VerifyRequest
from tests import zoo
from tests.cli.conftest import QUICK, save_changed, save_tokenizer, write_rows
from tests.cli.places import Places
from tests.cli.program import Outcome, fail, run, snapshot, succeed
from tests.formats.handmade import make_geometry, make_stats
from tests.kit.checkpoints import change_config, change_json, change_tensors

PROMISED = {
    *("name", "ppl", "ppl_ratio", "ppl_ratio_se", "kld_mean", "kld_p99", "top1_agreement"),
    "verdict",
}
VERDICTS = {"pass", "warn", "fail", "no-difference", "cannot-tell"}
FILES = (
    *("stats.safetensors", "kv-overlay", "kv-overlay-head", "tgi", "kv_scales.safetensors"),
    *("kv_cache_scales.tp1.json", "rfc.tp2.json"),
)
"""What a calibration writes, each a candidate of its own."""
Command = tuple[object, ...]


@pytest.fixture(scope="session")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give 20 rows of 40 tokens that no calibration has seen."""
    rows = [{"text": " ".join(f"w{(i * j + 7 * j) % 90}" for j in range(1, 40))} for i in range(20)]
    return write_rows(tmp_path_factory.mktemp("data") / "verify.jsonl", rows)


@pytest.fixture(scope="session")
def command(model: Path, held_out: Path) -> Command:
    return ("verify", model, "--data", held_out, *QUICK)


@pytest.fixture(scope="session")
def files(calibrated: tuple[Path, Outcome]) -> Path:
    """Give the folder of one calibration in every format."""
    return calibrated[0]


@pytest.fixture
def gate(tmp_path: Path) -> Callable[..., Path]:
    def write(**limits: float) -> Path:
        (tmp_path / "gate.json").write_text(json.dumps(limits))
        return tmp_path / "gate.json"

    return write


# --- what is printed and written ---------------------------------------------------------------


def test_json_holds_the_promised_keys(command: Command, files: Path) -> None:
    """Candidates are in the order of the command line."""
    names = [str(files / name) for name in ("kv-overlay", "stats.safetensors", "tgi")]
    scales = [part for name in names for part in ("--scales", name)]
    report = succeed(*command, *scales, "--json").json
    assert report["engine"] == "vllm"
    assert report["tokens"] == 4 * 15  # every token but the first of each sequence
    assert report["reference"]["ppl"] > 1
    assert [candidate["name"] for candidate in report["candidates"]] == [*names, "scale-1.0"]
    for candidate in report["candidates"]:
        assert candidate.keys() >= PROMISED
        assert candidate["verdict"] in VERDICTS
    assert {row["site"] for row in report["layers"]} == {
        f"model.layers.{layer}.self_attn.{role}" for layer in (0, 1) for role in "kvqp"
    }
    keys = {"candidate", "site", "sqnr_db", "clipped", "flushed"}
    assert all(row.keys() >= keys for row in report["layers"])
    assert report["advice"]
    assert report["passed"] in {True, False}
    assert not any("used for calibration" in text for text in report["warnings"])


def test_tables_are_printed_for_people(command: Command, files: Path) -> None:
    rules = ("--rules", "amax,mse,percentile:99,headroom:2", "--all")
    out = succeed(*command, "--scales", files, *rules).out
    for words in ("scale-1.0", "tensors of lowest SQNR", "the smallest KLD first"):
        assert words in out


@pytest.mark.parametrize(
    ("scheme", "weights", "inputs"),
    [
        ("fp8-static", "tensor", "tensor"),
        ("fp8-dynamic", "channel", "token"),
        ("w8a16", "channel", None),
        ("fp8-block", "block", "group"),
    ],
)
def test_a_scheme_quantizes_weights_and_the_report_tells_what_shares_a_scale(
    command: Command, files: Path, scheme: str, weights: str, inputs: str | None
) -> None:
    report = succeed(*command, "--scales", files, "--scheme", scheme, "--json").json
    assert report["candidates"][0]["gate"] == "w8a8"
    ignored = "its KV scales are ignored: a scheme quantizes weights and inputs"
    assert any(ignored in text for text in report["warnings"])
    rows = [row for row in report["layers"] if row["candidate"] != "scale-1.0"]
    assert sum(row["role"] == "weight" for row in rows) == 2 * 7
    assert {row["scale_per"] for row in rows if row["role"] == "weight"} == {weights}
    assert {row["scale_per"] for row in rows if row["role"] == "input"} == {inputs} - {None}
    for row in rows:
        is_dynamic = row["role"] == "input" and inputs != "tensor"
        assert (row["scale"] is None) == is_dynamic
        if row["scale_per"] == "channel":
            assert 0 < row["smallest_scale"] < row["scale"]
        elif row["scale_per"] == "tensor":
            assert row["smallest_scale"] is None
        if (row["role"], row["scale_per"]) == ("weight", "tensor"):
            assert row["amax"] <= row["scale"] * 448 * (1 + 1e-6)


def test_text_that_was_calibrated_on_is_told(model: Path, data: Path, files: Path) -> None:
    scales = [part for name in FILES for part in ("--scales", files / name)]
    outcome = succeed("verify", model, "--data", data, *QUICK, *scales, "--json")
    told = [text for text in outcome.json["warnings"] if "for calibration" in text]
    for name, text in zip(FILES, told, strict=True):
        said = f"{files / name}: this text was used for calibration, so its figures may be"
        assert text.startswith(said)
        assert said in outcome.err


@pytest.fixture(scope="module")
def falcon(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("falcon")
    zoo.save("falcon", folder / "model")
    save_tokenizer(folder / "model")
    recipe = ("--data", data, *QUICK, "--recipe", "w8a8-static", "--no-check")
    succeed("calibrate", folder / "model", *recipe, "--out", folder / "measured")
    return folder


@pytest.mark.parametrize("form", ["autofp8", "modelopt", "compressed-tensors"])
def test_a_cache_that_stays_in_16_bits_is_not_emulated(
    data: Path, falcon: Path, tmp_path: Path, form: str
) -> None:
    """As `check` says; compressed-tensors alone turns the FP8 cache of falcon on in vLLM."""
    model, out = falcon / "model", tmp_path / "out"
    scheme = ("--scheme", "fp8-static", "--format", form, "--out", out)
    succeed("quantize", model, *scheme, "--stats", falcon / "measured" / "stats.safetensors")

    checked = run("check", out, "--engine", "vllm", "--json").json["engines"]["vllm"]
    report = succeed("verify", model, "--data", data, *QUICK, "--scales", out, "--json").json

    is_used = form == "compressed-tensors"
    assert checked["layers"][0]["k"]["status"] == ("used" if is_used else "dropped")
    names = {item["name"]: item for item in report["candidates"]}
    assert ("KV cache" in names[str(out)]["description"]) is is_used
    told = [text for text in report["warnings"] if "in 16 bits whatever" in text]
    assert len(told) == (0 if is_used else 1)


@pytest.mark.parametrize("option", ["--dump", "--report"])
def test_force_replaces_only_what_verify_writes(
    command: Command, model: Path, tmp_path: Path, option: str
) -> None:
    path = tmp_path / "precious"
    for content in (b"precious", (model / "model.safetensors").read_bytes(), b"<!DOCTYPE html>"):
        path.write_bytes(content)
        assert f"{path}: not written by verify" in fail(2, *command, option, path, "--force")
        assert path.read_bytes() == content
    path.write_bytes(b"")  # as mktemp makes it
    succeed(*command, option, path, "--force")
    assert path.stat().st_size


@pytest.mark.parametrize(
    "failing", ["commands.verify_run.save_tensors", "verification.page.page.write_page"]
)
def test_an_output_that_cannot_be_written_hides_no_result(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def refuse_to(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"fp8calib.{failing}", refuse_to)
    outputs = ("--dump", tmp_path / "d.safetensors", "--report", tmp_path / "r.html")
    outcome = run(*command, *outputs)
    assert outcome.code != 0
    assert set(snapshot(tmp_path)) <= {"d.safetensors"}  # which is written first
    assert "This model does not need KV scales." in outcome.out  # it is shown all the same


# --- gates -------------------------------------------------------------------------------------


def test_a_gate_decides_the_exit_code_and_the_report_is_printed(
    command: Command, files: Path, tmp_path: Path, gate: Callable[..., Path]
) -> None:
    """One of the scales is 64 times too small."""
    broken = Path(shutil.copy(files / "kv_scales.safetensors", tmp_path))
    name = "model.layers.1.self_attn.v_scale"
    change_tensors(tmp_path, {name: load_file(broken)[name] / 64}, broken.name)
    strict = gate(pass_at=1.5, fail_above=2.0, kld_fail_above=1e-3)
    outcome = run(*command, "--json", "--gate", strict, "--scales", broken)
    assert outcome.code == 8
    assert f"exit code 8: the gate fails: {broken}" in outcome.err.replace("\n", " ")
    assert outcome.json["candidates"][0]["verdict"] == "fail"
    assert outcome.json["passed"] is False
    loose = gate(pass_at=5, fail_above=10)
    assert succeed(*command, "--scales", files, "--gate", loose, "--json").json["passed"] is True


@pytest.mark.parametrize(("strict", "code"), [((), 0), (("--strict",), 8)])
def test_a_warning_fails_with_strict_alone(
    command: Command, gate: Callable[..., Path], strict: tuple[str, ...], code: int
) -> None:
    """On eight sequences, as many as a gate asks for."""
    options = ("--samples", 8, "--seq-len", 8, "--fp8-dtype", "e5m2")
    found = run(*command, *options, "--gate", gate(pass_at=1, fail_above=5), *strict, "--json")
    assert found.json["candidates"][0]["verdict"] == "warn"
    assert found.code == code
    assert found.json["passed"] is (code == 0)


def shrink_query(layer: Any) -> None:
    """Make q underflow at scale 1.0, and k as much larger."""
    layer.self_attn.q_proj.weight *= 2.0**-16
    layer.self_attn.k_proj.weight *= 2.0**16


def test_scales_that_fail_for_want_of_a_q_scale_are_not_recommended(
    model: Path, data: Path, held_out: Path, tmp_path: Path, gate: Callable[..., Path]
) -> None:
    """The command that is printed last fixes it."""
    odd, out = tmp_path / "odd", tmp_path / "out"
    save_changed(model, odd, lambda llama: list(map(shrink_query, llama.model.layers)))
    succeed("calibrate", odd, "--data", data, *QUICK, "--query-scale", "no", "--out", out)
    given = ("--data", held_out, *QUICK, "--json")
    strict = gate(pass_at=5.0, fail_above=10.0, kld_fail_above=1e-6)
    command = ("verify", odd, *given, "--gate", strict, "--scales")

    failed = run(*command, out / "kv-overlay")

    assert failed.code == 8
    assert ": use " not in failed.json["advice"]
    assert "has no scale for q of layers 0, 1" in failed.json["advice"]
    for advised in (failed, run(*command, out)):
        words = advised.json["next"].split()
        assert words[:3] == ["fp8calib", "export", str(out / "stats.safetensors")]
        succeed(*words[1:])
        written = load_file(next(Path(words[-1]).rglob("model-00002-of-00002.safetensors")))
        assert [name for name in written if name.endswith("q_scale")]
    (out / "stats.safetensors").unlink()
    alone = run(*command, out / "kv-overlay").json["next"]
    assert alone == f"fp8calib calibrate {odd} --query-scale yes"


def test_a_query_scale_is_exported_onto_the_revision_that_was_verified(tmp_path: Path) -> None:
    save_stats(make_stats(make_geometry([]), {}), tmp_path / "stats.safetensors")
    request = VerifyRequest("org/model", revision="v2", trust_remote_code=True)
    decision = SimpleNamespace(remedy="scale-query", candidate=str(tmp_path))
    report: Any = SimpleNamespace(model="org/model", decision=decision)
    printed = suggest_command(report, request, {})
    assert "--model org/model --revision v2" in printed
    refused = run(*shlex.split(printed)[1:])
    assert "no such option" not in refused.err.lower()
    assert refused.code != 0  # there is no such model


# --- a candidate that is refused alone ---------------------------------------------------------


def test_a_damaged_candidate_is_refused_alone(
    command: Command, files: Path, tmp_path: Path
) -> None:
    damaged = Path(shutil.copy(files / "kv_scales.safetensors", tmp_path / "nan.safetensors"))
    name = "model.layers.1.self_attn.k_scale"
    change_tensors(tmp_path, {name: torch.tensor(math.nan)}, damaged.name)
    command = (*command, "--scales", damaged, "--scales", files)
    page = tmp_path / "page.html"
    found = run(*command, "--json", "--report", page)
    assert (found.code, found.json["passed"]) == (8, False)
    assert [each["name"] for each in found.json["candidates"]] == [str(files), "scale-1.0"]
    (refused,) = found.json["refused"]
    assert refused["name"] == str(damaged)
    assert f"{name}: nan is not a scale" in refused["why"]
    assert refused["hint"]
    shown = run(*command).out
    assert re.search(rf"{re.escape(damaged.name)} *.* refused", shown)
    assert "nan is not a scale" in shown
    assert refused["hint"] in shown
    assert f"exit code 8: refused: {damaged}" in shown.splitlines()[-3:]
    assert "nan is not a scale" in page.read_text()
    planned = run(*command, "--dry-run", "--json")
    assert planned.json["plan"]["candidates"] == [str(files), "scale-1.0"]
    assert "nan is not a scale" in planned.err


def test_a_candidate_whose_logits_are_nan_is_refused_alone(
    command: Command, places: Places, files: Path, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(places["fp8"], tmp_path / "fp8"))
    codes = load_file(out / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    codes.view(torch.uint8)[0, 0] = 0x7F
    change_tensors(out, {"model.layers.1.mlp.down_proj.weight": codes})
    command = (*command, "--json", "--scales", out)
    found = run(*command, "--scales", files)
    assert found.code == 8
    assert [each["name"] for each in found.json["candidates"]] == [str(files), "scale-1.0"]
    assert [each["name"] for each in found.json["refused"]] == [str(out)]
    assert "NaN" in found.json["refused"][0]["why"]
    assert run(*command).code in {4, 8}


@pytest.mark.parametrize("kind", ["kv_scales.safetensors", "kv-overlay"])
def test_a_layer_without_scales_is_emulated_at_one_as_the_engine_serves_it(
    command: Command, files: Path, tmp_path: Path, kind: str
) -> None:
    bad = tmp_path / kind
    names = [f"model.layers.1.self_attn.{role}_scale" for role in "kv"]
    if kind == "kv-overlay":
        shutil.copytree(files / kind, bad)
        path = next(path for path in bad.glob("*.safetensors") if names[0] in load_file(path))
        index = bad / "model.safetensors.index.json"
        change_json(index, lambda listed: [listed["weight_map"].pop(name) for name in names])
    else:
        path = Path(shutil.copy(files / kind, bad))
    change_tensors(path.parent, dict.fromkeys(names), path.name)
    found = succeed(*command, "--json", "--scales", bad).json
    mine = [row for row in found["layers"] if row["candidate"] == str(bad)]
    scales = {row["site"]: row["scale"] for row in mine}
    assert [scales[f"model.layers.1.self_attn.{role}"] for role in "kv"] == [1.0, 1.0]
    assert 1.0 not in [scales[f"model.layers.0.self_attn.{role}"] for role in "kv"]
    (candidate, _) = found["candidates"]
    told = "; the file has no scale for layer 1: 1.0, as engines serve it"
    assert told in candidate["description"]
    assert any("no scale for layer 1" in text for text in found["warnings"])
    assert not any("does not use its KV scales" in text for text in found["warnings"])


# --- what engines may not load -----------------------------------------------------------------


def test_a_model_that_the_engine_may_not_load_is_a_warning(
    model: Path, held_out: Path, tmp_path: Path
) -> None:
    """Its config has one layer, and only vLLM's own loader tells what it does with the other."""
    folder = Path(shutil.copytree(model, tmp_path / "m"))
    for layers, is_known in ((2, True), (1, False)):
        change_config(folder, num_hidden_layers=layers)
        found = succeed("verify", folder, "--data", held_out, *QUICK, "--json").json
        told = [text for text in found["warnings"] if text.startswith("the unquantized model: ")]
        assert len(told) == (not is_known)
        assert all("whether vLLM 0.33.0 loads it is unknown (weights: " in text for text in told)


@pytest.mark.parametrize(
    ("engine", "scheme", "form", "is_loaded"),
    [
        ("sglang", "fp8-dynamic", "modelopt", False),
        ("sglang", "fp8-block", "compressed-tensors", True),
        ("vllm", "fp8-block", "compressed-tensors", True),
    ],
)
def test_a_checkpoint_that_the_engine_cannot_load_is_a_warning_and_fails_a_gate(
    tmp_path: Path,
    held_out: Path,
    gate: Callable[..., Path],
    engine: str,
    scheme: str,
    form: str,
    is_loaded: bool,
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2}
    zoo.save("llama", tmp_path / "m", **sizes, num_key_value_heads=2, head_dim=64)
    save_tokenizer(tmp_path / "m")
    out = tmp_path / "q"
    succeed("quantize", tmp_path / "m", "--scheme", scheme, "--format", form, "--out", out)
    command = ("verify", tmp_path / "m", "--data", held_out, *QUICK, "--scales", out)
    gated = run(*command, "--engine", engine, "--gate", gate(pass_at=1.5, fail_above=2), "--json")
    told = [text for text in gated.json["warnings"] if "cannot load it" in text]
    assert bool(told) is not is_loaded
    assert all(text.startswith(f"{out}: SGLang ") for text in told)
    rounding = "; vllm rounds the scales of blocks and groups up to powers of two"
    described = gated.json["candidates"][0]["description"]
    assert described.endswith(rounding) is (engine == "vllm")
    assert (gated.code, "the engine cannot use it" in gated.err + gated.out) == (
        (0, False) if is_loaded else (8, True)
    )
