"""`calibrate`: what it writes, what it prints, and what every option changes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fp8calib.calibration.calibration_stats import RunStats, SiteStats, load_stats_file
from fp8calib.checkpoint import checkpoint
from fp8calib.commands.options import recipe_files
from fp8calib.commands.result import Saturation
from fp8calib.model.geometry import Role, Site
from tests import zoo
from tests.cli.conftest import QUICK, save_changed, write_rows
from tests.cli.program import Outcome, fail, run, succeed
from tests.formats.handmade import make_geometry, make_stats
from tests.kit.checked import list_commands
from tests.kit.checkpoints import change_config, change_tensors


@pytest.fixture(scope="session")
def calibrate(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Give a function that calibrates into a new folder: (folder, what `--json` printed)."""

    def into_new_folder(*options: object) -> tuple[Path, dict[str, Any]]:
        out = tmp_path_factory.mktemp("run") / "out"
        arguments = ("calibrate", model, "--data", data, *QUICK, *options)
        return out, succeed(*arguments, "--out", out, "--json").json

    return into_new_folder


def stats_of(out: Path) -> RunStats:
    return load_stats_file(out / "stats.safetensors")


# --- what is printed and written ---------------------------------------------------------------


def test_tensors_of_another_class_are_warned_of(tmp_path: Path) -> None:
    """A Qwen3 that calls itself a Llama runs without the norms of q and k."""
    model = tmp_path / "model"
    zoo.save("qwen3", model)
    change_config(model, model_type="llama", architectures=["LlamaForCausalLM"])
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [*range(3, 19)]}] * 4)
    found = succeed("calibrate", model, "--data", rows, *QUICK, "--out", tmp_path / "out")
    assert "warning: " in found.err
    told = "not parameters of the model, so not loaded: model.layers.*.self_attn.k_norm"
    assert told in found.err.partition("computing in")[0]  # before hours of passes
    assert found.err.count(told) == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_float16_cannot_hold_is_warned_of_if_the_model_is_served_in_it(
    tmp_path: Path, dtype: str
) -> None:
    model, name = tmp_path / "model", "model.layers.1.mlp.up_proj.weight"
    zoo.save("llama", model)
    change_tensors(model, lambda tensors: {**tensors, name: tensors[name] * 1e6})
    change_config(model, dtype=dtype)
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [*range(3, 19)]}] * 4)
    found = succeed("calibrate", model, "--data", rows, *QUICK, "--out", tmp_path / "out")
    told = "warning: model.layers.1.mlp.down_proj.input reaches "
    assert (told in found.err) is (dtype == "float16")


def test_the_report_is_what_json_prints_and_lists_every_file(
    calibrated: tuple[Path, Outcome],
) -> None:
    out, outcome = calibrated
    report = json.loads((out / "report.json").read_text())
    assert report == outcome.json
    assert report["out"] == str(out)
    assert (report["tokens"], report["sequences"]) == (64, 4)
    assert (report["dtype"], report["device"]) == ("float32", "cpu")
    assert report["duration_s"] > 0
    # k, v, q of two layers; 7 linears in each with input and weight
    assert report["coverage"]["observed"] == 2 * (3 + 7 * 2)
    assert report["coverage"]["skipped"] == [
        {"site": "lm_head", "why": "calibration needs no logits"}
    ]
    assert len(report["saturation"]["median_share"]) == 3
    assert all(0 < share <= 1 for share in report["saturation"]["least_share"])
    assert report["saturation"]["slowest_site"].startswith("model.layers.")
    found = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert set(report["files"]) == found
    json_files = [f"{name}.tp{tp}.json" for name in ("kv_cache_scales", "rfc") for tp in (1, 2)]
    assert {name.split("/")[0] for name in found} == {
        *("stats.safetensors", "report.json", "kv_scales.safetensors", *json_files),
        *("kv-overlay", "kv-overlay-head", "tgi"),
    }
    # 2 layers x (k and v) x 2 heads x 8 elements, in the checkpoint's fp32 and in one byte
    assert report["kv_bytes_per_token"] == {"before": 256, "after": 64}
    assert set(list_commands(report, "kv-overlay")) == {"vLLM", "SGLang"}
    assert set(list_commands(report, "kv-overlay-head")) == {"vLLM"}
    assert {each["path"] for each in report["checked"]} == {"kv-overlay", "kv-overlay-head"}


# --- options -----------------------------------------------------------------------------------


def test_a_dry_run_writes_nothing_and_shows_the_plan(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "fp8calib.calibration.job.load_model", lambda *_, **__: pytest.fail("loaded")
    )
    arguments = ("calibrate", model, "--data", data, *QUICK, "--tp", 2, "--format", "rfc")
    plan = succeed(*arguments, "--dry-run", "--json").json["plan"]
    assert (plan["tokens"], plan["sequences"], plan["layers"]) == (64, 4, 2)
    assert plan["out"] == "tiny-llama-fp8calib"
    assert plan["writes"] == ["report.json", "rfc.tp2.json", "stats.safetensors"]
    assert "nothing was run or written" in succeed(*arguments, "--dry-run").out
    assert list(tmp_path.iterdir()) == []
    (tmp_path / plan["out"]).mkdir()
    (tmp_path / plan["out"] / "thesis.tex").touch()
    assert "would be refused: tiny-llama-fp8calib" in succeed(*arguments, "--dry-run").err


def test_the_config_of_a_model_is_read_once(
    model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    load = checkpoint.load_json_object
    monkeypatch.setattr(
        checkpoint, "load_json_object", lambda path: read.append(path) or load(path)
    )
    succeed("calibrate", model, "--data", data, *QUICK, "--dry-run")
    assert read == [model / "config.json"]


@pytest.mark.parametrize("name", sorted(set(recipe_files()) - {"w8a16"}))
def test_every_shipped_recipe_runs(calibrate: Any, name: str) -> None:
    out, report = calibrate("--recipe", name)
    stats = stats_of(out)
    assert stats.header.recipe_name == name
    assert (out / "kv-overlay" / "config.json").is_file()
    assert (out / "rfc.tp1.json").is_file() == (name == "w8a8-static")
    assert any(site.role is Role.INPUT for site in stats.sites) == (name != "w8a8-dynamic")
    scheme = {"w8a8-static": "fp8-static", "w8a8-dynamic": "fp8-dynamic"}.get(name, "none")
    assert (out / scheme / "config.json").is_file() == (name != "kv")
    assert report["coverage"]["observed"] == len(stats.sites)


def test_w8a16_runs_no_data_writes_no_scales_and_needs_no_tokenizer(tmp_path: Path) -> None:
    zoo.save("llama", tmp_path / "bare")
    out = tmp_path / "out"
    outcome = succeed("calibrate", tmp_path / "bare", "--recipe", "w8a16", "--out", out, "--json")
    report = outcome.json
    assert "no effect" not in outcome.err
    names = ("README.md", "config.json", "generation_config.json", "model.safetensors")
    assert report["files"] == [
        *("report.json", "stats.safetensors"),
        *(f"w8a16/{name}" for name in names),
    ]
    assert (report["tokens"], report["sequences"]) == (0, 0)
    assert report["saturation"] is None
    assert {site.role for site in stats_of(out).sites} == {Role.WEIGHT}
    assert "no text is read" not in outcome.err
    asked = ("calibrate", tmp_path / "bare", "--recipe", "w8a16", "--out", out, "--force")
    assert "no text is read" in succeed(*asked, "--data", "builtin").err


def test_a_site_of_zeros_takes_a_fallback_unless_refused(
    model: Path, data: Path, tmp_path: Path
) -> None:
    def kill(dead: Any) -> None:
        dead.model.layers[0].self_attn.v_proj.weight.zero_()

    dead = save_changed(model, tmp_path / "dead", kill)
    command = ("calibrate", dead, "--data", data, *QUICK, "--format", "kv-scales")
    text = fail(7, *command, "--fallback", "refuse", "--out", tmp_path / "out")
    assert "model.layers.0.self_attn.v" in text
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["stats.safetensors"]
    assert str(tmp_path / "out" / "stats.safetensors") in text
    options = ("--fallback", "one", "--out", tmp_path / "out", "--force", "--json")
    outcome = succeed(*command, *options)
    written = load_file(tmp_path / "out" / "kv_scales.safetensors")
    assert written["model.layers.0.self_attn.v_scale"].item() == 1.0
    assert any("model.layers.0.self_attn.v" in text for text in outcome.json["warnings"])
    told = "model.layers.0.self_attn.v: only zeros were seen, so its scale is the fallback, 1"
    assert f"warning: {told}" in outcome.err.splitlines()


@pytest.mark.parametrize("factor", [10_000, 1e-4])
@pytest.mark.parametrize(
    ("options", "is_written", "note"),
    [
        (("--format", "kv-scales"), True, ": q_scale is written to kv-scales"),
        (("--format", "kv-scales", "--query-scale", "no"), False, ": use --query-scale yes"),
        (("--format", "kv-scales", "--query-scale", "yes"), True, ""),
        (
            ("--format", "vllm-json"),
            False,
            ", and no format that stores q_scale is written: add kv-overlay",
        ),
    ],
)
def test_a_query_that_needs_a_scale_gets_one(
    model: Path,
    data: Path,
    tmp_path: Path,
    factor: float,
    options: tuple[str, ...],
    is_written: bool,
    note: str,
) -> None:
    def scale(odd: Any) -> None:
        odd.model.layers[1].self_attn.q_proj.weight *= factor

    folder = save_changed(model, tmp_path / "odd", scale)
    command = ("calibrate", folder, "--data", data, *QUICK, *options, "--json")
    warnings = succeed(*command, "--out", tmp_path / "out").json["warnings"]
    said = [text for text in warnings if text.startswith("q clips or becomes zero at scale 1.0")]
    assert [text.rpartition(")")[2] for text in said] == ([note] if note else [])
    assert all("(layer and amax: 1 (" in text for text in said)
    if options[1] == "kv-scales":
        names = load_file(tmp_path / "out" / "kv_scales.safetensors")
        queries = sorted(name for name in names if name.endswith("q_scale"))
        both = [f"model.layers.{index}.self_attn.q_scale" for index in range(2)]
        assert queries == (both if is_written else [])


PATHS = ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "mixtral"
    zoo.save("mixtral", folder, num_local_experts=8)
    return folder


def calibrate_experts(model: Path, out: Path, *options: object) -> Outcome:
    rows = write_rows(out.with_suffix(".jsonl"), [{"input_ids": [5, 9, 41, 77, 23, 5, 64]}])
    return succeed("calibrate", model, "--data", rows, *options, "--out", out, "--json")


def test_tokens_per_expert_are_told_for_every_layer(mixtral: Path, tmp_path: Path) -> None:
    outcome = calibrate_experts(mixtral, tmp_path / "out")
    report = outcome.json
    tokens = report["expert_tokens"]
    assert [sum(counts) for counts in tokens.values()] == [7 * 2, 7 * 2]
    unreached = [
        f"{path}.{expert}" for path in PATHS for expert in range(8) if not tokens[path][expert]
    ]
    assert unreached, "this model is to leave some experts alone"
    assert f"{len(unreached)} experts never reached (--fallback gives" in outcome.err
    assert unreached[0] in outcome.err


TEXTS = [" ".join(f"w{i * j % 90}" for j in range(1, 40)) for i in range(12)]


def test_rows_that_cannot_be_used_are_skipped_counted_and_named(
    model: Path, tmp_path: Path
) -> None:
    template = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
    template += "{% endif %}{{ m.content }} {% endfor %}"
    model = shutil.copytree(model, tmp_path / "model")
    (model / "chat_template.jinja").write_text(template)
    chats = [
        {"messages": [{"role": "tool" if i % 10 == 3 else "user", "content": text}]}
        for i, text in enumerate(TEXTS[:10] * 4)
    ]
    chats[13] = {"messages": [{"role": "user", "content": None}]}
    data = write_rows(tmp_path / "rows.jsonl", chats)
    command = ("calibrate", model, "--data", data, "--samples", 99, "--seq-len", 64)
    outcome = succeed(
        *command, "--no-pack", "--dtype", "float32", "--out", tmp_path / "a", "--json"
    )
    result = json.loads(outcome.out)
    assert (result["sequences"], result["rows"]["read"], result["rows"]["rejected"]) == (36, 40, 4)
    rejected = "rows.jsonl:4: the chat template rejects the conversation (no tools)"
    unread = "rows.jsonl:14: messages[0].content must be text or a list of parts, found nothing"
    assert f"skipped: 4 of 40 rows cannot be used: {rejected}; {unread}; " in outcome.err
    strict = run(*command, "--strict-rows", "--out", tmp_path / "b")
    assert (strict.code, f"error: {rejected}\n" in strict.err) == (5, True)
    write_rows(data, [*chats, chats[3]])
    outcome = run(*command, "--dtype", "float32", "--out", tmp_path / "b")
    assert outcome.code == 5
    assert f"5 of 41 rows cannot be used: {rejected}; {unread}; " in outcome.err
    assert not (tmp_path / "b").exists()


HALF = (
    "half of the text gave {} of the final amax of {} in the median, and {} in the slowest tensor "
    "({})"
)
K, V, INPUT = Site("a", Role.K), Site("c", Role.V), Site("b", Role.INPUT)
SATURATED: list[tuple[dict[Site, list[float] | None], str]] = [
    # a: 1/8 2/8 4/8; c: 1/4 3/4 3/4
    (
        {K: [1.0, 2.0, 4.0, 8.0], INPUT: [4.0, 1.0, 1.0, 2.0], V: [1.0, 3.0, 2.0, 4.0]},
        HALF.format("50%", "K and V", "25%", "a.k"),
    ),
    ({INPUT: [1.0, 3.0, 2.0, 4.0]}, HALF.format("75%", "inputs", "75%", "b.input")),
    ({}, ""),
    ({Site("a", Role.WEIGHT): [1.0, 2.0, 3.0, 4.0]}, ""),
    ({K: None}, ""),
    ({K: [0.0, 0.0, 0.0, 0.0]}, ""),
]
"""Amax by quarter of the text, and what is said."""


@pytest.mark.parametrize(("progress", "told"), SATURATED)
def test_shares_are_running_maxima_over_the_final_one(
    progress: dict[Site, list[float] | None], told: str
) -> None:
    """Those of inputs count where no cache was observed."""
    sites = {
        site: SiteStats(
            count=4,
            amax=torch.tensor([1.0]),
            progress=None if values is None else torch.tensor(values),
        )
        for site, values in progress.items()
    }
    found = Saturation.of(make_stats(make_geometry([]), sites))
    assert (found.describe() if found else "") == told
    if K in progress and found:
        assert (found.median_share, found.least_share) == ((0.1875, 0.5, 0.625), (0.125, 0.25, 0.5))
