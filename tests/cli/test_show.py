"""`fp8calib show` on files of strangers: every number as it stands there, or one error."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.conftest import QUICK
from tests.cli.program import fail, run, succeed
from tests.kit.apart import SLOW, run_apart


def test_json_numbers_of_any_size_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    path.write_text(
        '{"kv_cache": {"a": 1e400, "b": -0.5, "c": true, "d": 7, "²": {"10": 1, "2": 2}, '
        f'"e": {10**400}, "n": NaN}}}}'.replace("NaN", "0.25")
    )

    scales = succeed("show", path, "--json").json["scales"]

    assert scales.pop("kv_cache.e") == "1" + "0" * 199
    assert scales == {
        "kv_cache.a": ["inf"],
        "kv_cache.b": [-0.5],
        "kv_cache.d": [7.0],
        "kv_cache.n": [0.25],
        "kv_cache.².2": [2.0],
        "kv_cache.².10": [1.0],
    }


def test_large_tensors_are_described(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = {"a.weight_scale": torch.zeros(257, 256), "b.weight_scale": torch.ones(256, 256)}
    save_file(tensors, path)

    scales = succeed("show", path, "--json").json["scales"]

    assert scales["a.weight_scale"] == "F32 of shape [257, 256]"
    assert scales["b.weight_scale"] == [1.0] * 65536


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    save_file({"a.k_scale": torch.tensor(0.5)}, tmp_path / "x.safetensors")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.safetensors").symlink_to("../x.safetensors")

    assert "link out of the folder" in fail(4, "show", tmp_path / "folder")


def write_scales(path: Path) -> Path:
    """Write the KV scales of ten layers, of which one is 64 times the others."""
    scales = {f"model.layers.{n}.self_attn.k_scale": torch.tensor(0.5 + n / 100) for n in range(10)}
    scales |= {f"model.layers.{n}.self_attn.v_scale": torch.tensor(0.25) for n in range(10)}
    scales["model.layers.7.self_attn.v_scale"] = torch.tensor(16.0)
    scales |= {f"model.layers.{n}.mlp.up_proj.weight_scale": torch.tensor(0.125) for n in range(10)}
    save_file(scales, path)
    return path


def test_the_table_of_k_v_and_q_is_in_the_order_of_layers(tmp_path: Path) -> None:
    path = write_scales(tmp_path / "x.safetensors")
    lines = succeed("show", path).out.splitlines()
    names = [f"model.layers.{layer}.self_attn.{role}_scale" for layer in range(10) for role in "kv"]
    assert [line.split()[0] for line in lines[2:]] == names
    assert len(succeed("show", path, "--all").out.splitlines()) == 2 + 30


@pytest.fixture(scope="module")
def stats(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("show") / "out"
    succeed("calibrate", model, "--data", data, *QUICK, "--out", out)
    return out / "stats.safetensors"


def test_tables_of_statistics_have_every_row(stats: Path) -> None:
    rows = succeed("show", stats, "--json").json
    out = succeed("show", stats).out
    lines = out.splitlines()
    assert lines[0] == "LlamaForCausalLM, 2 layers, float32 weights, computed in float32"
    assert any("64 tokens in 4 sequences of calib.jsonl; recipe kv" in line for line in lines)
    assert any(line.startswith("not measured: lm_head (") for line in lines)
    assert succeed("show", stats.parent).out == out
    layers = [line.split() for line in out.partition("K, V and q\n")[2].splitlines()[1:3]]
    for cells, row in zip(layers, rows["layers"], strict=True):
        assert [cells[0], cells[2]] == [str(row["layer"]), f"{row['k amax']:.5g}"]
    _, _, table = succeed("show", stats, "--all").out.partition("linears\n")
    shown = [line.split()[0] for line in table.splitlines()[1 : 1 + len(rows["linears"])]]
    assert shown == [row["linear"] for row in rows["linears"]]


def test_statistics_are_shown_without_torch(stats: Path) -> None:
    (shown,) = run_apart(("show", stats, "--json"))
    assert shown.code == 0
    assert SLOW.isdisjoint(shown.imported)
    assert json.loads(shown.out) == succeed("show", stats, "--json").json


@pytest.mark.parametrize("form", ["kv-scales", "rfc"])
def test_a_folder_with_one_file_of_scales_stands_for_the_file(
    stats: Path, model: Path, form: str, tmp_path: Path
) -> None:
    succeed("export", stats, "--format", form, "--out", tmp_path)
    (file,) = tmp_path.iterdir()
    shown, checked = (
        [run(command, path, *more, "--json").json[key] for path in (file, tmp_path)]
        for command, key, *more in (("show", "scales"), ("check", "engines", "--model", model))
    )
    assert shown[0] == shown[1]
    assert checked[0] == checked[1]
