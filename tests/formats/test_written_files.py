"""Written files of scales: their bytes, and what json and transformers read of them."""

import json
import struct
from pathlib import Path

import pytest

from fp8calib.formats.compute import compute_kv_scales
from fp8calib.formats.dialect import WriteJob
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

JSON = """{
  "model_type": "llama",
  "kv_cache": {
    "dtype": "float8_e4m3fn",
    "scaling_factor": {
      "0": {
        "0": 0.25,
        "1": 2.0
      },
      "1": {
        "0": 0.75,
        "1": 0.0625
      }
    }
  },
  "_fp8calib": {
    "model": "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
    "data": "fedcba9876543210fedcba9876543210fedcba9876543210fedcba9876543210",
    "text_start": "fedcba9876543210"
  }
}
"""


def test_the_file_for_two_ranks_is_these_bytes(tmp_path: Path) -> None:
    write_scales("vllm-json", compute_kv_scales(plain_stats(), E4M3FN, tp=2), tmp_path / "a.json")
    assert (tmp_path / "a.json").read_text() == JSON


def test_numbers_that_are_no_json_are_refused(tmp_path: Path) -> None:
    job = WriteJob(table=compute_kv_scales(plain_stats(), E4M3FN))
    with pytest.raises(ValueError, match="not JSON compliant"):
        job.save_json(tmp_path / "a.json", {"scale": float("nan")})
    assert not (tmp_path / "a.json").exists()


HEADER = (
    b'{"__metadata__":{"format":"pt","fp8calib.fits":"%b",'
    b'"fp8calib.kv_cache_dtype":"float8_e4m3fn",'
    b'"fp8calib.measured_on":"%b"},'
    b'"transformer.h.0.attn.attn.k_scale":{"dtype":"F32","shape":[],"data_offsets":[0,4]},'
    b'"transformer.h.0.attn.attn.v_scale":{"dtype":"F32","shape":[],"data_offsets":[4,8]},'
    b'"transformer.h.0.attn.k_scale":{"dtype":"F32","shape":[],"data_offsets":[8,12]},'
    b'"transformer.h.0.attn.v_scale":{"dtype":"F32","shape":[],"data_offsets":[12,16]}}'
)


def test_the_file_of_tensors_is_these_bytes(tmp_path: Path) -> None:
    geometry = make_geometry([make_attention(0, checkpoint_module="transformer.h.0.attn")])
    table = compute_kv_scales(make_stats(geometry, make_kv_sites(geometry)), E4M3FN)
    write_scales("kv-scales", table, tmp_path / "kv_scales.safetensors")

    raw = (tmp_path / "kv_scales.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    records = tuple(text.replace('"', '\\"').encode() for text in (record_fit(1), MEASURED))
    assert raw[8 : 8 + length].rstrip() == HEADER % records
    assert raw[8 + length :] == bytes.fromhex("0000003f 0000403f 0000003f 0000403f")


def test_the_shard_of_scales_is_these_bytes(tmp_path: Path) -> None:
    stats = plain_stats()
    table = compute_kv_scales(stats, E4M3FN)
    left_out = write_scales(
        "kv-overlay", table, tmp_path / "out", source=save_source(stats, tmp_path / "model")
    )

    raw = (tmp_path / "out" / "model-00002-of-00002.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    names = [f"model.layers.{layer}.self_attn.{role}_scale" for layer in range(2) for role in "kv"]
    assert header == {
        "__metadata__": {
            "format": "pt",
            "fp8calib.fits": record_fit(2),
            "fp8calib.measured_on": MEASURED,
        },
        **{
            name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * place, 4 * place + 4]}
            for place, name in enumerate(names)
        },
    }
    assert raw[8 + length :] == bytes.fromhex("0000003f 0000403f 00000040 0000003d")
    assert left_out == {"model.gguf": "belongs to weights in another format"}
