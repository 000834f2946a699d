"""Facts and contradictions in the config beside scales."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8calib.errors import ModelError
from fp8calib.formats.kv.config import CheckpointConfig, read_config
from tests.formats.handmade import make_attention, make_geometry

GEOMETRY = make_geometry([make_attention(0)])


def _read(folder: Path, config: object, name: str = "config.json") -> CheckpointConfig:
    (folder / name).write_text(config if isinstance(config, str) else json.dumps(config))
    return read_config(folder, GEOMETRY)


def _refusal(folder: Path, config: object, name: str = "config.json") -> str:
    with pytest.raises(ModelError) as caught:
        _read(folder, config, name)
    assert caught.value.message.startswith(f"{folder / name}: ")
    return caught.value.message.removeprefix(f"{folder / name}: ")


@pytest.mark.parametrize("dtype", ["float8_e5m2", "fp8", 8])
def test_tgis_key_names_no_other_format(tmp_path: Path, dtype: object) -> None:
    message = _refusal(tmp_path, {"kv_cache_torch_dtype": dtype})
    assert message == f"kv_cache_torch_dtype is {dtype!r}"


def test_a_config_around_the_decoders_may_have_another_type(tmp_path: Path) -> None:
    config = {"model_type": "llava", "text_config": {"hidden_size": 8}}
    assert _read(tmp_path, config) == CheckpointConfig()


@pytest.mark.parametrize(
    ("scheme", "shown"),
    [
        ({"num_bits": 8, "type": "int"}, "8 bits of 'int'"),
        ({"num_bits": 4, "type": "float"}, "4 bits of 'float'"),
        ({"type": "int"}, "8 bits of 'int'"),
    ],
)
def test_kv_schemes_other_than_fp8_are_refused(tmp_path: Path, scheme: object, shown: str) -> None:
    message = _refusal(tmp_path, {"quantization_config": {"kv_cache_scheme": scheme}})
    assert message == f"kv_cache_scheme is {shown}, not FP8"


@pytest.mark.parametrize("scheme", [None, "static", {}, {"num_bits": 8, "type": "float"}])
def test_kv_schemes_of_fp8_are_taken(tmp_path: Path, scheme: object) -> None:
    assert _read(tmp_path, {"quantization_config": {"kv_cache_scheme": scheme}}).fmt is None


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("config.json", "quantization"),
        ("config.json", "quantization_config"),
        ("hf_quant_config.json", "quantization"),
    ],
)
def test_other_kv_formats_of_modelopt_and_tensorrt_are_refused(
    tmp_path: Path, name: str, section: str
) -> None:
    message = _refusal(tmp_path, {section: {"kv_cache_quant_algo": "INT8"}}, name)
    assert message == "kv_cache_quant_algo is 'INT8', not FP8"
    for algorithm in ("FP8", "fp8", None):
        _read(tmp_path, {section: {"kv_cache_quant_algo": algorithm}}, name)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1, "a": 2}'])
@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
def test_a_config_that_cannot_be_read_is_refused(tmp_path: Path, name: str, text: str) -> None:
    expected = "not a JSON object" if text == "[]" else "cannot be read as JSON: "
    assert _refusal(tmp_path, text, name).startswith(expected)
