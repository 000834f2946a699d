"""Expected verdicts of vLLM 0.32.0: the mapping, the methods, the executed tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dialects.handmade import (
    hybrid_stats,
    latent_stats,
    make_attention,
    make_geometry,
    shared_stats,
)
from tests.engines.check_handmade import (
    FP8,
    INDEX,
    MODELOPT,
    PER_HEAD,
    PER_TENSOR,
    QUARK,
    SCALES,
    ask,
    both,
    moved_geometry,
    plain_geometry,
    save_folder,
    spell,
    statuses,
    values,
)

NAN, INF = float("nan"), float("inf")
PAIR = ("k_scale", "v_scale")
GPT2 = "transformer.h.{}.attn"


@pytest.mark.parametrize(
    ("quantization", "suffixes"),
    [
        (PER_TENSOR, PAIR),
        (PER_TENSOR, ("attn.k_scale", "attn.v_scale")),
        (FP8, PAIR),
        (FP8, ("kv_scale",)),
        (FP8, ("k_proj.output_scale", "v_proj.output_scale")),
        (MODELOPT, ("k_proj.k_scale", "v_proj.v_scale")),
        (MODELOPT, ("qkv_proj.k_scale", "qkv_proj.v_scale")),
        (QUARK, ("k_proj.output_scale", "v_proj.output_scale")),
    ],
)
def test_every_methods_own_names_are_used(
    tmp_path: Path, quantization: dict[str, Any], suffixes: tuple[str, ...]
) -> None:
    folder = save_folder(tmp_path / "f", spell(*suffixes), quantization=quantization)

    report = ask("vllm", folder)

    assert statuses(report) == both("used")
    assert values(report) == [(0.25, 0.25)] * 2
    assert report.ok


def test_numbers_are_told_layer_by_layer(tmp_path: Path) -> None:
    path = "model.layers.{}.self_attn"
    scales = {
        f"{path.format(index)}.{role}_scale": value
        for index, pair in enumerate([(0.5, 0.125), (2.0, 4.0)])
        for role, value in zip("kv", pair, strict=True)
    }
    folder = save_folder(tmp_path / "f", scales, quantization=PER_TENSOR)

    assert values(ask("vllm", folder)) == [(0.5, 0.125), (2.0, 4.0)]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
@pytest.mark.parametrize("quantization", [PER_TENSOR, FP8])
def test_one_number_may_have_any_shape(
    tmp_path: Path, quantization: dict[str, Any], shape: tuple[int, ...]
) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR), quantization=quantization, shape=shape)

    assert ask("vllm", folder).ok


@pytest.mark.parametrize("suffixes", [PAIR, ("kv_scale",), ("q_scale",)])
def test_bare_scales_without_a_quantization_config_are_refused(
    tmp_path: Path, suffixes: tuple[str, ...]
) -> None:
    report = ask("vllm", save_folder(tmp_path / "f", spell(*suffixes)))

    assert statuses(report) == both("refused")
    assert values(report) == [(None, None)] * 2
    assert "without a quantization_config" in report.layers[0].k.why
    assert "quantization_config of kv-overlay" in report.layers[0].k.fix


def test_a_plain_checkpoint_is_served_with_ones(tmp_path: Path) -> None:
    report = ask("vllm", save_folder(tmp_path / "f", {}))

    assert statuses(report) == both("defaulted")
    assert values(report) == [(1.0, 1.0)] * 2
    assert report.ok  # nothing asks for an FP8 cache


@pytest.mark.parametrize("quantization", [None, PER_TENSOR])
def test_a_shard_that_the_index_does_not_name_is_skipped(
    tmp_path: Path, quantization: dict[str, Any] | None
) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR), quantization=quantization, listed=False)

    report = ask("vllm", folder)

    assert statuses(report) == both("defaulted")
    assert values(report) == [(1.0, 1.0)] * 2
    assert SCALES in report.layers[0].k.why
    assert "index" in report.layers[0].k.fix


def test_without_an_index_every_file_is_read(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR), quantization=PER_TENSOR)
    (folder / INDEX).unlink()

    assert ask("vllm", folder).ok


def test_kv_scale_under_compressed_tensors_is_k_alone(tmp_path: Path) -> None:
    report = ask("vllm", save_folder(tmp_path / "f", spell("kv_scale"), quantization=PER_TENSOR))

    assert statuses(report) == [("used", "defaulted")] * 2
    assert values(report) == [(0.25, 1.0)] * 2


@pytest.mark.parametrize(
    ("suffix", "status"), [("k_scale", ("used", "defaulted")), ("v_scale", ("defaulted", "used"))]
)
def test_one_scale_of_two_under_compressed_tensors_leaves_the_other_at_one(
    tmp_path: Path, suffix: str, status: tuple[str, str]
) -> None:
    report = ask("vllm", save_folder(tmp_path / "f", spell(suffix), quantization=PER_TENSOR))

    assert statuses(report) == [status] * 2


@pytest.mark.parametrize("quantization", [FP8, MODELOPT, QUARK])
def test_k_without_v_is_copied(tmp_path: Path, quantization: dict[str, Any]) -> None:
    report = ask("vllm", save_folder(tmp_path / "f", spell("k_scale"), quantization=quantization))

    assert statuses(report) == [("used", "misread")] * 2
    assert values(report) == [(0.25, 0.25)] * 2


@pytest.mark.parametrize("quantization", [FP8, MODELOPT, QUARK])
def test_v_without_k_fails_an_assertion(tmp_path: Path, quantization: dict[str, Any]) -> None:
    report = ask("vllm", save_folder(tmp_path / "f", spell("v_scale"), quantization=quantization))

    assert statuses(report) == both("refused")
    assert "asserts k_scale > 0" in report.layers[0].k.why


@pytest.mark.parametrize(
    ("k", "v", "status", "numbers"),
    [
        (0.5, 0.25, ("used", "used"), (0.5, 0.25)),
        (0.5, 0.0, ("used", "misread"), (0.5, 0.5)),
        (0.5, -1.0, ("used", "misread"), (0.5, 0.5)),
        (-0.5, -0.25, ("defaulted", "defaulted"), (1.0, 1.0)),
        (0.0, 0.0, ("refused", "refused"), (None, None)),
        (0.0, 0.5, ("refused", "refused"), (None, None)),
        (-0.5, 0.5, ("refused", "refused"), (None, None)),
        (NAN, NAN, ("refused", "refused"), (None, None)),
        (INF, 0.25, ("misread", "used"), (None, 0.25)),
        (2.0**-127, 2.0**-126, ("misread", "used"), (2.0**-127, 2.0**-126)),
    ],
)
@pytest.mark.parametrize("quantization", [FP8, MODELOPT, QUARK])
def test_numbers_that_are_no_scales_by_the_truth_table(
    tmp_path: Path,
    quantization: dict[str, Any],
    k: float,
    v: float,
    status: tuple[str, str],
    numbers: tuple[float | None, float | None],
) -> None:
    scales = spell("k_scale", value=k) | spell("v_scale", value=v)
    report = ask("vllm", save_folder(tmp_path / "f", scales, quantization=quantization))

    assert statuses(report) == [status] * 2
    assert values(report) == [numbers] * 2


@pytest.mark.parametrize(("value", "number"), [(NAN, None), (0.0, 0.0), (-0.5, -0.5), (INF, None)])
def test_compressed_tensors_takes_any_number_as_it_stands(
    tmp_path: Path, value: float, number: float | None
) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR, value=value), quantization=PER_TENSOR)

    report = ask("vllm", folder)

    assert statuses(report) == both("misread")
    assert values(report) == [(number, number)] * 2


@pytest.mark.parametrize("quantization", [PER_TENSOR, FP8, MODELOPT, QUARK])
def test_per_head_scales_where_one_number_is_wanted_are_refused(
    tmp_path: Path, quantization: dict[str, Any]
) -> None:
    scales = spell(*PAIR, value=[[[0.25]], [[0.5]]])
    report = ask("vllm", save_folder(tmp_path / "f", scales, quantization=quantization))

    assert statuses(report) == both("refused")
    assert "[2, 1, 1]" in report.layers[0].k.why


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
        ([[[0.25]], [[NAN]]], 1, "misread"),
    ],
)
def test_per_head_scales_of_another_number_of_heads(
    tmp_path: Path, value: object, tp: int, status: str
) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR, value=value), quantization=PER_HEAD)

    assert statuses(ask("vllm", folder, tp=tp)) == both(status)


def test_per_head_scales_need_config_groups(tmp_path: Path) -> None:
    quantization = {key: value for key, value in PER_HEAD.items() if key != "config_groups"}
    scales = spell(*PAIR, value=[[[0.25]], [[0.5]]])

    report = ask("vllm", save_folder(tmp_path / "f", scales, quantization=quantization))

    assert statuses(report) == both("refused")
    assert "config_groups" in report.layers[0].k.why


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


def test_modelopt_names_under_compressed_tensors_are_used(tmp_path: Path) -> None:
    scales = spell("k_proj.k_scale", "v_proj.v_scale")

    assert ask("vllm", save_folder(tmp_path / "f", scales, quantization=PER_TENSOR)).ok


def test_quarks_names_under_compressed_tensors_are_refused(tmp_path: Path) -> None:
    scales = spell("k_proj.output_scale", "v_proj.output_scale")
    report = ask("vllm", save_folder(tmp_path / "f", scales, quantization=PER_TENSOR))

    assert statuses(report) == both("refused")


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "modelopt", "quant_algo": None, "quantized_layers": {}},
        {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
    ],
)
def test_modelopts_config_for_the_cache_alone_is_refused(
    tmp_path: Path, quantization: dict[str, Any]
) -> None:
    scales = spell("k_proj.k_scale", "v_proj.v_scale")
    report = ask("vllm", save_folder(tmp_path / "f", scales, quantization=quantization))

    assert statuses(report) == both("refused")
    assert "Missing 'quant_algo'" in report.layers[0].k.why


def test_modelopts_side_file_counts_where_the_config_says_nothing(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "f", spell("k_proj.k_scale", "v_proj.v_scale"))
    side = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quant_method": "modelopt", **side}))

    assert ask("vllm", folder).ok


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
    "quantization",
    [
        {"quant_method": "fbgemm_fp8"},
        {"quant_method": "no-such-method"},
        {"quant_method": 7},
        {"kv_cache_scheme": {}},
        {**QUARK, "layer_quant_config": {"*k_proj": {"output_tensors": {"dtype": "int8"}}}},
        {**PER_TENSOR, "kv_cache_scheme": "static"},
        "compressed-tensors",
        ["compressed-tensors"],
    ],
)
def test_configs_that_stop_vllm(tmp_path: Path, quantization: object) -> None:
    report = ask("vllm", save_folder(tmp_path / "f", spell(*PAIR), quantization=quantization))

    assert statuses(report) == both("refused")


@pytest.mark.parametrize(
    ("key", "value"),
    [("type", "int"), ("num_bits", 4), ("strategy", "channel"), ("strategy", None)],
)
def test_schemes_that_stop_vllm(tmp_path: Path, key: str, value: object) -> None:
    scheme = {**PER_TENSOR["kv_cache_scheme"], key: value}  # type: ignore[dict-item]
    quantization = {**PER_TENSOR, "kv_cache_scheme": scheme}

    report = ask("vllm", save_folder(tmp_path / "f", spell(*PAIR), quantization=quantization))

    assert statuses(report) == both("refused")
    assert f"kv_cache_scheme.{key}" in report.layers[0].k.why


def test_methods_without_kv_scales_ignore_them(tmp_path: Path) -> None:
    quantization = {"quant_method": "awq"}
    report = ask("vllm", save_folder(tmp_path / "f", spell(*PAIR), quantization=quantization))

    assert statuses(report) == both("dropped")


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

    assert statuses(ask("vllm", half, geometry)) == both("used") + both("defaulted")
    assert ask("vllm", whole, geometry).ok


def test_a_layer_without_a_scale_is_told_from_the_others(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR, layers=1), quantization=PER_TENSOR)

    report = ask("vllm", folder)

    assert statuses(report) == [("used", "used"), ("defaulted", "defaulted")]
    assert "no k_scale" in report.layers[1].k.why


def test_a_model_vllm_does_not_run_is_refused(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR), quantization=PER_TENSOR)

    assert statuses(ask("vllm", folder, plain_geometry(model_type="mpt"))) == both("refused")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_scales_may_be_stored_in_any_float(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR), quantization=FP8, dtype=dtype)

    assert values(ask("vllm", folder)) == [(0.25, 0.25)] * 2


def test_two_names_for_one_place_are_told(tmp_path: Path) -> None:
    scales = spell(*PAIR) | spell("attn.k_scale", value=0.5)
    report = ask("vllm", save_folder(tmp_path / "f", scales, quantization=PER_TENSOR))

    assert any("one is lost" in problem for problem in report.problems)


def test_names_are_the_checkpoints_own(tmp_path: Path) -> None:
    attention = make_attention(0, checkpoint_module="language_model.model.layers.0.self_attn")
    scales = spell(*PAIR, layers=1, path="language_model.model.layers.{}.self_attn")
    folder = save_folder(tmp_path / "f", scales, quantization=PER_TENSOR)

    assert ask("vllm", folder, make_geometry([attention])).ok
