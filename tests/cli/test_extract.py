"""KV scales are added to every form of quantized model, and to no other model."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fp8calib.calibration.calibration_stats import load_stats_file, save_stats
from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.engines.registry import ENGINES
from fp8calib.engines.replay.folder import open_folder
from fp8calib.model.geometry_from_config import read_geometry
from tests import zoo
from tests.cli import quantized_sources as sources
from tests.cli.conftest import write_rows
from tests.cli.program import fail, snapshot, succeed
from tests.cli.quantized_children import (
    BASE,
    FORMS,
    NORM,
    QUANTIZED,
    SMALLER,
    calibrate_base,
    change_norm,
    save_child,
)
from tests.cli.quantized_sources import ATTENTION, K
from tests.formats.foreign import FOLDER
from tests.kit.checkpoints import WEIGHTS, change_config, change_tensors

SHARD = "model-00002-of-00002.safetensors"
LINKED = "model-00001-of-00002.safetensors"
PLAIN = "compressed-tensors"
OWN_FILE = "hf_quant_config.json"


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


def name_command(pack: object, model: object, out: Path, *options: object) -> tuple[object, ...]:
    return (
        *("extract-kv-scales", "--quantized-model", pack, "--model", model),
        *("--save-path", out, *options),
    )


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calibrate the tiny llama: statistics and `kv_scales.safetensors`."""
    return calibrate_base(tmp_path_factory.mktemp("calibrated"))


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
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
def refused(calibrated: Path, tmp_path: Path) -> Callable[..., str]:
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


# --- kV scales are added to every form of quantized model, and nothing else changes -----------


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
    linked = {path.stat().st_ino for path in out.glob("*.safetensors") if path.name != SHARD}
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
    assert [statuses(out, engine) for engine in ("vllm", "sglang")] == [{"used"}] * 2
    assert not report["warnings"]
    if (child / OWN_FILE).is_file():
        old, new = (json.loads((folder / OWN_FILE).read_text()) for folder in (child, out))
        assert old["quantization"].pop("kv_cache_quant_algo") is None
        assert new["quantization"].pop("kv_cache_quant_algo") == "FP8"
        assert new == old


def test_of_integers_only_the_kv_scales_are_emulated(
    calibrated: Path, children: Callable[[str], Path], tmp_path: Path
) -> None:
    graft(calibrated, children("int8"), tmp_path / "out")
    out = tmp_path / "out" / "kv-overlay"
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": list(range(16))}])
    told = succeed("verify", BASE, "--scales", out, "--data", rows, "--seq-len", 16, "--json").json
    assert any("only its KV scales are emulated" in text for text in told["warnings"])


# --- a file of `kv-scales` is a pack, which `extract-kv-scales` adds to a quantized model -----


def test_a_pack_of_another_base_is_refused_with_what_differs(
    calibrated: Path, child: Path, tmp_path: Path
) -> None:
    pack = calibrated / "kv_scales.safetensors"
    change_norm(child)
    text = fail(4, *name_command(pack, child, tmp_path / "out"))
    assert f"was not made from the calibrated model of {pack}: its {NORM} differs" in text
    succeed(*name_command(pack, child, tmp_path / "out", "--other-weights"))


def _rewrite(pack: Path, target: Path, **changes: str | None) -> Path:
    with safe_open(pack, "pt") as file:
        names = list(file.keys())
        metadata = {f"fp8calib.{key}": text for key, text in changes.items() if text is not None}
        old = {key: text for key, text in file.metadata().items() if key[9:] not in changes}
        save_file({name: file.get_tensor(name) for name in names}, target, old | metadata)
    return target


def test_only_of_scales_without_a_record_no_model_is_compared(
    calibrated: Path, child: Path, tmp_path: Path
) -> None:
    for scales in (calibrated / "kv_scales.safetensors", FOLDER / "llmcompressor-kv"):
        done = succeed(*name_command(scales, child, tmp_path / scales.name, "--json"))
        is_said = any("the scales record no model" in note for note in done.json["notes"])
        assert is_said is (scales.parent == FOLDER)


KV_CHECKPOINTS = ["llmcompressor-fp8-static-kv", "modelopt-fp8-kv", "quark-fp8-kv"]


@pytest.mark.parametrize("name", KV_CHECKPOINTS)
@pytest.mark.parametrize("changed", [NORM, "model.layers.0.self_attn.v_proj.weight"])
def test_scales_of_a_checkpoint_are_refused_for_another_model(
    tmp_path: Path, name: str, changed: str
) -> None:
    source, other = FOLDER / name, Path(shutil.copytree(BASE, tmp_path / "other"))
    done = succeed(*name_command(source, BASE, tmp_path / "own", "--json"))
    assert done.json["compared"]
    change_tensors(other, lambda tensors: {**tensors, changed: tensors[changed] * 2})
    text = fail(4, *name_command(source, other, tmp_path / "out"))
    assert f"{source} was not made from {other}: its {changed} differs" in text
    done = succeed(*name_command(source, other, tmp_path / "out", "--other-weights", "--json"))
    assert any(f"its {changed} differs" in note for note in done.json["notes"])


@pytest.mark.parametrize("text", ["{", "[]", '{"attention": {}}', '{"unquantized": {}}'])
def test_a_damaged_record_is_named(
    calibrated: Path, child: Path, tmp_path: Path, text: str
) -> None:
    pack = _rewrite(calibrated / "kv_scales.safetensors", tmp_path / "p.safetensors", fits=text)
    assert "fp8calib.fits is damaged" in fail(4, *name_command(pack, child, tmp_path / "out"))


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
    refused: Callable[..., str], calibrated: Path, tmp_path: Path, name: str, old: str
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
    kept = load_file(out / LINKED)
    source = load_file(child / WEIGHTS)
    assert source.keys() - kept.keys() == {
        f"{ATTENTION.format(layer)}.{old.format(role)}" for layer in range(2) for role in "kv"
    }
    assert all(torch.equal(kept[each].float(), source[each].float()) for each in kept)
    assert {statuses(out, engine).pop() for engine in ("vllm", "sglang")} == {"used"}


@pytest.mark.parametrize("is_quantized", [True, False])
def test_scales_that_are_not_there_are_not_replaced_in_silence(
    calibrated: Path, child: Path, tmp_path: Path, is_quantized: bool
) -> None:
    model = child if is_quantized else BASE
    says = f"--replace-scales has no effect: {model} has no KV scales"
    warnings = graft(calibrated, model, tmp_path / "out", "--replace-scales")["warnings"]
    assert says in warnings
    pack = calibrated / "kv_scales.safetensors"
    command = name_command(pack, model, tmp_path / "pack", "--replace-scales", "--json")
    assert says in succeed(*command).json["notes"]
    served = tmp_path / "out" / "kv-overlay"
    again = graft(calibrated, served, tmp_path / "again", "--replace-scales")["warnings"]
    assert not any("has no effect" in warning for warning in again)


# --- statistics of the unquantized model serve its quantized children, and no others ----------


def test_statistics_without_hashes_are_refused(
    calibrated: Path, refused: Callable[..., str], child: Path, tmp_path: Path
) -> None:
    """Earlier versions recorded none."""
    stats = load_stats_file(calibrated)
    header = stats.header.model_copy(update={"unquantized": {}})
    path = tmp_path / "old" / "stats.safetensors"
    path.parent.mkdir()
    save_stats(replace(stats, header=header), path)
    assert "unquantized" not in TensorFile(path).metadata["fp8calib"]
    text = refused(4, child, stats=path)
    assert "no hashes of norms and embeddings are recorded" in text


LINEARS = [
    f"model.layers.{layer}.{path}_proj.weight"
    for layer in (0, 1)
    for path in (*(f"mlp.{name}" for name in ("down", "gate", "up")), "self_attn.o", "self_attn.q")
]


def _quantize_another(folder: Path, form: str, factors: dict[str, float]) -> Path:
    """Quantize a model that has the base's norms and embeddings, and other linears."""
    base = Path(shutil.copytree(BASE, folder / "base"))
    change_tensors(base, lambda tensors: {n: t * factors.get(n, 1.0) for n, t in tensors.items()})
    return save_child(form, folder / "other-child", base)


@pytest.mark.parametrize("form", [*QUANTIZED, *SMALLER])
def test_other_linears_are_refused(
    calibrated: Path, refused: Callable[..., str], tmp_path: Path, form: str
) -> None:
    """Norms, embeddings, k and v are the base's; directly, and through a pack."""
    child = _quantize_another(tmp_path, form, dict.fromkeys(LINEARS, 2.0))
    text = refused(4, child)
    assert any(f"its {name} differs by " in text for name in LINEARS)
    pack = calibrated / "kv_scales.safetensors"
    text = fail(4, *name_command(pack, child, tmp_path / "out"))
    assert any(name in text for name in LINEARS)


def test_projections_that_cannot_be_decoded_are_named(
    calibrated: Path, child: Path, tmp_path: Path
) -> None:
    change_config(
        child,
        lambda config: config["quantization_config"].update(transform_config={"config_groups": {}}),
    )
    (warning,) = graft(calibrated, child, tmp_path / "out")["warnings"]
    assert "its linears were not all compared" in warning
    assert "transform_config rotates" in warning


def test_force_replaces_a_checkpoint_and_refuses_strangers(tmp_path: Path) -> None:
    zoo.save("llama", tmp_path / "model")
    source = sources.save_source("modelopt", tmp_path / "q")
    command = name_command(source, tmp_path / "model", tmp_path / "out")
    succeed(*command)
    assert "--force" in fail(2, *command)
    succeed(*command, "--force", "--fp8-dtype", "e4m3fnuz")
    written = stored_scales(tmp_path / "out")
    assert [written[layer, "k"] for layer in range(2)] == [2 * number for number in K]
    (tmp_path / "out" / "mine").touch()
    before = snapshot(tmp_path)
    assert "mine" in fail(2, *command, "--force")
    assert snapshot(tmp_path) == before
