"""`export`: from statistics alone, several shards, and the weights of every rank in FP8."""

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import zoo
from tests.cli.conftest import ALL_FORMATS, QUICK, write_rows
from tests.cli.program import Outcome, fail, snapshot, succeed
from tests.int4_by_hand import quantize


@pytest.mark.parametrize("rule", ["percentile:99", "mse", "headroom:1.5"])
def test_calibrate_and_export_follow_a_rule_alike(
    calibrated: tuple[Path, Outcome], model: Path, data: Path, tmp_path: Path, rule: str
) -> None:
    stats = calibrated[0] / "stats.safetensors"
    options = [part for name in ALL_FORMATS for part in ("--format", name)]
    options += ["--tp", "1", "--tp", "2", "--query-scale", "yes", "--rule", rule, "--json"]
    command = ("calibrate", model, "--data", data, *QUICK, *options, "--out", tmp_path / "c")
    report = succeed(*command).json
    exported = succeed("export", stats, *options, "--model", model, "--out", tmp_path / "e").json
    direct, again = snapshot(tmp_path / "c"), snapshot(tmp_path / "e")
    assert {path: direct[path] for path in again} == again
    assert report["rule"] == rule
    assert (tmp_path / "c" / "stats.safetensors").read_bytes() == stats.read_bytes()
    notes = [text for text in report["warnings"] if "needs a histogram" in text]
    assert notes == [text for text in exported["warnings"] if "needs a histogram" in text]
    why = f"{rule} needs a histogram, which is missing: amax is used"
    kept = f"model.layers.0.self_attn.q and 1 more: {why}"
    assert notes == ([] if rule.startswith("headroom") else [kept])


def test_joined_shards_are_the_file_of_one_run(model: Path, data: Path, tmp_path: Path) -> None:
    command = ("calibrate", model, "--data", data, *QUICK, "--samples", 6)
    for index in (1, 2):
        made = succeed(*command, "--shard", f"{index}/2", "--out", tmp_path / str(index))
        (tokens,) = re.findall(r"([\d,]+) tokens in 3 sequences", made.out)
        assert made.err.count("--samples takes one value: the last one counts") == 1
        report = json.loads((tmp_path / str(index) / "report.json").read_text())
        assert int(tokens.replace(",", "")) == report["tokens"]
    succeed(*command, "--out", tmp_path / "whole")
    whole = (tmp_path / "whole" / "stats.safetensors").read_bytes()
    names = [tmp_path / "2", tmp_path / "1" / "stats.safetensors"]
    out = ("--out", tmp_path / "all")
    for order in (names, names[::-1]):
        outcome = succeed("export", *order, *out, "--force", "--json")
        assert snapshot(tmp_path / "all").keys() == {"stats.safetensors"}
        assert (tmp_path / "all" / "stats.safetensors").read_bytes() == whole
        assert outcome.json["files"] == ["stats.safetensors"]
        assert outcome.json["shards"] == list(map(str, order))
    assert "use --force to replace its files" in fail(2, "export", *names, *out)
    assert succeed("export", *names, *out, "--force").out.startswith("joined 2 shards\nwritten to ")


# --- the weights of every rank, cut and quantized by hand ----------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calibrate a llama: `model` and `out` in a folder."""
    folder = tmp_path_factory.mktemp("llama")
    zoo.save("llama", folder / "model")
    rows = write_rows(folder / "rows.jsonl", [{"input_ids": [*range(3, 33)]}] * 4)
    size = ("--samples", 4, "--seq-len", 30, "--dtype", "float32", "--recipe", "w8a8-static")
    command = ("calibrate", folder / "model", "--data", rows, *size, "--format", "rfc")
    succeed(*command, "--out", folder / "out")
    return folder


def export(llama: Path, model: Path, out: Path, *options: object) -> Any:
    """Export with weights, and give what the program says."""
    stats = llama / "out" / "stats.safetensors"
    command = ("export", stats, "--format", "rfc", "--with-weights", "--model", model)
    return succeed(*command, "--out", out, "--json", *options).json


def check_weight(stored: dict[str, torch.Tensor], name: str, expected: np.ndarray) -> None:
    """Compare codes and scale of one projection on one rank."""
    scale = np.float32(np.abs(expected).max()) / np.float32(448)
    assert stored[f"{name}.weight_scale"].dtype is torch.float32
    assert stored[f"{name}.weight_scale"].item() == scale, name
    codes = np.clip(expected / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    found = stored[f"{name}.weight"]
    assert found.dtype is torch.float8_e4m3fn
    assert np.array_equal(found.view(torch.uint8).numpy(), codes), name


def test_every_rank_has_its_part_and_its_scales(llama: Path, tmp_path: Path) -> None:
    weights = load_file(llama / "model" / "model.safetensors")
    files = export(llama, llama / "model", tmp_path / "rfc", "--tp", 1, "--tp", 2)["files"]
    names = [f"rfc.tp{tp}.rank{rank}.safetensors" for tp in (1, 2) for rank in range(tp)]
    assert files == sorted(["rfc.tp1.json", "rfc.tp2.json", *names])
    document = json.loads((tmp_path / "rfc" / "rfc.tp2.json").read_text())
    assert document["quantized_weights"] == {"rank0": names[1], "rank1": names[2]}
    for rank in range(2):
        stored = load_file(tmp_path / "rfc" / names[1 + rank])
        assert len(stored) == 2 * 7 * 3
        for path in ("model.layers.0", "model.layers.1"):
            for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj"):
                part = weights[f"{path}.{name}.weight"].chunk(2, 0)[rank]
                check_weight(stored, f"{path}.{name}", part.numpy())
            for name in ("self_attn.o_proj", "mlp.down_proj"):
                part = weights[f"{path}.{name}.weight"].chunk(2, 1)[rank]
                check_weight(stored, f"{path}.{name}", part.numpy())
            for section, module in (("mlp", "mlp"), ("attention", "self_attn")):
                for side, suffix in (("weight", "weight_scale"), ("activation", "input_scale")):
                    factors = document[section][side]["scaling_factor"][f"rank{rank}"]
                    for key, value in factors[path[-1]].items():
                        found = stored[f"{path}.{module}.{key}.{suffix}"].item()
                        assert found == pytest.approx(value, rel=1e-7)


def test_fnuz_codes_are_those_of_its_own_format(llama: Path, tmp_path: Path) -> None:
    export(llama, llama / "model", tmp_path / "rfc", "--fp8-dtype", "e4m3fnuz")
    stored = load_file(tmp_path / "rfc" / "rfc.tp1.rank0.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    whole = load_file(llama / "model" / "model.safetensors")[name].numpy()
    scale = np.float32(np.abs(whole).max()) / np.float32(240)
    expected = np.clip(whole / scale, -240, 240).astype(ml_dtypes.float8_e4m3fnuz)
    assert stored[name].dtype is torch.float8_e4m3fnuz
    assert np.array_equal(stored[name].view(torch.uint8).numpy(), expected.view(np.uint8))


def test_the_other_fingerprint_is_said_and_not_refused(llama: Path, tmp_path: Path) -> None:
    inputs = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
    quantize(llama / "model", tmp_path / "int4", inputs=inputs, packed=False)
    said = export(llama, tmp_path / "int4", tmp_path / "rfc")["warnings"]
    assert "so its int4 weights are assumed to come from it" in said[0]
    assert "different config.json" in said[0]
    assert "different weights" in said[0]


def test_what_is_not_quantized_is_rounded_to_fp8_as_ever(llama: Path, tmp_path: Path) -> None:
    """One weight has grown since it was calibrated: its scale is that of the weight at hand."""
    int4 = quantize(llama / "model", tmp_path / "int4", ignore="self_attn|layers.0.mlp.up_proj")
    grown = "model.layers.1.self_attn.o_proj"
    tensors = load_file(tmp_path / "int4" / "model.safetensors")
    tensors[f"{grown}.weight"] *= 4  # no other codes
    save_file(tensors, tmp_path / "int4" / "model.safetensors")
    export(llama, tmp_path / "int4", tmp_path / "int4-rfc", "--tp", 2)
    export(llama, llama / "model", tmp_path / "plain-rfc", "--tp", 2)
    for rank in range(2):
        name = f"rfc.tp2.rank{rank}.safetensors"
        found, plain = (load_file(tmp_path / folder / name) for folder in ("int4-rfc", "plain-rfc"))
        assert found.keys() == plain.keys()
        for key, value in plain.items():
            module, _, kind = key.rpartition(".")
            if f"{module}.weight" in int4 and kind != "input_scale":
                continue
            if key == f"{grown}.weight_scale":
                own = tensors[f"{grown}.weight"].numpy()[:, 16 * rank : 16 * rank + 16]
                assert found[key].item() == np.abs(own).max() / np.float32(448)
            else:
                assert torch.equal(found[key].float(), value.float()), key
