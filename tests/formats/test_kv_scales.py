"""The file with only scale tensors."""

from __future__ import annotations

from pathlib import Path

from fp8calib.formats.compute import compute_kv_scales
from fp8calib.numerics.formats import E4M3FN
from tests.formats.handmade import (
    MEASURED,
    make_attention,
    make_geometry,
    make_kv_sites,
    make_stats,
    record_fit,
    write_scales,
)

GOLDEN = (
    b'{"__metadata__":{"format":"pt","fp8calib.fits":"%b",'
    b'"fp8calib.kv_cache_dtype":"float8_e4m3fn",'
    b'"fp8calib.measured_on":"%b"},'
    b'"transformer.h.0.attn.attn.k_scale":{"dtype":"F32","shape":[],"data_offsets":[0,4]},'
    b'"transformer.h.0.attn.attn.v_scale":{"dtype":"F32","shape":[],"data_offsets":[4,8]},'
    b'"transformer.h.0.attn.k_scale":{"dtype":"F32","shape":[],"data_offsets":[8,12]},'
    b'"transformer.h.0.attn.v_scale":{"dtype":"F32","shape":[],"data_offsets":[12,16]}}'
)


def test_the_file_is_these_bytes(tmp_path: Path) -> None:
    geometry = make_geometry([make_attention(0, checkpoint_module="transformer.h.0.attn")])
    table = compute_kv_scales(make_stats(geometry, make_kv_sites(geometry)), E4M3FN)
    write_scales("kv-scales", table, tmp_path / "kv_scales.safetensors")

    raw = (tmp_path / "kv_scales.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    records = tuple(text.replace('"', '\\"').encode() for text in (record_fit(1), MEASURED))
    assert raw[8 : 8 + length].rstrip() == GOLDEN % records
    assert raw[8 + length :] == bytes.fromhex("0000003f 0000403f 0000003f 0000403f")
