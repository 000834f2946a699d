"""Read scales of every form, made by hand, and refuse what is none.

`refusals.json` has what is refused, with the message: documents in JSON, configs beside scales,
rank files with the scales of their layers, and tensors beside the right ones (null: without it; a
number, or dtype, shape and values).
"""

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fp8calib.errors import ModelError, UsageError
from fp8calib.formats.compute import compute_kv_scales
from fp8calib.formats.read import has_kv_scales, read_scales
from fp8calib.formats.table import ScaleTable
from fp8calib.model.geometry import ModelGeometry, Role
from fp8calib.numerics.formats import E4M3FN
from tests.formats.handmade import (
    MODEL,
    latent_stats,
    make_attention,
    make_geometry,
    plain_stats,
    shared_stats,
    write_scales,
)

TWO_LAYERS = make_geometry([make_attention(0), make_attention(1)])
REFUSED: dict[str, Any] = json.loads(Path(__file__).with_name("refusals.json").read_text())
PATH = "model.layers.{}.self_attn."
Tensors = dict[str, torch.Tensor]


def refuse(path: Path, geometry: ModelGeometry = TWO_LAYERS) -> ModelError:
    with pytest.raises(ModelError) as caught:
        read_scales(path, geometry)
    assert caught.value.message.startswith(str(path if path.is_dir() else path.parent))
    return caught.value


def list_values(found: ScaleTable) -> Mapping[str, list[float]]:
    return {str(site): scale.values.tolist() for site, scale in found.scales.items()}


def pair(k: str = "k_scale", v: str = "v_scale", path: str = PATH) -> Tensors:
    """Name two scales a layer: 0.5 and 0.75, then 2.0 and 0.25."""
    values = ((0.5, 0.75), (2.0, 0.25))
    return {
        path.format(layer) + name: torch.tensor(value)
        for layer, numbers in enumerate(values)
        for name, value in zip((k, v), numbers, strict=True)
    }


EXPECTED = {
    "model.layers.0.self_attn.k": [0.5],
    "model.layers.0.self_attn.v": [0.75],
    "model.layers.1.self_attn.k": [2.0],
    "model.layers.1.self_attn.v": [0.25],
}


def save(folder: Path, tensors: Tensors, **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    if config:
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    return folder


# --- where scales are ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["missing", "missing.json", "missing/a.safetensors"])
def test_a_path_that_does_not_exist_is_a_usage_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / name)
    for path in (tmp_path / name, tmp_path / "link"):
        for call in (lambda p: read_scales(p, TWO_LAYERS), has_kv_scales):
            with pytest.raises(UsageError, match="no such file or folder"):
                call(path)


@pytest.mark.parametrize("name", ["model.bin", "scales", "scales.txt", "model.gguf", "a.yaml"])
def test_other_kinds_of_files_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(VLLM_TEXT)
    assert "not a scales file" in refuse(tmp_path / name).message


def test_a_folder_with_one_json_of_scales_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "kv_cache_scales.tp1.json").write_text(VLLM_TEXT)
    (tmp_path / "report.json").write_text('{"kv_cache": {}}')
    (tmp_path / "tokenizer.json").write_text('{"broken')
    assert has_kv_scales(tmp_path)
    assert read_scales(tmp_path, TWO_LAYERS).dialect == "vllm-json"

    (tmp_path / "kv_cache_scales.tp2.json").write_text(VLLM_TEXT)
    with pytest.raises(ModelError, match=r"several files .*tp1\.json, .*tp2\.json"):
        read_scales(tmp_path, TWO_LAYERS)


def test_a_shard_with_listed_scales_may_not_be_missing(tmp_path: Path) -> None:
    shards = {f"model-{layer}.safetensors": f".{layer}." for layer in range(2)}
    weight_map = {n: next(s for s, part in shards.items() if part in n) for n in pair()}
    for shard in shards:
        own = {name: scale for name, scale in pair().items() if weight_map[name] == shard}
        save_file(own, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for shard, told in (
        ("model-1", "2 scales that no file has (model.layers.1."),
        ("model-0", "4 sc"),
    ):
        (tmp_path / f"{shard}.safetensors").unlink()
        assert has_kv_scales(tmp_path)
        assert f"the index lists {told}" in refuse(tmp_path).message


@pytest.mark.parametrize(("name", "config", "message"), REFUSED["configs"])
def test_configs_of_another_cache_are_refused(
    tmp_path: Path, name: str, config: object, message: str
) -> None:
    save(tmp_path, pair(), quantization_config={})
    (tmp_path / name).write_text(config if isinstance(config, str) else json.dumps(config))
    with pytest.raises(ModelError) as caught:
        read_scales(tmp_path, TWO_LAYERS)
    assert caught.value.message.startswith(f"{tmp_path / name}: {message}")


# --- whose they are ------------------------------------------------------------------------------


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    save(tmp_path, pair(), model_type="mistral")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        assert "model_type is 'mistral', the model's is" in refuse(path).message


@pytest.mark.parametrize(
    "name",
    [
        "model.decoder.layers.0.self_attn.k_scale",
        "transformer.h.0.attn.k_scale",
        "mtp.layers.0.self_attn.k_scale",
        "self_attn.k_scale",
    ],
)
def test_scales_that_all_lie_elsewhere_are_of_another_model(tmp_path: Path, name: str) -> None:
    error = refuse(save(tmp_path / "a", {name: torch.tensor(0.5)}))
    assert f"{name} " in error.message
    assert "of another model" in error.message
    assert error.hint == "this model's attention is model.layers.0.self_attn"


def test_two_containers_that_fit_alike_are_refused(tmp_path: Path) -> None:
    names = [f"{root}.model.layers.0.self_attn.k_scale" for root in ("one", "two")]
    error = refuse(save(tmp_path / "a", {name: torch.tensor(0.5) for name in names}))
    assert "under one.model.layers, two.model.layers" in error.message


def test_scales_outside_the_decoder_are_told(tmp_path: Path) -> None:
    names = [f"mtp.layers.0.self_attn.{role}_scale" for role in "kv"]
    others = {name: torch.tensor(9.0) for name in names}
    found = read_scales(save(tmp_path / "a", pair() | others), TWO_LAYERS)
    assert list_values(found) == EXPECTED
    told = f"2 scales outside the decoder are ignored ({', '.join(names)})"
    assert found.notes == (told,)


@pytest.mark.parametrize("text", ["", "7", "[" * 100_000, "{}", '{"model": "aa"}'])
def test_a_damaged_word_on_the_model_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.safetensors"
    save_file(pair(), path, metadata={"fp8calib.measured_on": text})
    assert "a.safetensors: fp8calib.measured_on is damaged" in refuse(path).message


def test_a_damaged_word_in_a_json_is_refused(tmp_path: Path) -> None:
    path, stats = tmp_path / "a.json", plain_stats()
    write_scales("vllm-json", compute_kv_scales(stats, E4M3FN), path)
    document = json.loads(path.read_text())
    document["_fp8calib"]["model"] = "yes"
    path.write_text(json.dumps(document))
    assert "a.json: _fp8calib is damaged: not a fingerprint" in refuse(path, stats.geometry).message


def test_files_of_several_models_are_refused(tmp_path: Path) -> None:
    for layer, model in enumerate((MODEL, MODEL[::-1])):
        own = {name: scale for name, scale in pair().items() if f".{layer}." in name}
        metadata = {"fp8calib.measured_on": json.dumps({"model": model})}
        save_file(own, tmp_path / f"{layer}.safetensors", metadata=metadata)
    assert "scales of several models" in refuse(tmp_path).message


@pytest.mark.parametrize("dtype", ["float8_e5m2", "e4m3fn", ""])
def test_a_format_that_kv_scales_are_not_for_is_refused(tmp_path: Path, dtype: str) -> None:
    save_file(pair(), tmp_path / "a.safetensors", metadata={"fp8calib.kv_cache_dtype": dtype})
    assert "fp8calib.kv_cache_dtype is '" in refuse(tmp_path / "a.safetensors").message


def test_config_and_file_may_not_differ(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", pair(), kv_cache_torch_dtype="float8_e4m3fn")
    metadata = {"fp8calib.kv_cache_dtype": "float8_e4m3fnuz"}
    save_file(pair(), folder / "model.safetensors", metadata=metadata)
    assert "several formats: e4m3fn, e4m3fnuz" in refuse(folder).message


# --- tensors -------------------------------------------------------------------------------------


def make_tensor(described: Any) -> torch.Tensor:
    if not isinstance(described, list):
        return torch.tensor(described)
    dtype, shape, values = described
    numbers = torch.tensor(values, dtype=torch.float64)
    return numbers.reshape(shape if numbers.dim() else ()).expand(shape).to(getattr(torch, dtype))


@pytest.mark.parametrize("case", REFUSED["tensors"])
def test_what_is_no_scale_of_the_model_is_refused(tmp_path: Path, case: str) -> None:
    row = REFUSED["tensors"][case]
    stored: dict[str, Any] = {**pair(), **row["tensors"]}
    for name, described in row["tensors"].items():
        stored[name] = None if described is None else make_tensor(described).contiguous()
    error = refuse(save(tmp_path / "a", {n: x for n, x in stored.items() if x is not None}))
    assert error.message.endswith(row["message"])
    assert error.hint.startswith(row.get("hint", ""))


@pytest.mark.parametrize(
    ("config", "dialect"),
    [
        ({"kv_cache_torch_dtype": "float8_e4m3fn"}, "tgi"),
        ({"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": "static"}}, "autofp8"),
        ({}, "tgi"),
    ],
)
def test_one_kv_scale_fills_k_and_v(
    tmp_path: Path, config: dict[str, object], dialect: str
) -> None:
    singles = {PATH.format(i) + "kv_scale": torch.tensor(x) for i, x in enumerate((0.5, 2.0))}
    found = read_scales(save(tmp_path / "a", singles, **config), TWO_LAYERS)
    assert found.dialect == dialect
    assert list(list_values(found).values()) == [[0.5], [0.5], [2.0], [2.0]]
    assert found.notes == ("one scale per layer is used for both k and v",)
    heads = {name: torch.ones(2, 1, 1) for name in singles}
    error = refuse(save(tmp_path / "b", heads, **config))
    assert error.message.endswith("kv_scale is F32 of shape [2, 1, 1]")


def test_a_kv_scale_beside_k_and_v_is_their_maximum_or_refused(tmp_path: Path) -> None:
    right = {PATH.format(i) + "kv_scale": torch.tensor(x) for i, x in enumerate((0.75, 2.0))}
    assert list_values(read_scales(save(tmp_path / "a", pair() | right), TWO_LAYERS)) == EXPECTED
    wrong = {PATH.format(1) + "kv_scale": torch.tensor(0.25)}
    assert refuse(save(tmp_path / "b", pair() | wrong)).message.endswith(
        "model.layers.1.self_attn.kv_scale = 0.25 (model.safetensors) is not the larger of k_scale "
        "and v_scale beside it (2.0 and 0.25)"
    )


def test_the_same_scale_under_two_names_counts_once(tmp_path: Path) -> None:
    inner = pair(path=PATH + "attn.")
    assert list_values(read_scales(save(tmp_path / "a", pair() | inner), TWO_LAYERS)) == EXPECTED
    inner[PATH.format(0) + "attn.k_scale"] = torch.tensor(0.25)
    message = refuse(save(tmp_path / "b", pair() | inner)).message
    assert "two scales for model.layers.0.self_attn.k: " in message
    assert "model.layers.0.self_attn.attn.k_scale = 0.25 (model.safetensors)" in message


@pytest.mark.parametrize(("inner", "is_told"), [("{}_proj.", True), ("", False)])
def test_scales_of_expanded_heads_are_told(tmp_path: Path, inner: str, is_told: bool) -> None:
    """ModelOpt's own names imply where it measured."""
    names = [f"{inner.format(role)}{role}_scale" for role in "kv"]
    tensors = {PATH.format(0) + name: torch.tensor(0.5) for name in names}
    found = read_scales(save(tmp_path / "a", tensors), latent_stats().geometry)
    assert any("expanded to heads" in note for note in found.notes) is is_told


# --- JSON ----------------------------------------------------------------------------------------

VLLM_TEXT = """{"model_type":"llama","kv_cache":{"dtype":"float8_e4m3fn","scaling_factor":{
 "0":{"0":0.0152239128947258,"1":0.25},"1":{"0":0.5,"1":2}}}}"""
NUMBER = '"1":{"0":0.5'
NUMBERS = {
    **{
        number: f"{shown} is not a scale"
        for number, shown in (
            *(("NaN", "nan"), ("Infinity", "inf"), ("-Infinity", "-inf"), ("0", "0.0")),
            *(("-0.25", "-0.25"), ("1e400", "inf"), ("1e39", "inf"), ("1e-60", "0.0")),
            *(("1" + "0" * 400, "inf"), ("-1" + "0" * 400, "-inf")),
        )
    },
    **{x: f"{x} is too small for a scale" for x in ("2.803e-45", "1.17e-38")},
}
TEXTS = [
    *(
        (VLLM_TEXT.replace(NUMBER, f'"1":{{"0":{number}'), f"layer 0 of rank 1: {told}")
        for number, told in NUMBERS.items()
    ),
    *(
        (VLLM_TEXT.replace(old, new), f"cannot be read as JSON: the key '{key}' occurs twice")
        for old, new, key in (
            ('"1":0.25', '"0":0.25', "0"),
            (NUMBER, '"0":{"0":0.5', "0"),
            ('"kv_cache":', '"model_type":"llama","kv_cache":', "model_type"),
        )
    ),
    *(
        (text, "cannot be read as JSON: ")
        for text in ("", "{", VLLM_TEXT[:-20], "[1", "\ufeff{}", "not JSON")
    ),
    ("[1.0, 2.0]", "not a JSON object"),
    ('{"kv_cache": ' + "[" * 200_000, "cannot be read as JSON: nested too deeply"),
]


@pytest.mark.parametrize(("document", "message"), [*REFUSED["documents"], *TEXTS])
def test_json_without_scales_of_the_model_is_refused(
    tmp_path: Path, document: object, message: str
) -> None:
    path = tmp_path / "scales.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    told = refuse(path).message.removeprefix(f"{path}: ")
    assert told == message or (message.endswith(": ") and told.startswith(message))


def test_a_shared_cache_that_is_read_with_another_scale_is_told(tmp_path: Path) -> None:
    factors = {"0": {"0": 0.5, "1": 2.0, "2": 2.0, "3": 0.75}}
    kv_cache = {"dtype": "float8_e4m3fn", "scaling_factor": factors}
    (tmp_path / "a.json").write_text(json.dumps({"model_type": "llama", "kv_cache": kv_cache}))
    found = read_scales(tmp_path / "a.json", shared_stats().geometry)
    assert list_values(found)["model.layers.3.self_attn.k"] == [0.75]
    (note,) = found.notes[1:]
    assert note.startswith("layer 3: the scales differ from those of the layer whose cache is read")
    assert note.endswith("an engine that uses them misreads the cache")
    assert found.scales[make_attention(3).site(Role.K)].source == "observed"
    assert found.scales[make_attention(2).site(Role.K)].source == "shared"


def test_a_file_too_large_for_scales_is_not_read_into_memory(tmp_path: Path) -> None:
    with (tmp_path / "scales.json").open("wb") as file:
        file.truncate(100_000_001)
    assert "cannot be read as JSON: larger than 100 MB" in refuse(tmp_path / "scales.json").message


# --- files of ranks, as TensorRT-LLM and AMMO write them -----------------------------------------

RANK_NAME = "transformer.layers.{}.attention.kv_cache_scaling_factor"
AMMO_NAME = "layers.{}.attention.qkv.kv_cache_scaling_factor"
ONES = {"0": 1.0, "1": 1.0}


def save_rank(path: Path, scales: Mapping[str, float]) -> Path:
    """Save a rank file of either kind, with another tensor in it."""
    arrays = {RANK_NAME.format(layer): np.array([x], np.float32) for layer, x in scales.items()}
    arrays["transformer.layers.0.mlp.fc.weights_scaling_factor"] = np.ones(1, np.float32)
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        save_file({key: torch.from_numpy(array) for key, array in arrays.items()}, path)
    return path


@pytest.mark.parametrize(("files", "message"), REFUSED["ranks"])
def test_what_ranks_cannot_be_is_refused(
    tmp_path: Path, files: dict[str, dict[str, float]], message: str
) -> None:
    for name, scales in files.items():
        save_rank(tmp_path / name, scales)
    assert message in refuse(tmp_path).message


def test_the_config_tells_the_number_of_ranks_and_the_format(tmp_path: Path) -> None:
    path, config = save_rank(tmp_path / "rank0.safetensors", ONES), tmp_path / "config.json"
    config.write_text(json.dumps({"mapping": {"tp_size": 2}}))
    for place in (tmp_path, path):
        assert refuse(place).message.endswith(": only 1 of 2 rank files exist (0)")
    save_rank(tmp_path / "rank1.safetensors", ONES)
    assert read_scales(tmp_path, TWO_LAYERS).tp == 2
    config.write_text(json.dumps({"quantization": {"kv_cache_quant_algo": "INT8"}}))
    assert refuse(tmp_path).message.endswith("kv_cache_quant_algo is 'INT8', not FP8")


ARRAYS: list[tuple[dict[str, np.ndarray], str]] = [
    *(
        (
            {name: np.ones(1, np.float32)},
            f"{name[:200]}: the name does not contain the number of a layer of its own",
        )
        for name in (
            *("kv_cache_scaling_factor", "a.0.b.1.kv_cache_scaling_factor"),
            *("a.b0.kv_cache_scaling_factor", f"a.{'1' * 5000}.kv_cache_scaling_factor"),
        )
    ),
    (
        {name.format(0): np.ones(1, np.float32) for name in (RANK_NAME, AMMO_NAME)},
        "kv_cache_scaling_factor: the name does not contain the number of a layer of its own",
    ),
    *(
        ({RANK_NAME.format(0): array}, f"{RANK_NAME.format(0)} is not one float")
        for array in (np.ones(2, np.float32), np.ones((1, 1), np.int64), np.array("1.0"))
    ),
]
"""Arrays of a file, and how the message ends."""


@pytest.mark.parametrize(("arrays", "message"), ARRAYS)
def test_arrays_that_are_not_one_number_of_one_layer_are_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray], message: str
) -> None:
    kind = str(next(iter(arrays.values())).dtype)
    np.savez(tmp_path / "rank0.npz", **arrays)
    assert refuse(tmp_path / "rank0.npz").message.endswith(message)
    if kind != "<U3":
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        path = tmp_path / "rank0.safetensors"
        save_file(tensors, path)
        assert refuse(path).message.endswith(message)


class _Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (pytest.fail, ("a pickle was loaded",))


def test_pickles_are_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "rank0.npz"
    np.savez(path, **{RANK_NAME.format(0): np.array([_Bomb()], dtype=object)})
    assert refuse(path).message.endswith("when allow_pickle=False")
    path.write_bytes(pickle.dumps(_Bomb()))
    assert "not a readable .npz archive" in refuse(path).message
