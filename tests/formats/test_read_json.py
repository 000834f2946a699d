"""Read the JSON dialects, typed by hand as their tools print them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from fp8calib.errors import ModelError
from fp8calib.formats.read import FoundScales, read_scales
from fp8calib.formats.table import ScaleSource
from fp8calib.model.shapes import ModelGeometry, Role
from fp8calib.numerics.formats import E4M3FN, E4M3FNUZ
from tests.formats.handmade import hybrid_stats, make_attention, make_geometry, shared_stats

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


def test_integer_keys_are_the_form_of_vllm_and_a_rank_is_an_element(tmp_path: Path) -> None:
    found = _read(tmp_path, VLLM_TEXT)

    assert found.table.dialect == "vllm-json"
    assert (found.table.tp, found.table.per_head, found.table.fmt) == (2, False, E4M3FN)
    fp32 = 0.015223912894725800
    first = torch.tensor(fp32, dtype=torch.float32).item()
    assert _values(found) == {
        "model.layers.0.self_attn.k": [first, 0.5],
        "model.layers.0.self_attn.v": [first, 0.5],
        "model.layers.1.self_attn.k": [0.25, 2.0],
        "model.layers.1.self_attn.v": [0.25, 2.0],
    }
    assert {scale.values.dtype for scale in found.table.scales.values()} == {torch.float32}
    assert found.notes == ("one scale per layer is used for both k and v",)
    assert not found.has_weights


def test_rank_keys_are_the_form_of_the_rfc_in_any_order(tmp_path: Path) -> None:
    found = _read(tmp_path, RFC_TEXT)

    assert (found.table.dialect, found.table.tp) == ("rfc", 2)
    assert _values(found)["model.layers.0.self_attn.k"] == [1.0, 0.5]
    assert _values(found)["model.layers.1.self_attn.v"] == [0.25, 2.0]


def test_the_dtype_of_the_file_is_the_format_of_the_table(tmp_path: Path) -> None:
    document = _document({"0": {"0": 1.5, "1": 0.5}}, dtype="float8_e4m3fnuz")

    assert _read(tmp_path, document).table.fmt is E4M3FNUZ
    assert _values(_read(tmp_path, document))["model.layers.0.self_attn.k"] == [1.5]
    assert _read(tmp_path, document, source_fmt=E4M3FNUZ).table.fmt is E4M3FNUZ
    with pytest.raises(ModelError, match="states that its scales are for e4m3fnuz, not e4m3fn"):
        _read(tmp_path, document, source_fmt=E4M3FN)


@pytest.mark.parametrize("with_first", [True, False])
def test_layers_without_a_cache_may_be_listed_and_are_left_out(
    tmp_path: Path, with_first: bool
) -> None:
    layers = {"0": 1.0, "1": 0.5} if with_first else {"1": 0.5}
    document = _document({"0": layers}, model_type="qwen3_next")
    found = _read(tmp_path, document, hybrid_stats().geometry)

    assert _values(found) == {
        "model.layers.1.self_attn.k": [0.5],
        "model.layers.1.self_attn.v": [0.5],
    }


def test_layers_that_share_a_cache_may_be_missing_and_take_its_scale(tmp_path: Path) -> None:
    geometry = shared_stats().geometry
    found = _read(tmp_path, _document({"0": {"0": 0.5, "1": 2.0}}), geometry)

    assert _values(found)["model.layers.2.self_attn.k"] == [2.0]
    assert _values(found)["model.layers.3.self_attn.v"] == [0.5]
    origins = [found.table.scales[a.site(Role.K)].source for _, a in geometry.attentions()]
    assert origins == [
        ScaleSource.OBSERVED,
        ScaleSource.OBSERVED,
        ScaleSource.ABSENT,
        ScaleSource.ABSENT,
    ]


def test_a_shared_cache_that_is_read_with_another_scale_is_told(tmp_path: Path) -> None:
    layers = {"0": 0.5, "1": 2.0, "2": 2.0, "3": 0.75}
    found = _read(tmp_path, _document({"0": layers}), shared_stats().geometry)

    assert _values(found)["model.layers.3.self_attn.k"] == [0.75]
    (note,) = found.notes[1:]
    assert note.startswith("layer 3: the scales differ from those of the layer whose cache is read")
    assert note.endswith("an engine that uses them misreads the cache")
    assert found.table.scales[make_attention(3).site(Role.K)].source is ScaleSource.OBSERVED
    assert found.table.scales[make_attention(2).site(Role.K)].source is ScaleSource.SHARED


def test_a_model_type_of_null_fits_every_model_and_the_rfc_needs_none(tmp_path: Path) -> None:
    assert _read(tmp_path, _document({"0": LAYERS}, model_type=None)).table.tp == 1
    assert _read(tmp_path, _document({"rank0": LAYERS}, model_type="absent")).table.dialect == "rfc"


LAYERS = {"0": 1.0, "1": 1.0}
TWENTY = make_geometry([make_attention(index) for index in range(20)])
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


@pytest.mark.parametrize(
    ("layers", "geometry", "missing"),
    [
        ({"3"}, TWENTY, "layers 0-2, 4-19 (19 of 20 are missing)"),
        ({str(index) for index in range(20)} - {"7"}, TWENTY, "layer 7 (1 of 20 are missing)"),
        # a producer is not excused by the layers that share its cache
        ({"0", "2", "3"}, shared_stats().geometry, "layer 1 (1 of 2 are missing)"),
    ],
)
def test_all_missing_layers_are_named(
    tmp_path: Path, layers: set[str], geometry: ModelGeometry, missing: str
) -> None:
    message = _refusal(tmp_path, _document({"0": dict.fromkeys(layers, 1.0)}), geometry)
    assert message == f"there is no KV scale for {missing}"


def test_the_smallest_scale_of_all_is_read(tmp_path: Path) -> None:
    text = RFC_TEXT.replace('"rank1": {"0": 0.5', f'"rank1": {{"0": {2.0**-126!r}')
    found = _read(tmp_path, text)
    assert _values(found)["model.layers.0.self_attn.k"] == [1.0, 2.0**-126]


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "scales.json").write_bytes(b'{"kv_cache": "\xff"}')
    with pytest.raises(ModelError, match="cannot be read as JSON: 'utf-8' codec"):
        read_scales(tmp_path / "scales.json", TWO_LAYERS)


def test_a_file_too_large_for_scales_is_not_read_into_memory(tmp_path: Path) -> None:
    with (tmp_path / "scales.json").open("wb") as file:
        file.truncate(100_000_001)
    with pytest.raises(ModelError, match="cannot be read as JSON: larger than 100 MB"):
        read_scales(tmp_path / "scales.json", TWO_LAYERS)
