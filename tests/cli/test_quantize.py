"""`quantize`: the command, its words and its exit codes."""

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel

from fp8calib.commands import check_planned
from tests import zoo
from tests.cli.conftest import write_rows
from tests.cli.program import Outcome, fail, run, snapshot, succeed
from tests.kit.checked import list_commands, list_verdicts
from tests.kit.checkpoints import change_tensors
from tests.plugins.gptq.test_checkpoints import command


@pytest.fixture
def stats(calibrated: tuple[Path, Outcome]) -> Path:
    return calibrated[0] / "stats.safetensors"


@pytest.mark.parametrize(
    ("damage", "message", "blocked"),
    [
        ("no weight", "the checkpoint is incomplete: it lacks {}, ", {"vLLM", "SGLang"}),
        ("half a weight", "{} is [16, 32] in the checkpoint and [32, 32] by its config", set()),
    ],
)
def test_a_damaged_weight_is_refused_or_told(
    model: Path, tmp_path: Path, damage: str, message: str, blocked: set[str]
) -> None:
    """Where the shape differs, only the engines' own loaders can tell what becomes of it."""
    name = "model.layers.1.self_attn.q_proj.weight"
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(model, source)
    change_tensors(source, {name: None if damage == "no weight" else torch.ones(16, 32)})
    command = ("quantize", source, "--scheme", "fp8-dynamic", "--out", out)
    assert fail(4, *command).startswith(f"{source}: {message.format(name)}")
    assert not out.exists()

    report = succeed(*command, "--allow-unservable", "--json").json

    verdicts = list_verdicts(report)
    assert {name for name, text in verdicts.items() if text.startswith("not ok: ")} == blocked
    unsure = {name for name, text in verdicts.items() if text.startswith("unknown: weights: ")}
    assert unsure == {"vLLM", "SGLang"} - blocked
    assert list_commands(report) == {}


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_models_without_a_kv_cache_of_a_decoder_get_no_command(tmp_path: Path, family: str) -> None:
    config = AutoConfig.for_model(
        family,
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        attention_hidden_size=32,
        **({"d_model": 32, "d_kv": 8, "d_ff": 48} if family == "t5" else {}),
    )
    AutoModel.from_config(config).save_pretrained(tmp_path / "model")
    command = ("quantize", tmp_path / "model", "--scheme", "fp8-dynamic", "--out", tmp_path / "out")
    outcome = succeed(*command, "--json")
    assert outcome.err.startswith("warning: whether an engine can load the output is not checked: ")
    report = outcome.json
    assert report["quantized"]
    why = run("check", tmp_path / "out", "--json").json["error"]["message"]
    assert set(list_verdicts(report).values()) == {f"unknown: {why}"}


def test_what_statistics_gave_names_its_model_and_text(
    model: Path, data: Path, stats: Path, tmp_path: Path
) -> None:
    """So that another model's is refused, and a verification on the same text is told."""
    command = ("quantize", model, "--scheme", "fp8-static", "--stats", stats)
    succeed(*command, "--out", tmp_path / "out")
    (recorded,) = read_measurements(tmp_path / "out")
    with safe_open(stats, framework="pt") as file:
        header = json.loads(file.metadata()["fp8calib"])["header"]
    assert recorded == {
        "model": header["model_fingerprint"],
        "data": header["data_fingerprint"],
        "text_start": header["text_start"],
    }
    quick = ("--data", data, "--samples", 4, "--seq-len", 16, "--dtype", "float32")
    outcome = succeed("verify", model, *quick, "--scales", tmp_path / "out")
    assert "this text was used for calibration" in outcome.err
    zoo.save("llama", tmp_path / "other", seed=3)
    message = fail(4, "verify", tmp_path / "other", *quick, "--scales", tmp_path / "out")
    assert "of another model: different weights (" in message


def read_measurements(folder: Path) -> list[dict[str, str]]:
    """Read what every safetensors file says of its model and text."""
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            text = file.metadata().get("fp8calib.measured_on")
        found += [] if text is None else [json.loads(text)]
    return found


def test_a_finished_output_is_left_alone_by_resume(model: Path, tmp_path: Path) -> None:
    command = ("quantize", model, "--scheme", "w8a16", "--out", tmp_path / "out")
    first = succeed(*command, "--json").json
    before = snapshot(tmp_path)
    again = succeed(*command, "--resume", "--json")
    assert "finished already" in again.err
    assert again.json["files"] == first["files"]
    assert snapshot(tmp_path) == before
    assert "not empty" in fail(2, *command)
    dynamic = ("--scheme", "fp8-dynamic", "--out", tmp_path / "out")
    assert "not empty" in fail(2, "quantize", model, *dynamic, "--resume")
    # other patterns give tensors of the same shapes
    succeed("quantize", model, *dynamic, "--layer-scheme", "*.o_proj=w8a16", "--force")
    other = (*dynamic, "--layer-scheme", "*.down_proj=w8a16", "--resume")
    assert "not empty" in fail(2, "quantize", model, *other)


CALIBRATE = ("--samples", 4, "--seq-len", 16, "--dtype", "float32", "--recipe", "w8a8-static")


def test_calibrate_adds_the_checkpoint_that_quantize_writes(
    model: Path, data: Path, tmp_path: Path
) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    command = ("calibrate", model, "--data", data, *CALIBRATE, "--out", out)
    report = succeed(*command, "--json").json
    scheme = ("--scheme", "fp8-static", "--stats", out / "stats.safetensors")
    succeed("quantize", model, *scheme, "--out", again)
    direct, separate = snapshot(out / "fp8-static"), snapshot(again)
    assert direct == separate
    files = {name.partition("/")[2] for name in report["files"] if name.startswith("fp8-static/")}
    assert files == set(direct)
    served = list_commands(report, "fp8-static")
    assert served["vLLM"] == f"vllm serve {out / 'fp8-static'} --kv-cache-dtype fp8"
    assert report["quantize"]["has_kv_scales"] is True
    (out / "fp8-static" / "precious.txt").write_text("mine")
    assert "precious.txt" in fail(2, *command, "--force")


def test_calibrate_keeps_what_it_measured_where_the_checkpoint_fails(
    model: Path, data: Path, tmp_path: Path
) -> None:
    """Hours of statistics are worth more than an error about the last step; the code is 7."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "name: mine\nobserve: {ignore: ['*.layers.0.mlp*']}\nquantize: {scheme: fp8-static}\n"
    )
    options = ("--data", data, "--samples", 4, "--seq-len", 16, "--dtype", "float32")
    command = ("calibrate", model, *options, "--recipe", recipe, "--out", tmp_path / "out")

    outcome = run(*command, "--json")

    assert outcome.code == 7
    assert any("fp8-static is not written" in text for text in outcome.json["warnings"])
    last = [line for line in outcome.err.splitlines() if ": fp8-static is not written" in line]
    assert [line.partition(":")[0] for line in last] == ["error"]
    assert not (tmp_path / "out" / "fp8-static").exists()
    assert (tmp_path / "out" / "stats.safetensors").is_file()


def test_calibrate_leaves_what_it_does_not_measure_and_says_so(tmp_path: Path) -> None:
    """Gemma 3n has linears outside its layers."""
    zoo.save("gemma3n_text", tmp_path / "model")
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [*range(3, 40)]}] * 4)
    command = ("calibrate", tmp_path / "model", "--data", rows, *CALIBRATE, "--format", "rfc")
    report = succeed(*command, "--out", tmp_path / "out", "--json").json
    told = [text for text in report["warnings"] if "inputs are not observed" in text]
    names = {text.split(": ")[1] for text in told}
    assert {"model.altup_projections", "model.per_layer_model_projection"} <= names
    options = [option for name in names for option in ("--ignore", name)]
    again = ("--scheme", "fp8-static", "--stats", tmp_path / "out" / "stats.safetensors")
    succeed("quantize", tmp_path / "model", *again, *options, "--out", tmp_path / "again")
    assert snapshot(tmp_path / "out" / "fp8-static") == snapshot(tmp_path / "again")
    plain = ("--scheme", "fp8-dynamic", "--out", tmp_path / "plain", "--json")
    size = succeed("quantize", tmp_path / "model", *plain).json["kv_bytes_per_token"]
    assert size == report["kv_bytes_per_token"]  # layers share caches


CHOICE = {"*.o_proj": "fp8-static", "*.layers.1.mlp": "w8a16", "*.down_proj": "fp8-block"}
OPTIONS = [part for pair in CHOICE.items() for part in ("--layer-scheme", "=".join(pair))]


def find_scheme(module: str) -> str:
    """Find the scheme of a linear of the llama by hand."""
    if module.endswith("o_proj"):
        return "fp8-static"
    if ".layers.1.mlp." in module:
        return "w8a16"
    return "fp8-block" if module.endswith("down_proj") else "fp8-dynamic"


def test_gptq_rounds_each_linear_as_a_run_of_its_scheme_does(tmp_path: Path) -> None:
    """A run does not change the model, so inputs and Hessians are the same in all runs."""
    model = tmp_path / "model"
    zoo.save("llama", model)
    report = succeed(*command(model, tmp_path, "fp8-dynamic", "mixed"), *OPTIONS, "--json").json
    schemes = ("fp8-static", "fp8-dynamic", "w8a16", "fp8-block")
    for scheme in schemes:
        succeed(*command(model, tmp_path, scheme, scheme))
    mixed = load_file(tmp_path / "mixed" / "model.safetensors")
    scales = [name for name in mixed if name.endswith(".weight_scale")]
    linears = [name.removesuffix(".weight_scale") for name in scales]
    assert len(linears) == 14
    for module in linears:
        single = load_file(tmp_path / find_scheme(module) / "model.safetensors")
        names = {name for name in single if name.startswith(f"{module}.")}
        assert names == {name for name in mixed if name.startswith(f"{module}.")}
        for name in names:
            assert torch.equal(mixed[name].float(), single[name].float()), name
    chosen = {find_scheme(e["module"]) for e in report["rounded"] if e["rounding"] == "gptq"}
    assert chosen == {*schemes}


def test_a_limit_on_files_is_an_error_of_the_output(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ulimit -f` holds for the outline too, which is written before a weight is read."""

    def fail_to_write(*_: object) -> None:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(check_planned, "write_outline", fail_to_write)
    said = fail(7, "quantize", model, "--scheme", "fp8-dynamic", "--out", tmp_path / "out")
    assert "cannot be written: File too large" in said
