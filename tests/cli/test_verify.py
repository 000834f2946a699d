"""`verify`: what it prints and writes, and what it refuses, each with one message."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8calib.calibration.calibration_stats import save_stats
from fp8calib.commands.suggest import suggest_command
from fp8calib.commands.verify import VerifyRequest
from fp8calib.verification.report import Remedy
from tests import zoo
from tests.cli.conftest import QUICK, save_changed, save_tokenizer, write_rows
from tests.cli.program import Outcome, fail, run, snapshot, succeed
from tests.formats.handmade import make_geometry, make_stats
from tests.kit.checkpoints import change_config, change_tensors

PROMISED = {
    "name",
    "ppl",
    "ppl_ratio",
    "ppl_ratio_se",
    "kld_mean",
    "kld_p99",
    "top1_agreement",
    "verdict",
}


FILES = (
    "stats.safetensors",
    "kv-overlay",
    "kv-overlay-head",
    "tgi",
    "kv_scales.safetensors",
    "kv_cache_scales.tp1.json",
    "rfc.tp2.json",
)
"""What a calibration writes, each a candidate of its own."""


@pytest.fixture(scope="session")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give 20 rows of 40 tokens that no calibration has seen."""
    rows = [{"text": " ".join(f"w{(i * j + 7 * j) % 90}" for j in range(1, 40))} for i in range(20)]
    return write_rows(tmp_path_factory.mktemp("data") / "verify.jsonl", rows)


@pytest.fixture(scope="session")
def verify(model: Path, held_out: Path) -> Any:
    """Give a function that verifies the tiny llama and returns what `--json` printed."""

    def verified(*options: object) -> Outcome:
        return succeed("verify", model, "--data", held_out, *QUICK, "--json", *options)

    return verified


@pytest.fixture(scope="session")
def refuse(model: Path, held_out: Path) -> Any:
    """Give a function that requires an exit code and gives the message."""

    def refused(code: int, *options: object) -> str:
        return fail(code, "verify", model, "--data", held_out, *QUICK, *options)

    return refused


@pytest.fixture(scope="session")
def files(calibrated: tuple[Path, Outcome]) -> Path:
    """Give the folder of one calibration in every format."""
    return calibrated[0]


# --- what is printed and written ---------------------------------------------------------------


def test_json_holds_the_promised_keys(verify: Any, files: Path) -> None:
    """Candidates are in the order of the command line."""
    names = [str(files / name) for name in ("kv-overlay", "stats.safetensors", "tgi")]
    report = verify(*(part for name in names for part in ("--scales", name))).json
    assert report["engine"] == "vllm"
    assert report["tokens"] == 4 * 15  # every token but the first of each sequence
    assert report["reference"]["ppl"] > 1
    assert [candidate["name"] for candidate in report["candidates"]] == [*names, "scale-1.0"]
    for candidate in report["candidates"]:
        assert candidate.keys() >= PROMISED
        assert candidate["verdict"] in {"pass", "warn", "fail", "no-difference", "cannot-tell"}
    assert {row["site"] for row in report["layers"]} == {
        f"model.layers.{layer}.self_attn.{role}" for layer in (0, 1) for role in "kvqp"
    }
    assert all(
        row.keys() >= {"candidate", "site", "sqnr_db", "clipped", "flushed"}
        for row in report["layers"]
    )
    assert report["advice"]
    assert report["passed"] in {True, False}
    assert report["schema_version"] == 1
    assert not any("used for calibration" in text for text in report["warnings"])


def test_dump_holds_the_log_probability_of_every_scored_token(
    verify: Any, files: Path, tmp_path: Path
) -> None:
    stats = str(files / "stats.safetensors")
    report = verify("--scales", stats, "--dump", tmp_path / "d.safetensors").json
    dumped = load_file(tmp_path / "d.safetensors")
    assert set(dumped) == {"reference", stats, "scale-1.0"}
    for name, logprobs in dumped.items():
        assert logprobs.shape == (60,)
        assert logprobs.dtype is torch.float32
        found = [c["ppl"] for c in report["candidates"] if c["name"] == name]
        expected = found[0] if found else report["reference"]["ppl"]
        assert math.exp(-logprobs.double().mean()) == pytest.approx(expected, rel=1e-6)


def test_tables_are_printed_for_people(model: Path, held_out: Path, files: Path) -> None:
    outcome = succeed(
        "verify",
        model,
        "--data",
        held_out,
        *QUICK,
        "--scales",
        files,
        "--rules",
        "amax,mse,percentile:99,headroom:2",
        "--all",
    )
    for words in (
        "scale-1.0",
        "tensors of lowest SQNR",
        "the smallest KLD first",
    ):
        assert words in outcome.out


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
    verify: Any, files: Path, scheme: str, weights: str, inputs: str | None
) -> None:
    report = verify("--scales", files, "--scheme", scheme).json
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


@pytest.mark.parametrize("form", ["autofp8", "modelopt", "compressed-tensors"])
def test_a_cache_that_stays_in_16_bits_is_not_emulated(
    data: Path, tmp_path: Path, form: str
) -> None:
    """As `check` says; compressed-tensors alone turns the FP8 cache of falcon on in vLLM."""
    model, out = tmp_path / "falcon", tmp_path / "out"
    zoo.save("falcon", model)
    save_tokenizer(model)
    measured = tmp_path / "measured"
    calibrate = ("calibrate", model, "--data", data, *QUICK, "--recipe", "w8a8-static")
    succeed(*calibrate, "--out", measured)
    quantize = ("quantize", model, "--scheme", "fp8-static", "--format", form, "--out", out)
    succeed(*quantize, "--stats", measured / "stats.safetensors")

    checked = run("check", out, "--engine", "vllm", "--json").json["engines"]["vllm"]
    report = succeed("verify", model, "--data", data, *QUICK, "--scales", out, "--json").json

    is_used = form == "compressed-tensors"
    assert checked["layers"][0]["k"]["status"] == ("used" if is_used else "dropped")
    names = {item["name"]: item for item in report["candidates"]}
    assert ("KV cache" in names[str(out)]["description"]) is is_used
    told = [text for text in report["warnings"] if "in 16 bits whatever" in text]
    assert len(told) == (0 if is_used else 1)


# --- gates -------------------------------------------------------------------------------------

EIGHT = ("--samples", 8, "--dtype", "float32")
"""As many sequences as a gate asks for."""


@pytest.fixture(scope="session")
def broken(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give scales of which one is 64 times too small."""
    path = tmp_path_factory.mktemp("broken") / "kv_scales.safetensors"
    scales = load_file(files / "kv_scales.safetensors")
    scales["model.layers.1.self_attn.v_scale"] /= 64
    save_file(scales, path)
    return path


def test_a_gate_decides_the_exit_code_and_the_report_is_printed(
    verify: Any, model: Path, held_out: Path, broken: Path, files: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate.yaml"
    gate.write_text("pass_at: 1.5\nfail_above: 2.0\nkld_fail_above: 1.0e-3\n")
    arguments = ("verify", model, "--data", held_out, *QUICK, "--json", "--gate", gate)
    outcome = run(*arguments, "--scales", broken)
    assert outcome.code == 8
    assert f"exit code 8: the gate fails: {broken}" in outcome.err.replace("\n", " ")
    assert outcome.json["candidates"][0]["verdict"] == "fail"
    assert outcome.json["passed"] is False
    loose = tmp_path / "loose.json"
    loose.write_text(json.dumps({"pass_at": 5, "fail_above": 10}))
    assert verify("--scales", files, "--gate", loose).json["passed"] is True


@pytest.mark.parametrize(("strict", "code"), [((), 0), (("--strict",), 8)])
def test_a_warning_fails_with_strict_alone(
    model: Path, held_out: Path, tmp_path: Path, strict: tuple[str, ...], code: int
) -> None:
    gate = tmp_path / "gate.yaml"
    gate.write_text("pass_at: 1.0\nfail_above: 5.0\n")
    command = ("verify", model, "--data", held_out, *EIGHT, "--fp8-dtype", "e5m2")
    found = run(*command, "--seq-len", 8, "--json", "--gate", gate, *strict)
    assert found.json["candidates"][0]["verdict"] == "warn"
    assert found.code == code
    assert found.json["passed"] is (code == 0)


def shrink_query(layer: Any) -> None:
    """Make q underflow at scale 1.0, and k as much larger."""
    layer.self_attn.q_proj.weight *= 2.0**-16
    layer.self_attn.k_proj.weight *= 2.0**16


def test_scales_that_fail_for_want_of_a_q_scale_are_not_recommended(
    model: Path, data: Path, held_out: Path, tmp_path: Path
) -> None:
    """The command that is printed last fixes it."""
    save_changed(model, tmp_path / "odd", lambda odd: list(map(shrink_query, odd.model.layers)))
    out = tmp_path / "out"
    given = ("--data", data, *QUICK, "--query-scale", "no")
    succeed("calibrate", tmp_path / "odd", *given, "--out", out)
    gate = tmp_path / "gate.yaml"
    gate.write_text("pass_at: 5.0\nfail_above: 10.0\nkld_fail_above: 1.0e-6\n")
    command = ("verify", tmp_path / "odd", "--data", held_out, *QUICK, "--gate", gate, "--scales")

    failed = run(*command, out / "kv-overlay", "--json")

    assert failed.code == 8
    assert ": use " not in failed.json["advice"]
    assert "has no scale for q of layers 0 and 1" in failed.json["advice"]
    for advised in (failed, run(*command, out, "--json")):
        stats = advised.json["next"].split()
        assert stats[:3] == ["fp8calib", "export", str(out / "stats.safetensors")]
        succeed(*stats[1:])
        written = load_file(next(Path(stats[-1]).rglob("model-00002-of-00002.safetensors")))
        assert sorted(name for name in written if name.endswith("q_scale"))
    (out / "stats.safetensors").unlink()
    alone = run(*command, out / "kv-overlay", "--json").json["next"]
    assert alone == f"fp8calib calibrate {tmp_path / 'odd'} --query-scale yes"


@pytest.mark.parametrize("option", ["--dump", "--report"])
def test_force_replaces_only_what_verify_writes(
    refuse: Any, verify: Any, model: Path, tmp_path: Path, option: str
) -> None:
    path = tmp_path / "precious"
    for content in (b"precious", (model / "model.safetensors").read_bytes(), b"<!DOCTYPE html>"):
        path.write_bytes(content)
        message = refuse(2, option, path, "--force")
        assert f"{path}: not written by verify" in message
        assert path.read_bytes() == content
    path.write_bytes(b"")  # as mktemp makes it
    verify(option, path, "--force")
    assert path.stat().st_size


# --- a candidate that is refused alone ---------------------------------------------------------


def damage(source: Path, target: Path, name: str, value: float | None) -> Path:
    """Copy a file of scales; put `value` in the place of one, or leave it out."""
    scales = load_file(source)
    if value is None:
        del scales[name]
    else:
        scales[name] = torch.tensor(value)
    save_file(scales, target)
    return target


@pytest.fixture
def nan_scale(files: Path, tmp_path: Path) -> Path:
    source = files / "kv_scales.safetensors"
    return damage(
        source, tmp_path / "nan.safetensors", "model.layers.1.self_attn.k_scale", math.nan
    )


def test_a_damaged_candidate_is_refused_alone(
    model: Path, held_out: Path, files: Path, nan_scale: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    command = (
        "verify",
        model,
        "--data",
        held_out,
        *QUICK,
        "--scales",
        nan_scale,
        "--scales",
        files,
    )
    found = run(*command, "--json", "--report", page)
    assert (found.code, found.json["passed"]) == (8, False)
    assert [each["name"] for each in found.json["candidates"]] == [str(files), "scale-1.0"]
    (refused,) = found.json["refused"]
    assert refused["name"] == str(nan_scale)
    assert "model.layers.1.self_attn.k_scale: nan is not a scale" in refused["why"]
    assert refused["hint"]
    shown = run(*command).out
    assert re.search(rf"{re.escape(nan_scale.name)} *.* refused", shown)
    assert "nan is not a scale" in shown
    assert refused["hint"] in shown
    assert f"exit code 8: refused: {nan_scale}" in shown.splitlines()[-3:]
    assert "nan is not a scale" in page.read_text()
    planned = run(*command, "--dry-run", "--json")
    assert planned.json["plan"]["candidates"] == [str(files), "scale-1.0"]
    assert "nan is not a scale" in planned.err


def test_a_candidate_whose_logits_are_nan_is_refused_alone(
    model: Path, held_out: Path, files: Path, tmp_path: Path
) -> None:
    out = tmp_path / "fp8"
    succeed("quantize", model, "--scheme", "fp8-dynamic", "--out", out)
    stored = next(path for path in out.glob("*.safetensors") if "scale" in str(load_file(path)))
    weights = load_file(stored)
    name = next(name for name in weights if name.endswith("layers.1.mlp.down_proj.weight"))
    weights[name].view(torch.uint8)[0, 0] = 0x7F
    save_file(weights, stored, metadata={"format": "pt"})
    command = ("verify", model, "--data", held_out, *QUICK, "--json", "--scales", out)
    found = run(*command, "--scales", files)
    assert found.code == 8
    assert [each["name"] for each in found.json["candidates"]] == [str(files), "scale-1.0"]
    assert [each["name"] for each in found.json["refused"]] == [str(out)]
    assert "NaN" in found.json["refused"][0]["why"]
    assert run(*command).code in {4, 8}


@pytest.mark.parametrize("kind", ["kv_scales.safetensors", "kv-overlay"])
def test_a_layer_without_scales_is_emulated_at_one_as_the_engine_serves_it(
    model: Path, held_out: Path, files: Path, tmp_path: Path, kind: str
) -> None:
    source, bad = files / kind, tmp_path / "bad"
    names = [f"model.layers.1.self_attn.{role}_scale" for role in "kv"]
    if source.is_dir():
        shutil.copytree(source, bad)
        path = next(path for path in bad.glob("*.safetensors") if names[0] in load_file(path))
        change_tensors(bad, dict.fromkeys(names), path.name)
        index = bad / "model.safetensors.index.json"
        listed = json.loads(index.read_text())
        listed["weight_map"] = {k: v for k, v in listed["weight_map"].items() if k not in names}
        index.write_text(json.dumps(listed))
    else:
        bad = tmp_path / source.name
        damage(damage(source, bad, names[0], None), bad, names[1], None)
    command = ("verify", model, "--data", held_out, *QUICK, "--json", "--scales", bad)
    found = run(*command)
    assert found.code == 0
    mine = [row for row in found.json["layers"] if row["candidate"] == str(bad)]
    scales = {row["site"]: row["scale"] for row in mine}
    assert [scales[f"model.layers.1.self_attn.{role}"] for role in "kv"] == [1.0, 1.0]
    assert 1.0 not in [scales[f"model.layers.0.self_attn.{role}"] for role in "kv"]
    (candidate, _) = found.json["candidates"]
    assert (
        "; the file has no scale for layer 1: 1.0, as engines serve it" in candidate["description"]
    )
    assert any("no scale for layer 1" in text for text in found.json["warnings"])
    assert not any("does not use its KV scales" in text for text in found.json["warnings"])


# --- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--dump", "--report"])
def test_no_output_replaces_what_is_read(
    refuse: Any, model: Path, held_out: Path, files: Path, option: str
) -> None:
    for path in (model / "model.safetensors", held_out, files / "stats.safetensors"):
        before = path.read_bytes()
        assert str(path) in refuse(2, "--scales", files / "stats.safetensors", option, path)
        assert path.read_bytes() == before


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
    tmp_path: Path, held_out: Path, engine: str, scheme: str, form: str, is_loaded: bool
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2}
    zoo.save("llama", tmp_path / "m", **sizes, num_key_value_heads=2, head_dim=64)
    save_tokenizer(tmp_path / "m")
    out = tmp_path / "q"
    succeed("quantize", tmp_path / "m", "--scheme", scheme, "--format", form, "--out", out)
    command = ("verify", tmp_path / "m", "--data", held_out, *QUICK, "--scales", out)
    report = succeed(*command, "--engine", engine, "--json").json
    told = [text for text in report["warnings"] if "cannot load it" in text]
    assert bool(told) is not is_loaded
    assert all(text.startswith(f"{out}: SGLang ") for text in told)
    rounding = "; vllm rounds the scales of blocks and groups up to powers of two"
    assert report["candidates"][0]["description"].endswith(rounding) is (engine == "vllm")
    gate = tmp_path / "gate.yaml"
    gate.write_text("pass_at: 1.5\nfail_above: 2.0\n")
    gated = run(*command, "--engine", engine, "--gate", gate)
    assert (gated.code, "the engine cannot use it" in gated.err + gated.out) == (
        (0, False) if is_loaded else (8, True)
    )


# --- the command after it ------------------------------------------------------------------------


def test_a_query_scale_is_exported_onto_the_revision_that_was_verified(tmp_path: Path) -> None:
    save_stats(make_stats(make_geometry([]), {}), tmp_path / "stats.safetensors")
    request = VerifyRequest("org/model", revision="v2", trust_remote_code=True)
    decision = SimpleNamespace(remedy=Remedy.SCALE_QUERY, candidate=str(tmp_path))
    report: Any = SimpleNamespace(model="org/model", decision=decision)
    printed = suggest_command(report, request, {})
    assert "--model org/model --revision v2" in printed
    refused = run(*shlex.split(printed)[1:])
    assert "no such option" not in refused.err.lower()
    assert refused.code != 0  # there is no such model


@pytest.mark.parametrize(
    "failing", ["commands.verify_run.save_tensors", "verification.page.page.write_page"]
)
def test_an_output_that_cannot_be_written_hides_no_result(
    model: Path, held_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def refuse_to(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"fp8calib.{failing}", refuse_to)
    outputs = ("--dump", tmp_path / "d.safetensors", "--report", tmp_path / "r.html")
    outcome = run("verify", model, "--data", held_out, *QUICK, *outputs)
    assert outcome.code != 0
    assert set(snapshot(tmp_path)) <= {"d.safetensors"}  # which is written first
    assert (
        "This model does not need KV scales." in outcome.out
    )  # what was found is shown all the same
