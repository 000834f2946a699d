"""Read scales stored as tensors, in checkpoints made by hand as each tool writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fp8calib.errors import ModelError
from fp8calib.formats.read import FoundScales, has_kv_scales, read_scales
from fp8calib.model.shapes import ModelGeometry
from tests.formats.handmade import latent_stats, make_attention, make_geometry

Tensors = Mapping[str, torch.Tensor]

TWO_LAYERS = make_geometry([make_attention(0), make_attention(1)])
PREFIX = "model.layers.{}.self_attn."
CONFIGS: Mapping[str, dict[str, object]] = {
    "autofp8": {"quant_method": "fp8", "kv_cache_scheme": "static"},
    "quark": {"quant_method": "quark", "export": {"kv_cache_group": ["*k_proj", "*v_proj"]}},
}


def _scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


def _pair(k: str = "k_scale", v: str = "v_scale", prefix: str = PREFIX) -> dict[str, torch.Tensor]:
    """Name two scales a layer: 0.5 and 0.75, then 2.0 and 0.25."""
    values = ((0.5, 0.75), (2.0, 0.25))
    return {
        prefix.format(layer) + name: _scalar(value)
        for layer, pair in enumerate(values)
        for name, value in zip((k, v), pair, strict=True)
    }


EXPECTED = {
    "model.layers.0.self_attn.k": [0.5],
    "model.layers.0.self_attn.v": [0.75],
    "model.layers.1.self_attn.k": [2.0],
    "model.layers.1.self_attn.v": [0.25],
}


def _save(folder: Path, tensors: Tensors, **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(dict(tensors), folder / "model.safetensors")
    if config:
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    return folder


def _values(found: FoundScales) -> Mapping[str, object]:
    return {str(site): scale.values.tolist() for site, scale in found.table.scales.items()}


def _refuse(path: Path, geometry: ModelGeometry = TWO_LAYERS) -> ModelError:
    with pytest.raises(ModelError) as caught:
        read_scales(path, geometry)
    assert caught.value.message.startswith(str(path))
    return caught.value


def _refusal(path: Path, geometry: ModelGeometry = TWO_LAYERS) -> str:
    return _refuse(path, geometry).message


@pytest.mark.parametrize(
    ("config", "dialect"),
    [
        ({"kv_cache_torch_dtype": "float8_e4m3fn"}, "tgi"),
        ({"quantization_config": CONFIGS["autofp8"]}, "autofp8"),
        ({}, "tgi"),
    ],
)
def test_one_kv_scale_fills_k_and_v(
    tmp_path: Path, config: dict[str, object], dialect: str
) -> None:
    tensors = {
        PREFIX.format(0) + "kv_scale": _scalar(0.5),
        PREFIX.format(1) + "kv_scale": _scalar(2),
    }
    found = read_scales(_save(tmp_path / "a", tensors, **config), TWO_LAYERS)

    assert found.table.dialect == dialect
    assert list(_values(found).values()) == [[0.5], [0.5], [2.0], [2.0]]
    assert found.notes == ("one scale per layer is used for both k and v",)


def test_a_kv_scale_beside_k_and_v_is_their_maximum_or_refused(tmp_path: Path) -> None:
    right = {
        PREFIX.format(0) + "kv_scale": _scalar(0.75),
        PREFIX.format(1) + "kv_scale": _scalar(2),
    }
    assert _values(read_scales(_save(tmp_path / "a", _pair() | right), TWO_LAYERS)) == EXPECTED

    wrong = {PREFIX.format(1) + "kv_scale": _scalar(0.25)}
    assert _refusal(_save(tmp_path / "b", _pair() | wrong)).endswith(
        "model.layers.1.self_attn.kv_scale = 0.25 (model.safetensors) is not the larger of k_scale "
        "and v_scale beside it (2.0 and 0.25)"
    )


@pytest.mark.parametrize(("inner", "is_told"), [("{}_proj.", True), ("", False)])
def test_scales_of_expanded_heads_are_told(tmp_path: Path, inner: str, is_told: bool) -> None:
    """ModelOpt's own names imply where it measured."""
    names = [f"{inner.format(role)}{role}_scale" for role in "kv"]
    tensors = {PREFIX.format(0) + name: torch.tensor(0.5) for name in names}
    found = read_scales(_save(tmp_path / "a", tensors), latent_stats().geometry)
    assert any("expanded to heads" in note for note in found.notes) is is_told


K0, V1 = "model.layers.0.self_attn.k_scale", "model.layers.1.self_attn.v_scale"
NONE = "{} is not a scale"
HINT = "a scale is a finite number above zero"
SMALL = "{:.4g} is too small for a scale"
REFUSED: Mapping[str, tuple[Mapping[str, torch.Tensor | None], str, str]] = {
    **{
        f"shape {list(shape)}": ({V1: torch.ones(shape)}, f"{V1} has shape {list(shape)}", "")
        for shape in ((3, 1, 1), (1, 1, 1), (2,), (0,), (1, 1))
    },
    **{
        str(dtype): ({K0: torch.ones((), dtype=dtype)}, f"{K0} is of dtype {name}", "")
        for dtype, name in ((torch.int32, "I32"), (torch.uint8, "U8"), (torch.bool, "BOOL"))
    },
    "zero": ({V1: _scalar(0.0)}, f"{V1}: {NONE.format(0.0)}", HINT),
    "minus zero": ({V1: _scalar(-0.0).bfloat16()}, f"{V1}: {NONE.format(-0.0)}", HINT),
    "negative": ({V1: _scalar(-1.0).half()}, f"{V1}: {NONE.format(-1.0)}", HINT),
    "nan": ({V1: _scalar(float("nan"))}, f"{V1}: {NONE.format('nan')}", HINT),
    "inf": ({V1: _scalar(float("inf")).half()}, f"{V1}: {NONE.format('inf')}", HINT),
    "a double that fp32 cannot hold": (
        {K0: torch.tensor(1e300, dtype=torch.float64)},
        f"{K0}: {NONE.format('inf')}",
        HINT,
    ),
    "zero in fp16": (
        {K0: _scalar(1e-8).half()},
        f"{K0}: {NONE.format(0.0)}",
        "a scale under 6e-8 is 0 in fp16; write it in fp32",
    ),
    "not kept in fp16": ({V1: _scalar(6e-8).half()}, f"{SMALL.format(5.96e-8)} in fp16", ""),
    "nearly kept in fp16": ({V1: _scalar(9e-7).half()}, f"{SMALL.format(8.941e-7)} in fp16", ""),
    # the reciprocals are infinite
    "1e-45": ({V1: _scalar(1e-45)}, f"{V1}: {SMALL.format(1.401e-45)}", ""),
    "1e-39": ({V1: _scalar(1e-39)}, f"{V1}: {SMALL.format(1e-39)}", ""),
    "1e-39 in bf16": ({V1: _scalar(1e-39).bfloat16()}, f"{V1}: {SMALL.format(1.01e-39)}", ""),
    "a layer too many": (
        {"model.layers.2.self_attn.k_scale": _scalar(1)},
        "model.layers.2.self_attn.k_scale: the model has no such attention",
        "",
    ),
    "one bad head": (
        {name: torch.tensor([1.0, float(name != K0)]).reshape(2, 1, 1) for name in _pair()},
        f"{K0}: {NONE.format(0.0)}",
        HINT,
    ),
    "heads beside tensors": (
        {V1: torch.ones(2, 1, 1)},
        "both per-head scales (model.layers.1.self_attn.v) and per-tensor scales (model.layers.0."
        "self_attn.k)",
        "",
    ),
    "no v": ({V1: None}, "layer 1: k_scale without v_scale", ""),
    "no k": ({K0: None}, "layer 0: v_scale without k_scale", ""),
    "kv for a missing v": (
        {V1: None, V1.replace("v_s", "kv_s"): _scalar(2)},
        "layer 1: k_scale without v_scale",
        "",
    ),
}
"""Tensors beside the right ones, in their place, or gone; how message and hint end and begin."""


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_scale_of_the_model_is_refused(tmp_path: Path, case: str) -> None:
    tensors, message, hint = REFUSED[case]
    kept = {name: x for name, x in {**_pair(), **tensors}.items() if x is not None}
    error = _refuse(_save(tmp_path / "a", kept))
    assert error.message.endswith(message)
    assert error.hint.startswith(hint)


def test_one_kv_scale_cannot_be_per_head(tmp_path: Path) -> None:
    tensors = {PREFIX.format(layer) + "kv_scale": torch.ones(2, 1, 1) for layer in range(2)}
    assert _refusal(_save(tmp_path / "a", tensors)).endswith("kv_scale has shape [2, 1, 1]")


def test_the_same_scale_under_two_names_counts_once(tmp_path: Path) -> None:
    inner = _pair(prefix=PREFIX + "attn.")
    assert _values(read_scales(_save(tmp_path / "a", _pair() | inner), TWO_LAYERS)) == EXPECTED

    inner[PREFIX.format(0) + "attn.k_scale"] = _scalar(0.25)
    message = _refusal(_save(tmp_path / "b", _pair() | inner))
    assert "two scales for model.layers.0.self_attn.k: " in message
    assert "model.layers.0.self_attn.attn.k_scale = 0.25 (model.safetensors)" in message


def _save_shards(folder: Path) -> Path:
    """Save one layer a shard, with an index."""
    folder.mkdir()
    weight_map = {}
    for layer in range(2):
        name = f"model-{layer + 1:05}-of-00002.safetensors"
        tensors = {key: scale for key, scale in _pair().items() if f".{layer}." in key}
        tensors[f"model.layers.{layer}.mlp.weight"] = torch.ones(2, 2)
        save_file(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_a_shard_with_listed_scales_may_not_be_missing(tmp_path: Path) -> None:
    folder = _save_shards(tmp_path / "a")
    (folder / "model-00002-of-00002.safetensors").unlink()

    assert has_kv_scales(folder)
    assert "the index lists 2 scales that no file has (model.layers.1." in _refusal(folder)
    (folder / "model-00001-of-00002.safetensors").unlink()
    assert has_kv_scales(folder)
    assert "the index lists 4 scales that no file has (model.layers.0." in _refusal(folder)


def test_scales_outside_the_decoder_are_told(tmp_path: Path) -> None:
    others = {f"mtp.layers.0.self_attn.{name}": _scalar(9) for name in ("k_scale", "v_scale")}
    found = read_scales(_save(tmp_path / "a", _pair() | others), TWO_LAYERS)

    assert _values(found) == EXPECTED
    assert found.notes == (
        "2 scales outside the decoder are ignored "
        "(mtp.layers.0.self_attn.k_scale, mtp.layers.0.self_attn.v_scale)",
    )
