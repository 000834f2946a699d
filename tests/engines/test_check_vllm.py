"""Verdicts for vLLM 0.32.0 where the model is not a plain Llama, or a word on the scales counts.

What vLLM itself answered is in `test_vllm_goldens.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.check_handmade import (
    FP8,
    INDEX,
    MODELOPT,
    PER_HEAD,
    PER_TENSOR,
    QUARK,
    ask,
    both,
    moved_geometry,
    save_folder,
    spell,
    statuses,
    values,
)
from tests.formats.handmade import (
    hybrid_stats,
    latent_stats,
    make_attention,
    make_geometry,
    shared_stats,
)

PAIR = ("k_scale", "v_scale")
GPT2 = "transformer.h.{}.attn"


def test_a_plain_checkpoint_is_served_with_ones(tmp_path: Path) -> None:
    report = ask("vllm", save_folder(tmp_path / "f", {}))

    assert statuses(report) == both("defaulted")
    assert values(report) == [(1.0, 1.0)] * 2
    assert report.ok  # nothing asks for an FP8 cache


def test_without_an_index_every_file_is_read(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR), quantization=PER_TENSOR)
    (folder / INDEX).unlink()

    assert ask("vllm", folder).ok


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_per_head_scales_are_used_with_a_word_on_backends(tmp_path: Path, tp: int) -> None:
    scales = spell(*PAIR, value=[[[0.25]], [[0.5]]])
    folder = save_folder(tmp_path / "f", scales, quantization=PER_HEAD)

    report = ask("vllm", folder, tp=tp)

    assert statuses(report) == both("used")
    assert values(report) == [(0.5, 0.5)] * 2
    assert any("FlashAttention 3" in problem for problem in report.problems)


@pytest.mark.parametrize(
    ("value", "tp", "status"),
    [
        ([0.25, 0.5, 0.75], 1, "misread"),
        ([0.25], 1, "used"),
        ([0.25], 2, "refused"),
        ([[[0.25]], [[float("nan")]]], 1, "misread"),
    ],
)
def test_per_head_scales_of_another_number_of_heads(
    tmp_path: Path, value: object, tp: int, status: str
) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR, value=value), quantization=PER_HEAD)

    assert statuses(ask("vllm", folder, tp=tp)) == both(status)


def test_the_attn_name_of_gpt2_is_refused_and_the_inner_one_used(tmp_path: Path) -> None:
    geometry = moved_geometry(GPT2, model_type="gpt2")
    outer = save_folder(tmp_path / "outer", spell(*PAIR, path=GPT2), quantization=PER_TENSOR)
    inner_path = f"{GPT2}.attn"
    inner = save_folder(tmp_path / "inner", spell(*PAIR, path=inner_path), quantization=PER_TENSOR)

    assert statuses(ask("vllm", outer, geometry)) == both("refused")
    assert ".attn.attn.k_scale" in ask("vllm", outer, geometry).layers[0].k.fix
    assert ask("vllm", inner, geometry).ok


def test_the_attn_name_of_other_models_is_dropped(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR, path=GPT2), quantization=PER_TENSOR)

    report = ask("vllm", folder, moved_geometry(GPT2, model_type="gptj"))

    assert statuses(report) == both("dropped")
    assert values(report) == [(1.0, 1.0)] * 2


@pytest.mark.parametrize("quantization", [PER_TENSOR, FP8, MODELOPT, QUARK])
@pytest.mark.parametrize("suffixes", [PAIR, ("k_proj.k_scale", "v_proj.v_scale")])
def test_no_scale_reaches_latent_attention(
    tmp_path: Path, quantization: dict[str, Any], suffixes: tuple[str, ...]
) -> None:
    """ModelOpt's method attaches, but 0.32's DeepSeek maps every name to one that is not there."""
    folder = save_folder(tmp_path / "f", spell(*suffixes, layers=1), quantization=quantization)

    report = ask("vllm", folder, latent_stats().header.geometry)

    assert statuses(report) == [("dropped", "dropped")]
    assert values(report) == [(1.0, 1.0)]
    assert "latent" in report.layers[0].k.why


@pytest.mark.parametrize(
    ("quantization", "status"),
    [
        ({"quant_method": "awq"}, "dropped"),
        ({"quant_method": "mxfp8"}, "used"),
        ({"quant_method": 7}, "refused"),
        ({"kv_cache_scheme": {}}, "refused"),
        ({**FP8, "ignored_layers": None}, "used"),
        ({**FP8, "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, "used"),
    ],
)
def test_configs_of_quantized_weights(
    tmp_path: Path, quantization: dict[str, Any], status: str
) -> None:
    report = ask("vllm", save_folder(tmp_path / "f", spell(*PAIR), quantization=quantization))

    assert statuses(report) == both(status)


def test_scales_without_a_scheme_are_used_and_the_flag_is_told(tmp_path: Path) -> None:
    quantization = {**PER_TENSOR, "kv_cache_scheme": None}
    report = ask("vllm", save_folder(tmp_path / "f", spell(*PAIR), quantization=quantization))

    assert report.ok
    assert any("--kv-cache-dtype fp8" in problem for problem in report.problems)


def test_the_scheme_turns_the_cache_on_by_itself(tmp_path: Path) -> None:
    report = ask("vllm", save_folder(tmp_path / "f", spell(*PAIR), quantization=PER_TENSOR))

    assert not any("--kv-cache-dtype" in problem for problem in report.problems)
    assert not any("gfx94x" in problem for problem in report.problems)


@pytest.mark.parametrize(
    ("quantization", "why"),
    [(PER_TENSOR, "right on AMD gfx94x alone"), (FP8, "doubles it on AMD gfx94x")],
)
def test_fnuz_scales_are_misread(tmp_path: Path, quantization: dict[str, Any], why: str) -> None:
    dtype = {"kv_cache_torch_dtype": "float8_e4m3fnuz"}
    folder = save_folder(tmp_path / "f", spell(*PAIR), quantization=quantization, **dtype)

    report = ask("vllm", folder)

    assert statuses(report) == both("misread")
    assert why in report.layers[0].k.why


def test_scales_recorded_for_e5m2_are_not_ok(tmp_path: Path) -> None:
    dtype = {"kv_cache_torch_dtype": "float8_e5m2"}
    folder = save_folder(tmp_path / "f", spell(*PAIR), quantization=PER_TENSOR, **dtype)

    report = ask("vllm", folder)

    assert not report.ok
    assert "fp8_e5m2" in report.layers[0].k.why


def test_layers_without_a_cache_are_left_out(tmp_path: Path) -> None:
    scales = {f"model.layers.1.self_attn.{suffix}": 0.5 for suffix in PAIR}
    folder = save_folder(tmp_path / "f", scales, quantization=PER_TENSOR)

    report = ask("vllm", folder, hybrid_stats().header.geometry)

    assert [layer.layer for layer in report.layers] == [1]
    assert report.ok


def test_layers_that_read_anothers_cache_need_its_scale(tmp_path: Path) -> None:
    geometry = shared_stats().header.geometry
    half = save_folder(tmp_path / "half", spell(*PAIR), quantization=PER_TENSOR)
    whole = save_folder(tmp_path / "whole", spell(*PAIR, layers=4), quantization=PER_TENSOR)

    assert statuses(ask("vllm", half, geometry)) == both("used") + both("misread")
    assert ask("vllm", whole, geometry).ok


def test_two_names_for_one_place_are_told(tmp_path: Path) -> None:
    scales = spell(*PAIR) | spell("attn.k_scale", value=0.5)
    report = ask("vllm", save_folder(tmp_path / "f", scales, quantization=PER_TENSOR))

    assert any("one is lost" in problem for problem in report.problems)


def test_names_are_the_checkpoints_own(tmp_path: Path) -> None:
    attention = make_attention(0, checkpoint_module="language_model.model.layers.0.self_attn")
    scales = spell(*PAIR, layers=1, path="language_model.model.layers.{}.self_attn")
    folder = save_folder(tmp_path / "f", scales, quantization=PER_TENSOR)

    assert ask("vllm", folder, make_geometry([attention])).ok
