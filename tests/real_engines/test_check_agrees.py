"""What `check` says is what vLLM does on a CPU, and what SGLang's own JSON loader returns."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8calib.engines.check import check_folder
from fp8calib.engines.replay.folder import open_folder
from fp8calib.engines.replay.verdicts import EngineReport
from fp8calib.engines.status import Status
from fp8calib.model.geometry_from_config import read_geometry
from tests import zoo
from tests.engines.check_handmade import (
    INDEX,
    MODELOPT,
    PER_HEAD,
    PER_TENSOR,
    QUARK,
    ask_sglang_json,
    plain_geometry,
)
from tests.engines.test_check_sglang_json import GOOD, change
from tests.real_engines.exports import WIDTH
from tests.real_engines.sglang_loader import Loader, extract_loader
from tests.real_engines.vllm_job import VllmServer

PATH = "model.layers.{}.self_attn"
SPLIT = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
IGNORED = [
    *(f"model.layers.{i}.self_attn.{name}" for i in range(2) for name in SPLIT),
    *(f"model.layers.{i}.mlp.{name}" for i in range(2) for name in MLP),
]
FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": IGNORED}
UNQUANTIZED = {**MODELOPT, "ignore": ["*"]}
NAN, INF = float("nan"), float("inf")
NAIVE = {**PER_TENSOR, "format": "naive-quantized"}
HEADS = [[[0.25]], [[0.5]]]

QUERY_HEADS = [[[0.5]]] * 4
PAIR = {"k_scale": 0.25, "v_scale": 0.5}
NO_GROUPS = {key: value for key, value in PER_HEAD.items() if key != "config_groups"}
SPARSE = {**PER_TENSOR, "sparsity_config": {"format": "sparse-24-bitmask", "targets": ["Linear"]}}
BLOCKS = {**FP8, "weight_block_size": [128, 128]}
MIXED = {**UNQUANTIZED, "quant_algo": "MIXED_PRECISION", "kv_cache_scheme": None}
MIXED["quantized_layers"] = {"lm_head": {"quant_algo": "FP8"}}
ROUNDED = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
ROUNDED |= {"packing_format": "auto_round:auto_gptq", "block_name_to_quantize": "none"}
EXCLUDED = {
    **QUARK,
    "exclude": ["re:.*"],
    "export": {**QUARK["export"], "pack_method": "reorder"},
}
LISTED = {
    **QUARK,
    "exclude": [*IGNORED, "lm_head"],
    "export": {**QUARK["export"], "pack_method": "reorder"},
}
ZERO_POINTS = {"k_zero_point": [0.0, 0.0], "v_zero_point": [0.0, 0.0]}
FOUR_BITS = {**PER_TENSOR, "kv_cache_scheme": {**PER_TENSOR["kv_cache_scheme"], "num_bits": 4}}

TEXT_TARGETS = {"g": {"targets": "Linear", "weights": PER_TENSOR["kv_cache_scheme"]}}
ODD = {"k_scale": 0.0123456, "v_scale": 0.5}

Scales = Mapping[str, object]

CASES: Mapping[str, tuple[object, Scales]] = {
    "bare pair": (None, {"k_scale": 0.25, "v_scale": 0.5}),
    "plain": (None, {}),
    "ct pair": (PER_TENSOR, {"k_scale": 0.25, "v_scale": 0.5}),
    "ct in a format for TGI": (NAIVE, {"k_scale": 0.25, "v_scale": 0.5}),
    "ct kv_scale": (PER_TENSOR, {"kv_scale": 0.25}),
    "ct k alone": (PER_TENSOR, {"k_scale": 0.25}),
    "ct odd numbers": (PER_TENSOR, {"k_scale": NAN, "v_scale": 0.0}),
    "ct heads": (PER_HEAD, {"k_scale": HEADS, "v_scale": HEADS}),
    "ct heads where one is wanted": (PER_TENSOR, {"k_scale": HEADS, "v_scale": HEADS}),
    "ct one number for heads": (PER_HEAD, {"k_scale": 0.25, "v_scale": 0.5}),
    "ct quark's names": (PER_TENSOR, {"k_proj.output_scale": 0.25, "v_proj.output_scale": 0.5}),
    "ct modelopt's names": (PER_TENSOR, {"k_proj.k_scale": 0.25, "v_proj.v_scale": 0.5}),
    "fp8 pair": (FP8, {"k_scale": 0.25, "v_scale": 0.5}),
    "fp8 kv_scale": (FP8, {"kv_scale": 0.25}),
    "fp8 v alone": (FP8, {"v_scale": 0.25}),
    "fp8 v zero": (FP8, {"k_scale": 0.25, "v_scale": 0.0}),
    "fp8 zeros": (FP8, {"k_scale": 0.0, "v_scale": 0.0}),
    "fp8 negative": (FP8, {"k_scale": -0.5, "v_scale": -0.5}),
    "fp8 infinite": (FP8, {"k_scale": INF, "v_scale": 0.5}),
    "ct v alone": (PER_TENSOR, {"v_scale": 0.5}),
    "ct no scale at all": (PER_TENSOR, {}),
    "ct infinite and negative": (PER_TENSOR, {"k_scale": INF, "v_scale": -0.5}),
    "ct empty groups": ({**PER_TENSOR, "config_groups": {}}, {"k_scale": 0.25, "v_scale": 0.5}),
    "ct heads without groups": (NO_GROUPS, {"k_scale": HEADS, "v_scale": HEADS}),
    "ct scheme of 4 bits": (FOUR_BITS, {"k_scale": 0.25, "v_scale": 0.5}),
    "ct hunyuan's names": (PER_TENSOR, {"k_cache.scale": 0.25, "v_cache.scale": 0.5}),
    "ct names of the inside": (PER_TENSOR, {"attn.k_scale": 0.25, "attn.v_scale": 0.5}),
    "ct q": (PER_TENSOR, {"k_scale": 0.25, "v_scale": 0.5, "q.scale": 2.0}),
    "ct q per head where one is wanted": (PER_TENSOR, {**PAIR, "q_scale": QUERY_HEADS}),
    "ct heads with q": (PER_HEAD, {"k_scale": HEADS, "v_scale": HEADS, "q_scale": QUERY_HEADS}),
    "ct probabilities": (PER_TENSOR, {**PAIR, "prob_output_scale": 0.5}),
    "fp8 probabilities": (FP8, {**PAIR, "prob_output_scale": 0.5}),
    "fp8 k alone": (FP8, {"k_scale": 0.25}),
    "fp8 no number": (FP8, {"k_scale": NAN, "v_scale": 0.5}),
    "fp8 quark's names": (FP8, {"k_proj.output_scale": 0.25, "v_proj.output_scale": 0.5}),
    "fp8 heads": (FP8, {"k_scale": HEADS, "v_scale": HEADS}),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, PAIR),
    "ct in other letters": ({**PER_TENSOR, "quant_method": "Compressed_Tensors"}, PAIR),
    "ct sparse": (SPARSE, PAIR),
    "ct groups that are none": ({**PER_TENSOR, "config_groups": None}, PAIR),
    "ct zero points per head": (PER_TENSOR, {**PAIR, **ZERO_POINTS}),
    "fp8 static in blocks": (BLOCKS, PAIR),
    "auto-round": (ROUNDED, PAIR),
    "quark that excludes all": (EXCLUDED, PAIR),
    "modelopt mixed without kv": (MIXED, {"k_proj.k_scale": 0.25, "v_proj.v_scale": 0.5}),
    "modelopt probabilities": (UNQUANTIZED, {**PAIR, "prob_output_scale": 0.5}),
    "modelopt pair": (UNQUANTIZED, {"k_proj.k_scale": 0.25, "v_proj.v_scale": 0.5}),
    "ct odd number": (PER_TENSOR, ODD),
    "fp8 odd number": (FP8, ODD),
    "modelopt odd number": (UNQUANTIZED, ODD),
    "quark odd number": (LISTED, {"k_proj.output_scale": 0.0123456, "v_proj.output_scale": 0.5}),
    "fp8 of deepseek_v4": ({**FP8, "quant_method": "deepseek_v4_fp8"}, ODD),
    "ct ignore null": ({**PER_TENSOR, "ignore": None}, PAIR),
    "ct ignore a text": ({**PER_TENSOR, "ignore": "re:.*"}, PAIR),
    "ct targets a text": ({**PER_TENSOR, "config_groups": TEXT_TARGETS}, PAIR),
    "ct targets a text, nothing ignored": (
        {**PER_TENSOR, "config_groups": TEXT_TARGETS, "ignore": []},
        PAIR,
    ),
    "modelopt ignore null": ({**MODELOPT, "ignore": None}, PAIR),
    "ct q under its projection": (PER_TENSOR, {**PAIR, "q_proj.q_scale": 0.5}),
    "ct zero point under a projection": (PER_TENSOR, {**PAIR, "k_proj.k_zero_point": 0.0}),
    "ct another spelling": (PER_TENSOR, {**PAIR, "K_scale": 0.5}),
    "ct scale of the cache": (PER_TENSOR, {**PAIR, "k_cache_scale": 0.5}),
    "ct scale of an input": (PER_TENSOR, {**PAIR, "o_proj.input_scale": 0.5}),
    "fp8 scale of a weight": (FP8, {**PAIR, "o_proj.weight_scale": 0.5}),
    "fp8 zero points": (FP8, {**PAIR, "k_zero_point": 0.0}),
    "modelopt kv only": (
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
        {"k_proj.k_scale": 0.25, "v_proj.v_scale": 0.5},
    ),
}

UNKNOWN = {
    *("ct groups that are none", "ct ignore null", "ct ignore a text", "ct targets a text"),
    *("ct targets a text, nothing ignored", "fp8 static in blocks", "modelopt ignore null"),
}
"""Configs that no tool writes: `check` cannot tell what vLLM does with them."""


def _save(folder: Path, quantization: object, scales: Scales) -> None:
    zoo.save("llama", folder, **WIDTH)
    tensors = load_file(folder / "model.safetensors")
    for index in range(2):
        for suffix, number in scales.items():
            value = torch.tensor(number, dtype=torch.float32)
            tensors[f"{PATH.format(index)}.{suffix}"] = value.reshape(value.shape or (1,))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))


def _ask(folder: Path) -> EngineReport:
    opened = open_folder(folder)
    geometry = read_geometry(folder, opened.config)
    return check_folder(opened, geometry, ["vllm==0.32"], 1).engines["vllm==0.32"]


def _finite(numbers: list[float]) -> float | None:
    """Give what `check` tells of numbers: the largest, and none where one is no number."""
    return max(numbers) if all(map(math.isfinite, numbers)) else None


@pytest.mark.parametrize("name", CASES)
def test_vllm_holds_what_check_says(tmp_path: Path, vllm: VllmServer, name: str) -> None:
    folder = tmp_path / "case" / "model"
    folder.parent.mkdir()
    _save(folder, *CASES[name])
    report = _ask(folder)
    assert bool(report.unknown) is (name in UNKNOWN)
    if report.unknown:
        return

    answer = vllm(folder, kv_cache_dtype="fp8", dtype="bfloat16")

    is_refused = report.layers[0].k.status is Status.REFUSED
    assert bool(answer.error) == is_refused, answer.error
    if not is_refused:
        held = {i: (_finite(k), _finite(v)) for i, (k, v) in answer.scales().items()}
        assert held == {layer.layer: (layer.k.value, layer.v.value) for layer in report.layers}


@pytest.mark.parametrize(("value", "dtype"), [(2e-8, "float16"), (7e4, "float16"), (0.1, "auto")])
def test_vllm_rounds_scales_as_check_says(
    tmp_path: Path, vllm: VllmServer, value: float, dtype: str
) -> None:
    folder = tmp_path / "case" / "model"
    folder.parent.mkdir()
    _save(folder, FP8, {"k_scale": value, "v_scale": value})
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = "float32" if dtype == "auto" else dtype
    (folder / "config.json").write_text(json.dumps(config))
    (layer, _) = _ask(folder).layers

    answer = vllm(folder, kv_cache_dtype="fp8", dtype=dtype)

    assert bool(answer.error) == (layer.k.status is Status.REFUSED), answer.error
    if not answer.error:
        assert _finite(answer.scales()[0][0]) == layer.k.value


@pytest.mark.parametrize("algorithm", ["FP8", "MXFP8", None])
def test_vllm_reads_modelopts_own_file_where_it_is_alone(
    tmp_path: Path, vllm: VllmServer, algorithm: str | None
) -> None:
    folder = tmp_path / "case" / "model"
    folder.parent.mkdir()
    _save(folder, None, {"k_proj.k_scale": 0.25, "v_proj.v_scale": 0.5})
    section = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["*"]}
    side = {"producer": {"name": "modelopt"}, "quantization": section}
    (folder / "hf_quant_config.json").write_text(json.dumps(side))

    answer = vllm(folder, kv_cache_dtype="fp8", dtype="bfloat16")

    assert bool(answer.error) == (algorithm != "FP8"), answer.error
    assert {layer.k.status for layer in _ask(folder).layers} == {
        Status.REFUSED if answer.error else Status.USED
    }
    assert answer.scales() == ({} if answer.error else {0: ([0.25], [0.5]), 1: ([0.25], [0.5])})


def test_vllm_does_not_open_what_the_index_does_not_name(tmp_path: Path, vllm: VllmServer) -> None:
    folder = tmp_path / "case" / "model"
    folder.parent.mkdir()
    _save(folder, PER_TENSOR, {"k_scale": 0.25, "v_scale": 0.5})
    tensors = load_file(folder / "model.safetensors")
    scales = {name: value for name, value in tensors.items() if name.endswith("_scale")}
    weights = {name: value for name, value in tensors.items() if name not in scales}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(scales, folder / "kv_scales.safetensors", metadata={"format": "pt"})
    weight_map = dict.fromkeys(weights, "model.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    answer = vllm(folder, kv_cache_dtype="fp8", dtype="bfloat16")

    assert answer.scales() == {0: ([1.0], [1.0]), 1: ([1.0], [1.0])}
    assert {layer.k.status for layer in _ask(folder).layers} == {Status.DEFAULTED}


def test_vllm_takes_scales_for_fnuz_as_they_stand(tmp_path: Path, vllm: VllmServer) -> None:
    folder = tmp_path / "case" / "model"
    folder.parent.mkdir()
    _save(folder, PER_TENSOR, PAIR)
    tensors = load_file(folder / "model.safetensors")
    metadata = {"format": "pt", "fp8calib.kv_cache_dtype": "float8_e4m3fnuz"}
    save_file(tensors, folder / "model.safetensors", metadata=metadata)

    answer = vllm(folder, kv_cache_dtype="fp8", dtype="bfloat16")

    (layer, _) = _ask(folder).layers
    assert answer.scales()[0] == ([layer.k.value], [layer.v.value]) == ([0.25], [0.5])
    assert layer.k.status is layer.v.status is Status.MISREAD


def test_vllm_refuses_e5m2_with_scales(tmp_path: Path, vllm: VllmServer) -> None:
    folder = tmp_path / "case" / "model"
    folder.parent.mkdir()
    _save(folder, PER_TENSOR, PAIR)

    answer = vllm(folder, kv_cache_dtype="fp8_e5m2", dtype="bfloat16")

    assert "e5m2" in answer.error


def test_vllm_refuses_an_index_that_names_a_missing_file(tmp_path: Path, vllm: VllmServer) -> None:
    folder = tmp_path / "case" / "model"
    folder.parent.mkdir()
    _save(folder, PER_TENSOR, PAIR)
    weight_map = dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")
    weight_map["model.layers.0.self_attn.k_scale"] = "kv_scales.safetensors"
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    answer = vllm(folder, kv_cache_dtype="fp8", dtype="bfloat16")

    assert answer.error
    assert {layer.k.status for layer in _ask(folder).layers} == {Status.REFUSED}


FACTORS = (
    '{"0": {"0": 0.05, "1": 0.04}}',
    '{"rank0": {"0": 0.05, "1": 0.04}}',
    '{"0": {"0": true, "1": "0.1"}}',
    '{"00": {" 0": 1, "1.0": 0.1}}',
    '{"0": {"0": 7, "0": 1, "1": 0.1}}',
    '{"0": {"0": NaN, "1": 0}}',
    '{"0": {"0": [0.1, 0.2], "1": 0.1}}',
    '{"0": {"_comment": "x", "0": 0.1, "1": 0.1}}',
    '{"0": {"0": 0.1}}',
    '{"0": {"0": 0.1, "1": 0.1, "2": 0.1}}',
    '{"0": {"-1": 0.1, "0": 0.1}}',
    '{"0": {"1e0": 0.1, "0": 0.1}}',
    '{"0": {"0": 1e400, "1": -0.5}}',
    '{"0": {"0": 0.1, "1": 0.1}, "1": {"0": 0.2, "1": 0.1}}',
    "{}",
    "[]",
)
DOCUMENTS: list[Any] = [
    GOOD,
    change(model_type=None),
    change(model_type="qwen"),
    {"kv_cache": GOOD["kv_cache"]},
    change(dtype="float8_e4m3fnuz"),
    change(mlp={}, _comment=1),
]
TEXTS = [
    *(json.dumps(document) for document in DOCUMENTS),
    *(json.dumps(GOOD).replace('{"0": {"0": 0.05, "1": 0.04}}', text) for text in FACTORS),
    "",
    "\ufeff" + json.dumps(GOOD),
    "[" * 100_000,
]


@pytest.fixture(scope="module")
def loader() -> Loader:
    """Give SGLang's function."""
    return extract_loader()


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("number", range(len(TEXTS)))
def test_sglangs_loader_returns_what_check_says(
    tmp_path: Path, loader: Loader, number: int, tp: int
) -> None:
    path = tmp_path / "scales.json"
    path.write_text(TEXTS[number])
    ranks = [dict(loader(str(path), rank, tp, 2, "llama")) for rank in range(tp)]
    expected = {i: _finite([float(rank.get(i, 1.0)) for rank in ranks]) for i in range(2)}

    report = ask_sglang_json(path, plain_geometry(), tp)

    assert {layer.layer: layer.k.value for layer in report.layers} == expected
    is_empty = not any(ranks)
    assert all((layer.k.status is Status.DEFAULTED) == is_empty for layer in report.layers)
