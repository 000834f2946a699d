"""Contradictions in the configs beside scales."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8calib.errors import ModelError
from fp8calib.formats.kv.config import read_config
from tests.formats.handmade import make_attention, make_geometry

GEOMETRY = make_geometry([make_attention(0)])
CONFIGS = ("config.json", "hf_quant_config.json")
INT8, FP8 = {"kv_cache_quant_algo": "INT8"}, {"kv_cache_quant_algo": "fp8"}
NOT_INT8 = "kv_cache_quant_algo is 'INT8', not FP8"
REFUSED: list[tuple[str, object, str]] = [
    *(
        ("config.json", {"kv_cache_torch_dtype": dtype}, f"kv_cache_torch_dtype is {dtype!r}")
        for dtype in ("float8_e5m2", "fp8", 8)
    ),
    *(
        (
            "config.json",
            {"quantization_config": {"kv_cache_scheme": scheme}},
            f"kv_cache_scheme is {shown}, not FP8",
        )
        for scheme, shown in (
            ({"num_bits": 4, "type": "float"}, "4 bits of 'float'"),
            ({"type": "int"}, "8 bits of 'int'"),
        )
    ),
    *(("config.json", {key: INT8}, NOT_INT8) for key in ("quantization", "quantization_config")),
    ("hf_quant_config.json", {"quantization": INT8}, NOT_INT8),
    *((name, [], "not a JSON object") for name in CONFIGS),
    *((name, '{"a": 1, "a": 2}', "cannot be read as JSON: the key 'a'") for name in CONFIGS),
]
"""The name of a file, its document or text, and how the message begins."""


def _write(path: Path, config: object) -> None:
    path.write_text(config if isinstance(config, str) else json.dumps(config))


@pytest.mark.parametrize(("name", "config", "message"), REFUSED)
def test_configs_of_another_cache_are_refused(
    tmp_path: Path, name: str, config: object, message: str
) -> None:
    _write(tmp_path / name, config)
    with pytest.raises(ModelError) as caught:
        read_config(tmp_path, GEOMETRY)
    assert caught.value.message.startswith(f"{tmp_path / name}: {message}")
