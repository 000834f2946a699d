"""Read the JSON dialects, typed by hand as their tools print them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from fp8calib.errors import ModelError
from fp8calib.formats.read import FoundScales, read_scales
from fp8calib.formats.table import ScaleSource
from fp8calib.model.shapes import ModelGeometry, Role
from tests.formats.handmade import make_attention, make_geometry, shared_stats

TWO_LAYERS = make_geometry([make_attention(0), make_attention(1)])

VLLM_TEXT = """{"model_type":"llama","kv_cache":{"dtype":"float8_e4m3fn","scaling_factor":{
 "0":{"0":0.0152239128947258,"1":0.25},"1":{"0":0.5,"1":2}}}}"""

RFC_TEXT = """{
  "model_type": "llama",
  "kv_cache": {
    "dtype": "float8_e4m3fn",
    "scaling_factor": {"rank1": {"0": 0.5, "1": 2.0}, "rank0": {"0": 1.0, "1": 0.25}}
  },
  "mlp": {
    "activation": {"dtype": "bfloat16", "target_dtype": "float8_e4m3fn", "scaling_factor": {
      "rank0": {"0": {"gate_proj": 3.0}}, "rank1": {"0": {"gate_proj": 3.0}}}},
    "weight": {"dtype": "float8_e4m3fn", "scaling_factor": {}}
  },
  "quantized_weights": {"rank0": "rfc.tp2.rank0.safetensors"}
}"""


def _document(factors: object, **changes: object) -> dict[str, object]:
    kv_cache = {"dtype": changes.pop("dtype", "float8_e4m3fn"), "scaling_factor": factors}
    document = {"model_type": "llama", "kv_cache": kv_cache} | changes
    return {key: value for key, value in document.items() if value != "absent"}


def _read(
    path: Path, document: object, geometry: ModelGeometry = TWO_LAYERS, **options: str
) -> FoundScales:
    file = path / "scales.json"
    file.write_text(document if isinstance(document, str) else json.dumps(document))
    return read_scales(file, geometry, **options)


def _values(found: FoundScales) -> Mapping[str, list[float]]:
    return {str(site): scale.values.tolist() for site, scale in found.table.scales.items()}


def _refusal(path: Path, document: object, geometry: ModelGeometry = TWO_LAYERS) -> str:
    with pytest.raises(ModelError) as caught:
        _read(path, document, geometry)
    assert caught.value.message.startswith(f"{path / 'scales.json'}: ")
    return caught.value.message.removeprefix(f"{path / 'scales.json'}: ")


def test_a_shared_cache_that_is_read_with_another_scale_is_told(tmp_path: Path) -> None:
    layers = {"0": 0.5, "1": 2.0, "2": 2.0, "3": 0.75}
    found = _read(tmp_path, _document({"0": layers}), shared_stats().geometry)

    assert _values(found)["model.layers.3.self_attn.k"] == [0.75]
    (note,) = found.notes[1:]
    assert note.startswith("layer 3: the scales differ from those of the layer whose cache is read")
    assert note.endswith("an engine that uses them misreads the cache")
    assert found.table.scales[make_attention(3).site(Role.K)].source is ScaleSource.OBSERVED
    assert found.table.scales[make_attention(2).site(Role.K)].source is ScaleSource.SHARED


LAYERS = {"0": 1.0, "1": 1.0}
NOT_JSON = "cannot be read as JSON: "
NO_FACTORS = "there is no `scaling_factor` object in `kv_cache`"


def _write_number(number: str) -> str:
    return RFC_TEXT.replace('"rank1": {"0": 0.5', f'"rank1": {{"0": {number}')


REFUSED: list[tuple[object, str]] = [
    *(
        (_document({"0": {"0": 0.5, "1": value}}), f"layer 1 of rank 0: {value!r} is not a number")
        for value in (True, "0.1", None, [0.5, 0.5], {"k": 1.0})
    ),
    *(
        (_write_number(number), f"layer 0 of rank1: {shown} is not a scale")
        for number, shown in (
            *(("NaN", "nan"), ("Infinity", "inf"), ("-Infinity", "-inf"), ("0", "0.0")),
            *(("-0.25", "-0.25"), ("1e400", "inf"), ("1e39", "inf")),
        )
    ),
    *(
        (_write_number(number), f"layer 0 of rank1: {number} is too small for a scale")
        for number in ("1e-60", "1e-45", "1.17e-38")
    ),
    (_write_number("1" + "0" * 400), "layer 0 of rank1: the number is too large for a scale"),
    # keys
    *(
        (VLLM_TEXT.replace(old, new), f"{NOT_JSON}the key '{key}' occurs twice")
        for old, new, key in (
            ('"1":0.25', '"0":0.25', "0"),
            ('"1":{"0":0.5', '"0":{"0":0.5', "0"),
            ('"kv_cache":', '"model_type":"llama","kv_cache":', "model_type"),
        )
    ),
    *(
        (
            _document(dict.fromkeys(keys, LAYERS)),
            f"the keys of kv_cache.scaling_factor are not ranks: {', '.join(map(repr, keys))}",
        )
        for keys in (
            *(["0", "rank1"], ["rank0", "1"], ["00"], [" 0"], ["0.0"], ["rank00"], ["Rank0"]),
            *(["-1"], ["_comment", "0"]),  # a comment among ranks is refused by engines too
        )
    ),
    *(
        (
            _document({"0": {key: 1.0, "1": 1.0}}),
            f"kv_cache.scaling_factor.0: not layer indices: {key!a}",
        )
        for key in ("00", "0.0", " 0", "layer0", "\u0660", "_comment")
    ),
    # ranks and layers
    (
        _document(dict.fromkeys(("rank0", "rank2", "rank3"), LAYERS)),
        "rank 1 is missing; there is only ranks 0, 2, 3",
    ),
    (_document({"7": LAYERS}), "rank 0 is missing; there is only rank 7"),
    (
        _document({"0": {**LAYERS, "2": 1.0}}),
        "there are scales for layer 2, but the model has 2 layers",
    ),
    (
        _document({"0": LAYERS, "1": {"0": 1.0}}),
        "layer 1: in only one of rank 0 and rank 1",
    ),
    *(
        (
            _document({"rank0": layers}),
            f"kv_cache.scaling_factor.rank0 is not an object of layers: {layers!r}",
        )
        for layers in ([0.5, 0.5], 1.0, None)
    ),
    # what stands around them
    (_document({"0": LAYERS}, model_type="absent"), "there is no `model_type`"),
    *(
        (
            _document({"0": LAYERS}, model_type=model_type),
            f"model_type is {model_type!r}, the model's is 'llama'",
        )
        for model_type in ("qwen2", 5, ["llama"])
    ),
    *(
        (_document({"0": LAYERS}, dtype=dtype), f"kv_cache.dtype is {dtype!r}")
        for dtype in ("float8_e5m2", "fp8", "e4m3fn", None, 8, ["float8_e4m3fn"])
    ),
    *((_document(factors), NO_FACTORS) for factors in (None, {}, [], "absent", 1.0)),
    *(({"kv_cache": value}, "there is no `kv_cache` object") for value in (None, [], "x")),
    *((text, NOT_JSON) for text in ("", "{", VLLM_TEXT[:-20], "[1", "\ufeff{}", "not JSON")),
    ("[1.0, 2.0]", "not a JSON object"),
    ('{"kv_cache": ' + "[" * 200_000, f"{NOT_JSON}nested too deeply"),
]
"""Documents or texts, and the message, or how it begins."""


@pytest.mark.parametrize(("document", "message"), REFUSED)
def test_what_holds_no_scales_of_the_model_is_refused(
    tmp_path: Path, document: object, message: str
) -> None:
    found = _refusal(tmp_path, document)
    assert found == message or (message == NOT_JSON and found.startswith(message))


def test_a_file_too_large_for_scales_is_not_read_into_memory(tmp_path: Path) -> None:
    with (tmp_path / "scales.json").open("wb") as file:
        file.truncate(100_000_001)
    with pytest.raises(ModelError, match="cannot be read as JSON: larger than 100 MB"):
        read_scales(tmp_path / "scales.json", TWO_LAYERS)
