"""The KV overlay: its config, its tensors, and transformers loading it."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fp8calib.calibration.statistic import SiteStats
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.formats.compute import compute_kv_scales
from fp8calib.model.shapes import Role
from fp8calib.numerics.formats import E4M3FN
from tests.formats.handmade import (
    MEASURED,
    make_attention,
    make_geometry,
    make_kv_sites,
    make_stats,
    plain_stats,
    record_fit,
    save_source,
    write_scales,
)
from tests.zoo import save

CONFIG = """{"quant_method":"compressed-tensors","format":"naive-quantized",
 "quantization_status":"compressed","ignore":["re:.*(?<!\\\\.attn)$"],
 "config_groups":{"group_0":{"targets":["re:^no-module$"],"weights":{"num_bits":8,"type":"float",
   "strategy":"tensor","symmetric":true,"dynamic":false}}},
 "kv_cache_scheme":{"num_bits":8,"type":"float","strategy":"STRATEGY","dynamic":false,
   "symmetric":true}}"""


@pytest.mark.parametrize(("per_head", "strategy"), [(False, "tensor"), (True, "attn_head")])
def test_the_config_says_that_nothing_but_the_kv_cache_is_quantized(
    tmp_path: Path, per_head: bool, strategy: str
) -> None:
    stats = plain_stats()
    table = compute_kv_scales(stats, E4M3FN, per_head=per_head)
    write_scales(
        "kv-overlay", table, tmp_path / "out", source=save_source(stats, tmp_path / "model")
    )

    config = json.loads((tmp_path / "out" / "config.json").read_text())
    expected = json.loads(CONFIG.replace("STRATEGY", strategy))
    assert config == {"model_type": "llama", "quantization_config": expected}


def test_the_shard_of_scales_is_these_bytes(tmp_path: Path) -> None:
    stats = plain_stats()
    table = compute_kv_scales(stats, E4M3FN)
    left_out = write_scales(
        "kv-overlay", table, tmp_path / "out", source=save_source(stats, tmp_path / "model")
    )

    raw = (tmp_path / "out" / "model-00002-of-00002.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    assert header == {
        "__metadata__": {
            "format": "pt",
            "fp8calib.fits": record_fit(2),
            "fp8calib.measured_on": MEASURED,
        },
        "model.layers.0.self_attn.k_scale": _describe(0),
        "model.layers.0.self_attn.v_scale": _describe(4),
        "model.layers.1.self_attn.k_scale": _describe(8),
        "model.layers.1.self_attn.v_scale": _describe(12),
    }
    assert raw[8 + length :] == bytes.fromhex("0000003f 0000403f 00000040 0000003d")
    assert left_out == {"model.gguf": "belongs to weights in another format"}


def _describe(start: int) -> dict[str, object]:
    return {"dtype": "F32", "shape": [1], "data_offsets": [start, start + 4]}


def test_per_head_scales_are_stored_one_for_each_kv_head(tmp_path: Path) -> None:
    stats = plain_stats()
    table = compute_kv_scales(stats, E4M3FN, per_head=True, query=True)
    write_scales(
        "kv-overlay", table, tmp_path / "out", source=save_source(stats, tmp_path / "model")
    )

    scales = load_file(tmp_path / "out" / "model-00002-of-00002.safetensors")
    assert {name: tensor.flatten().tolist() for name, tensor in scales.items()} == {
        "model.layers.0.self_attn.k_scale": [0.25, 0.5],
        "model.layers.0.self_attn.v_scale": [0.125, 0.75],
        "model.layers.0.self_attn.q_scale": [0.5, 4.0, 1.0, 2.0],
        "model.layers.1.self_attn.k_scale": [2.0, 0.0625],
        "model.layers.1.self_attn.v_scale": [0.03125, 0.015625],
        "model.layers.1.self_attn.q_scale": [8.0, 1.0, 1.0, 1.0],
    }
    assert {tensor.shape[1:] for tensor in scales.values()} == {(1, 1)}


@pytest.mark.parametrize(
    ("model_type", "unlisted"),
    [("gpt2", {"h.0.attn.k_scale", "h.0.attn.v_scale"}), ("gptj", set())],
)
def test_names_that_vllm_refuses_in_gpt2_lie_in_a_file_that_the_index_does_not_list(
    tmp_path: Path, model_type: str, unlisted: set[str]
) -> None:
    attention = make_attention(0, checkpoint_module="h.0.attn")
    geometry = make_geometry([attention], model_type=model_type)
    stats = make_stats(geometry, make_kv_sites(geometry))
    table = compute_kv_scales(stats, E4M3FN)
    folder = tmp_path / "out"
    write_scales("kv-overlay", table, folder, source=save_source(stats, tmp_path / "model"))

    listed = load_file(folder / "model-00002-of-00002.safetensors")
    side = folder / "kv_scales.safetensors"
    beside = load_file(side) if side.exists() else {}
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(beside) == unlisted
    assert {name for name in index if name.endswith("_scale")} == set(listed)
    assert {name: scale.tolist() for name, scale in (listed | beside).items()} == {
        "h.0.attn.k_scale": [0.5],
        "h.0.attn.v_scale": [0.75],
        "h.0.attn.attn.k_scale": [0.5],
        "h.0.attn.attn.v_scale": [0.75],
    }


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_transformers_loads_every_scale_bit_for_bit(
    tmp_path: Path, family: str, per_head: bool
) -> None:
    pytest.importorskip("compressed_tensors")
    save(family, tmp_path / "model")
    geometry = make_geometry([make_attention(0), make_attention(1)], model_type=family)
    torch.manual_seed(0)
    sites = {
        attention.site(role): SiteStats(count=8, amax=torch.rand(2) * 30)
        for _, attention in geometry.attentions()
        for role in (Role.K, Role.V)
    }
    table = compute_kv_scales(make_stats(geometry, sites), E4M3FN, per_head=per_head)
    with Checkpoint.open(tmp_path / "model") as source:
        write_scales("kv-overlay", table, tmp_path / "out", source=source)

    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)

    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    state = model.state_dict()
    for site, seen in sites.items():
        stored = state[f"{site.module}.{site.role}_scale"]
        expected = seen.amax / 448 if per_head else seen.amax.max() / 448
        assert stored.dtype is torch.float32
        assert stored.flatten().equal(expected.flatten()), site
