"""KV scales are added to a model that is quantized already: by `export` and `extract-kv-scales`."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fp8calib.checkpoint import overlay
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.header import encode_header
from fp8calib.checkpoint.model_config import replace_quantization
from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.engines.registry import ENGINES
from fp8calib.engines.replay.folder import open_folder
from fp8calib.model.geometry_from_config import read_geometry
from fp8calib.stats.calibration_stats import load_stats, save_stats
from fp8calib.stats.fingerprint import fingerprint_model
from tests import zoo
from tests.cli.conftest import write_rows
from tests.cli.program import fail, run, snapshot, succeed
from tests.cli.quantized_children import (
    BASE,
    FORMS,
    NORM,
    WEIGHTS,
    change_config,
    change_norm,
    change_tensors,
    save_child,
    save_fp4,
    save_int,
    set_method,
)
from tests.dialects.foreign import FOLDER

SHARD = "model-00002-of-00002.safetensors"
PLAIN = "compressed-tensors"
ATTENTION = "model.layers.{}.self_attn"
Refused = Callable[..., str]


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calibrate the tiny llama: statistics and `kv_scales.safetensors`."""
    folder = tmp_path_factory.mktemp("calibrated")
    rows = [{"input_ids": [(7 * i * j + i) % 64 for j in range(16)]} for i in range(1, 5)]
    data = write_rows(folder / "rows.jsonl", rows)
    options = ("--samples", 4, "--seq-len", 16, "--dtype", "float32", "--format", "kv-scales")
    succeed("calibrate", BASE, "--data", data, *options, "--out", folder / "out")
    return folder / "out"


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Write each form once."""
    folder = tmp_path_factory.mktemp("children")

    def save(form: str) -> Path:
        place = folder / form.replace(" ", "").replace(",", "-")
        return place if place.exists() else save_child(form, place)

    return save


@pytest.fixture
def child(children: Callable[[str], Path], tmp_path: Path) -> Path:
    """Copy a quantized checkpoint that a test may change."""
    return Path(shutil.copytree(children(PLAIN), tmp_path / "child"))


@pytest.fixture
def refused(calibrated: Path, tmp_path: Path) -> Refused:
    """Export an overlay, require the exit code and that nothing was written or changed."""

    def export(code: int, model: object, *options: object, stats: Path | None = None) -> str:
        before = snapshot(tmp_path)
        source = stats or calibrated / "stats.safetensors"
        asked = () if "--format" in options else ("--format", "kv-overlay")
        command = ("export", source, *asked, "--model", model, "--out", tmp_path / "out")
        text = fail(code, *command, *options)
        assert snapshot(tmp_path) == before
        return text

    return export


def graft(calibrated: Path, model: object, out: Path, *options: object) -> Any:
    """Export an overlay of a quantized model, and give what --json printed."""
    asked = () if "--format" in options else ("--format", "kv-overlay")
    command = ("export", calibrated / "stats.safetensors", *asked, "--model", model, "--out", out)
    return succeed(*command, *options, "--json").json


def expected_scales(calibrated: Path) -> dict[tuple[int, str], float]:
    """Divide the amax of K and V by 448, from the file of statistics itself."""
    stats = load_file(calibrated / "stats.safetensors")
    return {
        (layer, role): float(stats[f"{ATTENTION.format(layer)}.{role}/amax"].max() / 448)
        for layer in range(2)
        for role in "kv"
    }


def stored_scales(folder: Path, name: str = "{}_scale") -> dict[tuple[int, str], float]:
    """Read the scales of an overlay's own shard."""
    tensors = load_file(folder / SHARD)
    return {
        (layer, role): tensors[f"{ATTENTION.format(layer)}.{name.format(role)}"].item()
        for layer in range(2)
        for role in "kv"
    }


def statuses(folder: Path, engine: str) -> set[str]:
    """Give the statuses of the scales in an engine, whether or not it can load the weights."""
    geometry = read_geometry(folder, json.loads((folder / "config.json").read_text()))
    replay = ENGINES[engine].replay_folder
    assert replay is not None
    layers = replay(open_folder(folder), geometry, 1).layers
    return {str(verdict.status) for layer in layers for verdict in (layer.k, layer.v)}


# --- every form -------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_scales_are_added_and_nothing_else_changes(
    calibrated: Path, children: Callable[[str], Path], tmp_path: Path, form: str
) -> None:
    child = children(form)
    before = snapshot(child)
    report = graft(calibrated, child, tmp_path / "out")
    out = tmp_path / "out" / "kv-overlay"

    assert snapshot(child) == before
    weights = [path for path in child.iterdir() if path.suffix == ".safetensors"]
    linked = {path.stat().st_ino for path in out.glob("*.safetensors")} - {
        (out / SHARD).stat().st_ino
    }
    assert linked == {path.stat().st_ino for path in weights}
    assert stored_scales(out) == pytest.approx(expected_scales(calibrated), rel=1e-7)
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == {
        *(name for path in weights for name in TensorFile(path).tensors),
        *load_file(out / SHARD),
    }
    old, new = (
        json.loads((folder / "config.json").read_text())["quantization_config"]
        for folder in (child, out)
    )
    added = {key: value for key, value in new.items() if old.get(key) != value}
    assert {**new, **{key: old.get(key) for key in added}} == {
        **old,
        **{key: old.get(key) for key in added},
    }
    assert added.keys() <= {"kv_cache_scheme"}
    named = {"vllm": "used", "sglang": "used"}
    assert {engine: statuses(out, engine).pop() for engine in named} == named
    assert not report["warnings"]


@pytest.mark.parametrize(
    "save",
    [
        lambda folder: save_int(folder, 8),
        lambda folder: save_int(folder, 4, group=32),
        lambda folder: save_fp4(folder, "nvfp4"),
        lambda folder: save_fp4(folder, "modelopt"),
    ],
    ids=["int8", "int4", "nvfp4", "ModelOpt, nvfp4"],
)
def test_integers_and_fp4_get_scales_too(
    calibrated: Path, tmp_path: Path, save: Callable[[Path], Path]
) -> None:
    child = save(tmp_path / "child")
    old = json.loads((child / "config.json").read_text())["quantization_config"]
    graft(calibrated, child, tmp_path / "out")
    out = tmp_path / "out" / "kv-overlay"
    new = json.loads((out / "config.json").read_text())["quantization_config"]
    assert {key: new[key] for key in old} == old
    assert new.keys() - old.keys() == {"kv_cache_scheme"}
    assert stored_scales(out) == pytest.approx(expected_scales(calibrated), rel=1e-7)
    assert [statuses(out, engine) for engine in ("vllm", "sglang")] == [{"used"}] * 2


def test_modelopts_own_file_is_merged_too(
    calibrated: Path, children: Callable[[str], Path], tmp_path: Path
) -> None:
    child = children("ModelOpt")
    graft(calibrated, child, tmp_path / "out")
    old, new = (
        json.loads((folder / "hf_quant_config.json").read_text())
        for folder in (child, tmp_path / "out" / "kv-overlay")
    )
    assert old["quantization"].pop("kv_cache_quant_algo") is None
    assert new["quantization"].pop("kv_cache_quant_algo") == "FP8"
    assert new == old


def test_the_words_of_each_method(
    calibrated: Path, children: Callable[[str], Path], tmp_path: Path
) -> None:
    number = {"num_bits": 8, "type": "float"}
    fixed = {**number, "strategy": "tensor", "symmetric": True, "dynamic": False}
    words = {
        "compressed-tensors": fixed,
        "autofp8": "static",
        "ModelOpt": {"dynamic": False, **number},
        "Quark": None,
    }
    for form, scheme in words.items():
        graft(calibrated, children(form), tmp_path / form)
        config = json.loads((tmp_path / form / "kv-overlay" / "config.json").read_text())
        assert config["quantization_config"].get("kv_cache_scheme") == scheme


def test_scales_per_head(calibrated: Path, children: Callable[[str], Path], tmp_path: Path) -> None:
    graft(calibrated, children(PLAIN), tmp_path / "out", "--format", "kv-overlay-head")
    out = tmp_path / "out" / "kv-overlay-head"
    stats = load_file(calibrated / "stats.safetensors")
    path = ATTENTION.format(1)
    wanted = (stats[f"{path}.k/amax"].reshape(2, -1).amax(1) / 448).reshape(2, 1, 1)
    torch.testing.assert_close(load_file(out / SHARD)[f"{path}.k_scale"], wanted)
    assert statuses(out, "vllm") == {"used"}


def test_a_section_is_replaced_where_it_is() -> None:
    inner = {"text_config": {"vocab_size": 2, "quantization_config": {"quant_method": "fp8"}}}
    new = {"quant_method": "fp8", "kv_cache_scheme": "static"}
    assert replace_quantization(inner, new) == {
        "text_config": {"vocab_size": 2, "quantization_config": new}
    }
    assert replace_quantization({"compression_config": {"a": 1}}, new) == {
        "compression_config": new
    }
    assert replace_quantization({"vocab_size": 2}, new) == {}


def test_both_models_are_recorded(calibrated: Path, child: Path, tmp_path: Path) -> None:
    graft(calibrated, child, tmp_path / "out")
    metadata = TensorFile(tmp_path / "out" / "kv-overlay" / SHARD).header.metadata
    with Checkpoint.open(BASE) as base, Checkpoint.open(child) as own:
        prints = [fingerprint_model(each.load_config(), each) for each in (base, own)]
    assert json.loads(metadata["fp8calib.measured_on"])["model"] == prints[0]
    recorded = json.loads(metadata["fp8calib.grafted"])
    assert recorded == {"model": prints[1], "accepted": "", "replaces_scales": False}


# --- the scales that a model has already ------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "old"),
    [
        ("llmcompressor-fp8-static-kv", "{}_scale"),
        ("modelopt-fp8-kv", "{0}_proj.{0}_scale"),
        ("quark-fp8-kv", "{}_proj.output_scale"),
        ("quark-autofp8-kv", "{}_scale"),
    ],
)
def test_scales_are_replaced_only_on_request(
    refused: Refused, calibrated: Path, tmp_path: Path, name: str, old: str
) -> None:
    child = FOLDER / name
    text = refused(7, child)
    first = f"{ATTENTION.format(0)}.{old.format('k')}"
    assert f"already has a tensor {first}, and 4 KV scales in all" in text
    assert "--replace-scales" in text

    report = graft(calibrated, child, tmp_path / "out", "--replace-scales")
    out = tmp_path / "out" / "kv-overlay"
    names = "{}_proj.output_scale" if name == "quark-fp8-kv" else "{}_scale"
    assert stored_scales(out, names) == pytest.approx(expected_scales(calibrated), rel=1e-7)
    assert any(f"replaced: {first}, " in warning for warning in report["warnings"])
    assert any("copied" in warning for warning in report["warnings"])
    kept = load_file(out / "model-00001-of-00002.safetensors")
    source = load_file(child / WEIGHTS)
    assert source.keys() - kept.keys() == {
        f"{ATTENTION.format(layer)}.{old.format(role)}" for layer in range(2) for role in "kv"
    }
    assert all(torch.equal(kept[each].float(), source[each].float()) for each in kept)
    assert {statuses(out, engine).pop() for engine in ("vllm", "sglang")} == {"used"}


def test_a_graft_can_be_replaced_and_links_its_weights_again(
    refused: Refused, calibrated: Path, child: Path, tmp_path: Path
) -> None:
    graft(calibrated, child, tmp_path / "first")
    first = tmp_path / "first" / "kv-overlay"
    assert "already has a tensor" in refused(7, first)
    graft(calibrated, first, tmp_path / "again", "--replace-scales")
    again = tmp_path / "again" / "kv-overlay"
    name = "model-00001-of-00002.safetensors"
    assert (again / name).samefile(first / name)
    assert not (again / SHARD).exists()
    assert (
        load_file(again / "model-kv-scales.safetensors").keys() == load_file(first / SHARD).keys()
    )


@pytest.mark.parametrize(
    "name",
    [
        "llmcompressor-mixtral-fp8-static-kv",
        "modelopt-mixtral-fp8-kv",
        "quark-mixtral-fp8-kv",
    ],
)
def test_mixtures_of_experts(tmp_path: Path, name: str) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [{"input_ids": list(range(16))}])
    command = ("calibrate", FOLDER / "mixtral", "--data", data, "--format", "kv-scales")
    succeed(*command, "--seq-len", 16, "--dtype", "float32", "--out", tmp_path / "measured")
    graft(tmp_path / "measured", FOLDER / name, tmp_path / "out", "--replace-scales")
    assert statuses(tmp_path / "out" / "kv-overlay", "vllm") == {"used"}


# --- who has no place -------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_beside_awq_and_gptq_only_tgi_reads_scales(
    calibrated: Path, child: Path, tmp_path: Path, method: str
) -> None:
    set_method(child, quant_method=method, bits=4, group_size=128)
    report = graft(calibrated, child, tmp_path / "out")
    assert {item["engine"] for item in report["serving"]} <= {"TGI"}
    blocked = {item["engine"]: item["why"] for item in report["limitations"] if item["is_blocking"]}
    assert f"quant_method {method} has no parameters for KV scales" in blocked["vLLM"]
    assert f"quant_method '{method}' has no parameters for KV scales" in blocked["SGLang"]
    assert "TGI" not in blocked
    out = tmp_path / "out" / "kv-overlay"
    assert [statuses(out, each) for each in ("vllm", "sglang")] == [{"dropped"}] * 2
    assert statuses(out, "tgi") == {"used"}


@pytest.mark.parametrize("method", ["bitsandbytes", "mxfp4", "torchao"])
def test_beside_other_methods_nobody_reads_scales(
    refused: Refused, child: Path, method: str
) -> None:
    set_method(child, quant_method=method)
    text = refused(7, child)
    assert f"no server uses KV scales beside quant_method {method} in this model: vLLM 0.33" in text
    assert "SGLang" in text
    assert "TGI" in text
    assert "compressed-tensors (which also stores INT4 and INT8 weights)" in text


def test_latents_have_no_place_in_any_server(tmp_path: Path) -> None:
    zoo.save("deepseek_v3", tmp_path / "base")
    data = write_rows(tmp_path / "rows.jsonl", [{"input_ids": list(range(16))}])
    command = ("calibrate", tmp_path / "base", "--data", data, "--format", "kv-scales")
    succeed(*command, "--seq-len", 16, "--dtype", "float32", "--out", tmp_path / "measured")
    succeed("quantize", tmp_path / "base", "--scheme", "fp8-dynamic", "--out", tmp_path / "child")
    command = ("export", tmp_path / "measured", "--format", "kv-overlay")
    text = fail(7, *command, "--model", tmp_path / "child", "--out", tmp_path / "out")
    assert "no KV scale reaches multi-head latent attention in vLLM" in text
    assert not (tmp_path / "out").exists()


# --- is it the same model? --------------------------------------------------------------------


def test_another_base_is_refused(refused: Refused, tmp_path: Path) -> None:
    base = Path(shutil.copytree(BASE, tmp_path / "base"))
    change_tensors(base, lambda tensors: {name: t + 0.125 for name, t in tensors.items()})
    succeed("quantize", tmp_path / "base", "--scheme", "fp8-dynamic", "--out", tmp_path / "child")
    text = refused(7, tmp_path / "child")
    assert "was not made from the calibrated model" in text
    assert "its model.embed_tokens.weight differs" in text


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_key_value_heads": 4}, "layer 0: KV heads is 4, not 2"),
        ({"num_attention_heads": 2}, "layer 0: query heads is 2, not 4"),
        ({"head_dim": 16}, "layer 0: size of a k head is 16, not 32"),
        ({"num_hidden_layers": 1}, "its layers are 1, not 2"),
        ({"model_type": "mistral", "architectures": ["MistralForCausalLM"]}, "model_type is mistr"),
        ({"intermediate_size": 96}, "model.layers.0 is of another shape"),
    ],
)
def test_another_shape_is_refused(
    refused: Refused, child: Path, changes: dict[str, object], says: str
) -> None:
    change_config(child, lambda config: config.update(changes))
    assert says in refused(7, child)


def test_other_norms_need_a_word(
    refused: Refused, calibrated: Path, child: Path, tmp_path: Path
) -> None:
    change_norm(child)
    text = refused(7, child)
    assert f"its {NORM} differs" in text
    assert "--other-weights" in text
    report = graft(calibrated, child, tmp_path / "out", "--other-weights")
    assert any(f"its {NORM} differs" in warning for warning in report["warnings"])
    metadata = TensorFile(tmp_path / "out" / "kv-overlay" / SHARD).header.metadata
    assert json.loads(metadata["fp8calib.grafted"])["accepted"] == f"its {NORM} differs"


def test_norms_in_another_dtype_are_the_same(calibrated: Path, child: Path, tmp_path: Path) -> None:
    names = (NORM, "model.embed_tokens.weight", "model.norm.weight")
    change_tensors(child, lambda tensors: {**tensors, **{n: tensors[n].half() for n in names}})
    graft(calibrated, child, tmp_path / "out")


@pytest.mark.parametrize("name", [NORM, "model.embed_tokens.weight"])
def test_a_missing_norm_or_embedding_is_named(refused: Refused, child: Path, name: str) -> None:
    change_tensors(child, lambda tensors: {n: t for n, t in tensors.items() if n != name})
    assert f"it lacks {name}" in refused(7, child)


@pytest.fixture
def old_stats(calibrated: Path, tmp_path: Path) -> Path:
    """Write statistics as versions did that recorded no hashes."""
    stats = load_stats(calibrated)
    header = stats.header.model_copy(update={"unquantized": {}})
    path = tmp_path / "old" / "stats.safetensors"
    path.parent.mkdir()
    save_stats(replace(stats, header=header), path)
    assert "unquantized" not in TensorFile(path).header.metadata["fp8calib"]
    return path


def test_older_statistics_need_their_model(
    refused: Refused, child: Path, old_stats: Path, tmp_path: Path
) -> None:
    text = refused(2, child, stats=old_stats)
    assert "no hashes of norms and embeddings are recorded" in text
    assert "--base MODEL" in text
    other = shutil.copytree(BASE, tmp_path / "other")
    change_norm(other)
    text = refused(2, child, "--base", other, stats=old_stats)
    assert f"--base {other}: not the calibrated model, which had different weights" in text
    graft(old_stats.parent, child, tmp_path / "out", "--base", BASE)
    change_norm(child)
    assert f"its {NORM} differs" in refused(7, child, "--base", BASE, stats=old_stats)


@pytest.mark.parametrize("options", [("--base", BASE), ("--other-weights",)])
def test_options_for_a_quantized_model_are_refused_for_another(
    refused: Refused, options: tuple[object, ...]
) -> None:
    assert f"{options[0]}: MODEL is not quantized" in refused(2, BASE, *options)


# --- broken checkpoints -----------------------------------------------------------------------


def _remove_algorithm(child: Path) -> None:
    change_config(child, lambda config: config["quantization_config"].pop("quant_algo"))


def test_modelopt_without_an_algorithm(
    refused: Refused, children: Callable[[str], Path], tmp_path: Path
) -> None:
    child = Path(shutil.copytree(children("ModelOpt"), tmp_path / "child"))
    _remove_algorithm(child)
    text = refused(7, child)
    assert f"{child / 'config.json'}: the ModelOpt config has no quant_algo" in text


def test_modelopts_own_file_without_an_algorithm(
    refused: Refused, children: Callable[[str], Path], tmp_path: Path
) -> None:
    child = Path(shutil.copytree(children("ModelOpt"), tmp_path / "child"))
    (child / "hf_quant_config.json").write_text('{"quantization": {}}')
    assert "hf_quant_config.json: the ModelOpt config has no quant_algo" in refused(7, child)


@pytest.mark.parametrize(
    ("scheme", "says"),
    [
        ({"num_bits": 8, "type": "int"}, "kv_cache_scheme is {'num_bits': 8, 'type': 'int'}"),
        ({"num_bits": 4, "type": "float"}, "kv_cache_scheme is {'num_bits': 4"),
        ({"num_bits": 8, "type": "float", "dynamic": True}, "kv_cache_scheme is"),
    ],
)
def test_another_scheme_of_the_cache_is_not_replaced_in_silence(
    refused: Refused, calibrated: Path, child: Path, tmp_path: Path, scheme: object, says: str
) -> None:
    change_config(child, lambda c: c["quantization_config"].update(kv_cache_scheme=scheme))
    text = refused(7, child)
    assert says in text
    graft(calibrated, child, tmp_path / "out", "--replace-scales")


@pytest.mark.parametrize("form", ["autofp8", "ModelOpt", "Quark"])
def test_scales_per_head_need_a_method_that_has_them(
    refused: Refused, children: Callable[[str], Path], form: str
) -> None:
    text = refused(2, children(form), "--format", "kv-overlay-head")
    assert "one KV scale for a layer, not one for each head" in text


def test_groups_that_are_none(refused: Refused, child: Path) -> None:
    change_config(child, lambda c: c["quantization_config"].update(config_groups=[]))
    assert "config_groups is []" in refused(7, child)


def test_fp8_weights_without_a_config(refused: Refused, child: Path) -> None:
    change_config(child, lambda config: config.pop("quantization_config"))
    assert "is quantized, but config.json has no quantization_config" in refused(4, child)


def test_an_index_without_its_shard(refused: Refused, child: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (child / WEIGHTS).rename(child / "model-00002-of-00002.safetensors")
    (child / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "1 of 1 shards are missing: model-00001-of-00002.safetensors" in refused(4, child)


def test_a_truncated_file(refused: Refused, child: Path) -> None:
    path = child / WEIGHTS
    path.write_bytes(path.read_bytes()[:-5])
    assert "truncated" in refused(4, child)


def test_no_config_at_all(refused: Refused, child: Path) -> None:
    (child / "config.json").unlink()
    assert "there is no config.json" in refused(4, child)


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
def test_a_config_that_is_no_json(refused: Refused, child: Path, name: str) -> None:
    (child / name).write_text("{")
    assert f"{name}: cannot be read as JSON" in refused(4, child)


def test_an_unknown_architecture(refused: Refused, child: Path) -> None:
    change_config(child, lambda config: config.update(model_type="nobody"))
    assert "model_type 'nobody' is unknown to this tool" in refused(4, child)


def test_the_output_may_not_replace_the_model(refused: Refused, child: Path) -> None:
    assert "the output would replace" in refused(2, child, "--out", child, "--force")


def test_an_output_that_exists(refused: Refused, child: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").touch()
    assert "notes" in refused(2, child)


def test_a_model_that_is_nowhere(refused: Refused, tmp_path: Path) -> None:
    assert "no model folder" in refused(4, tmp_path / "nowhere")
    assert "fetching it from the hub failed" in refused(4, "nobody/nothing")


# --- file systems and interruptions -----------------------------------------------------------


def test_weights_are_copied_where_links_are_impossible(
    calibrated: Path, child: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_self: Path, _target: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    report = graft(calibrated, child, tmp_path / "out")
    (warning,) = report["warnings"]
    assert "kv-overlay/model-00001-of-00002.safetensors: copied (" in warning
    assert "cannot be hard-linked: Invalid cross-device link" in warning
    out = tmp_path / "out" / "kv-overlay" / "model-00001-of-00002.safetensors"
    assert out.read_bytes() == (child / WEIGHTS).read_bytes()


def test_a_read_only_source_is_only_read(calibrated: Path, child: Path, tmp_path: Path) -> None:
    times = {path: path.stat().st_mtime_ns for path in child.iterdir()}
    for path in (*child.iterdir(), child):
        path.chmod(path.stat().st_mode & ~0o222)
    try:
        graft(calibrated, child, tmp_path / "out")
        assert {path: path.stat().st_mtime_ns for path in child.iterdir()} == times
    finally:
        child.chmod(0o755)


@pytest.mark.parametrize("step", range(1, 6))
def test_an_interruption_leaves_nothing_or_the_whole(
    calibrated: Path, child: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Each of the five files that are written: links, copies, scales, index, config."""
    count = 0
    names = ("_link_or_copy", "copy_side_files", "save_tensors", "write_file_atomic")
    for name in names:
        original = getattr(overlay, name)

        def interrupt(*args: Any, original: Any = original, **options: Any) -> Any:
            nonlocal count
            count += 1
            result = original(*args, **options)
            if count == step:
                raise KeyboardInterrupt
            return result

        monkeypatch.setattr(overlay, name, interrupt)
    before = snapshot(tmp_path)
    command = ("export", calibrated / "stats.safetensors", "--format", "kv-overlay")
    assert run(*command, "--model", child, "--out", tmp_path / "out").code == 130
    assert count == step
    assert snapshot(tmp_path) == before


# --- packs ------------------------------------------------------------------------------------


def test_a_pack_makes_the_same_checkpoint_as_the_statistics(
    calibrated: Path, child: Path, tmp_path: Path
) -> None:
    graft(calibrated, child, tmp_path / "direct")
    pack = calibrated / "kv_scales.safetensors"
    command = ("extract-kv-scales", "--quantized-model", pack, "--model", child)
    succeed(*command, "--save-path", tmp_path / "pack")
    assert snapshot(tmp_path / "pack") == snapshot(tmp_path / "direct" / "kv-overlay")


def _apply(pack: object, model: object, out: Path, *options: object) -> tuple[object, ...]:
    return (
        *("extract-kv-scales", "--quantized-model", pack, "--model", model),
        *("--save-path", out, *options),
    )


def test_a_pack_of_another_base_is_refused_with_what_differs(
    calibrated: Path, child: Path, tmp_path: Path
) -> None:
    pack = calibrated / "kv_scales.safetensors"
    change_norm(child)
    text = fail(4, *_apply(pack, child, tmp_path / "out"))
    assert f"was not made from the calibrated model of {pack}: its {NORM} differs" in text
    succeed(*_apply(pack, child, tmp_path / "out", "--other-weights"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_key_value_heads": 4}, "layer 0: KV heads is 4, not 2"),
        ({"model_type": "mistral", "architectures": ["MistralForCausalLM"]}, "model_type is mistr"),
        ({"num_hidden_layers": 1}, "the model has no such attention"),
    ],
)
def test_a_pack_for_another_shape_is_refused(
    calibrated: Path, child: Path, tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    change_config(child, lambda config: config.update(changes))
    pack = calibrated / "kv_scales.safetensors"
    assert says in fail(4, *_apply(pack, child, tmp_path / "out"))


def _rewrite(pack: Path, target: Path, **changes: str | None) -> Path:
    with safe_open(pack, "pt") as file:
        names = list(file.keys())
        metadata = {f"fp8calib.{key}": text for key, text in changes.items() if text is not None}
        old = {key: text for key, text in file.metadata().items() if key[9:] not in changes}
        save_file({name: file.get_tensor(name) for name in names}, target, old | metadata)
    return target


def test_a_pack_without_hashes_needs_the_base(
    calibrated: Path, child: Path, tmp_path: Path
) -> None:
    pack = _rewrite(calibrated / "kv_scales.safetensors", tmp_path / "p.safetensors", fits=None)
    assert "--base MODEL" in fail(2, *_apply(pack, child, tmp_path / "out"))
    succeed(*_apply(pack, child, tmp_path / "out", "--base", BASE))


@pytest.mark.parametrize("text", ["{", "[]", '{"attention": {}}', '{"unquantized": {}}'])
def test_a_damaged_record_is_named(
    calibrated: Path, child: Path, tmp_path: Path, text: str
) -> None:
    pack = _rewrite(calibrated / "kv_scales.safetensors", tmp_path / "p.safetensors", fits=text)
    assert "fp8calib.fits is damaged" in fail(4, *_apply(pack, child, tmp_path / "out"))


def test_a_pack_that_records_nothing_is_taken_with_a_warning(
    calibrated: Path, child: Path, tmp_path: Path
) -> None:
    pack = _rewrite(
        calibrated / "kv_scales.safetensors",
        tmp_path / "p.safetensors",
        fits=None,
        measured_on=None,
    )
    report = succeed(*_apply(pack, child, tmp_path / "out"), "--json").json
    assert any("the scales record no model" in note for note in report["notes"])
    metadata = TensorFile(tmp_path / "out" / SHARD).header.metadata
    assert json.loads(metadata["fp8calib.grafted"])["accepted"] == "the scales record no model"


def _publish(cache: Path, name: str, folder: Path) -> None:
    """Put a folder into a cache of the hub, as its client stores it."""
    place = cache / f"models--{name.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "blobs").mkdir()
    (place / "refs" / "main").write_text("abc123")
    snap = place / "snapshots" / "abc123"
    snap.mkdir(parents=True)
    for path in folder.iterdir():
        shutil.copy(path, place / "blobs" / f"blob-{path.name}")
        (snap / path.name).symlink_to(Path("../../blobs") / f"blob-{path.name}")


def test_a_pack_and_a_model_from_the_hub(
    calibrated: Path, child: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = tmp_path / "pack"
    pack.mkdir()
    shutil.copy(calibrated / "kv_scales.safetensors", pack)
    cache = tmp_path / "cache"
    _publish(cache, "someone/scales", pack)
    _publish(cache, "someone/model-FP8", child)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    succeed(*_apply("someone/scales", "someone/model-FP8", tmp_path / "out"))
    succeed(*_apply(pack / "kv_scales.safetensors", child, tmp_path / "local"))
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "local")
    blob = cache / "models--someone--model-FP8" / "blobs" / f"blob-{WEIGHTS}"
    assert (tmp_path / "out" / "model-00001-of-00002.safetensors").samefile(blob)
    graft(calibrated, "someone/model-FP8", tmp_path / "stats")
    text = fail(4, *_apply("someone/nothing", child, tmp_path / "none"))
    assert "someone/nothing is not a local folder" in text


# --- time and bytes ---------------------------------------------------------------------------


def save_sparse(folder: Path, *, layers: int) -> Path:
    """Write an FP8 Llama in the shape of the 70B one: sparse files, three layers in each."""
    folder.mkdir()
    sizes = {
        "self_attn.q_proj": (8192, 8192),
        "self_attn.o_proj": (8192, 8192),
        **{f"self_attn.{name}_proj": (1024, 8192) for name in "kv"},
        **{f"mlp.{name}_proj": (28672, 8192) for name in ("gate", "up")},
        "mlp.down_proj": (8192, 28672),
    }
    shards: list[dict[str, tuple[str, tuple[int, ...]]]] = [
        {"model.embed_tokens.weight": ("BF16", (128256, 8192))},
        {"model.norm.weight": ("BF16", (8192,)), "lm_head.weight": ("BF16", (128256, 8192))},
    ]
    for layer in range(layers):
        if layer % 3 == 0:
            shards.append({})
        for name, shape in sizes.items():
            path = f"model.layers.{layer}.{name}"
            shards[-1][f"{path}.weight"] = ("F8_E4M3", shape)
            shards[-1][f"{path}.weight_scale"] = ("BF16", (shape[0], 1))
        for name in ("input_layernorm", "post_attention_layernorm"):
            shards[-1][f"model.layers.{layer}.{name}.weight"] = ("BF16", (8192,))
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header, place = {}, 0
        for name, (dtype, shape) in shard.items():
            stop = place + math.prod(shape) * (1 if dtype == "F8_E4M3" else 2)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, stop]}
            weight_map[name], place = file, stop
        raw = encode_header(header)
        with (folder / file).open("wb") as stream:
            stream.write(raw)
            stream.truncate(len(raw) + place)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = transformers.LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        architectures=["LlamaForCausalLM"],
    ).to_dict()
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {**number, "strategy": "channel", "dynamic": False}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_checkpoint_of_70b_gets_scales_in_little_time_and_space(tmp_path: Path) -> None:
    child = save_sparse(tmp_path / "child", layers=80)
    scales = {
        f"{ATTENTION.format(layer)}.{role}_scale": torch.tensor(0.01 + layer / 1000)
        for layer in range(80)
        for role in "kv"
    }
    save_file(scales, tmp_path / "pack.safetensors")
    started = time.monotonic()
    options = ("--source-dtype", "e4m3fn")
    succeed(*_apply(tmp_path / "pack.safetensors", child, tmp_path / "out", *options))
    assert time.monotonic() - started < 30  # under 4 s on two busy cores
    new = [path for path in (tmp_path / "out").iterdir() if path.stat().st_nlink == 1]
    assert sum(path.stat().st_size for path in new) < 2_000_000
    old = {path.stat().st_ino for path in child.glob("*.safetensors")}
    assert old < {path.stat().st_ino for path in (tmp_path / "out").glob("*.safetensors")}


# --- transformers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        ("--scheme", "fp8-block", "--format", "autofp8"),
        ("--scheme", "fp8-dynamic", "--format", "modelopt"),
        ("--scheme", "w8a16"),
    ],
)
def test_transformers_computes_the_same_logits(tmp_path: Path, options: tuple[str, ...]) -> None:
    """With compressed-tensors it also rounds K and V, unless the new entry is removed again."""
    pytest.importorskip("compressed_tensors")
    sizes = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "vocab_size": 64}
    zoo.save("llama", tmp_path / "base", **sizes)
    data = write_rows(tmp_path / "rows.jsonl", [{"input_ids": list(range(16))}])
    command = ("calibrate", tmp_path / "base", "--data", data, "--format", "kv-scales")
    succeed(*command, "--seq-len", 16, "--dtype", "float32", "--out", tmp_path / "measured")
    succeed("quantize", tmp_path / "base", *options, "--out", tmp_path / "child")
    graft(tmp_path / "measured", tmp_path / "child", tmp_path / "out")
    out = tmp_path / "out" / "kv-overlay"
    if options[-1] == "w8a16":
        change_config(out, lambda config: config["quantization_config"].pop("kv_cache_scheme"))
    ids = torch.arange(12).reshape(1, 12)
    load = transformers.AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        before, after = (load(folder)(ids).logits for folder in (tmp_path / "child", out))
    assert torch.equal(before, after)
