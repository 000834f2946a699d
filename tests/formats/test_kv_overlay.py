"""The KV overlay: its config, its tensors, and transformers loading it."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
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
