"""Expected verdicts: what `from_pretrained` of transformers 5.23 did with tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.dialects.handmade import expert_stats, latent_stats, shared_stats
from tests.engines.check_handmade import (
    FP8,
    INDEX,
    MODELOPT,
    PER_HEAD,
    PER_TENSOR,
    QUARK,
    WEIGHTS,
    ask,
    both,
    plain_geometry,
    save_folder,
    spell,
    statuses,
    values,
)

PAIR = ("k_scale", "v_scale")


def test_scales_of_shape_one_are_used_in_the_models_dtype(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR, value=0.1), quantization=PER_TENSOR)

    report = ask("transformers", folder)

    assert report.ok
    assert values(report) == [(0.10009765625, 0.10009765625)] * 2
    assert any("bfloat16" in problem for problem in report.problems)


def test_nothing_is_rounded_in_fp32(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR, value=0.1), quantization=PER_TENSOR)

    report = ask("transformers", folder, plain_geometry(checkpoint_dtype="float32"))

    assert values(report)[0][0] == pytest.approx(0.1, abs=1e-8)
    assert report.problems == ()


@pytest.mark.parametrize(
    ("quantization", "value", "shape"),
    [
        (PER_TENSOR, 0.25, ()),
        (PER_TENSOR, [0.25, 0.5], (2,)),
        (PER_TENSOR, [0.25, 0.5], (2, 1, 1)),
        (PER_HEAD, 0.25, (1,)),
        (PER_HEAD, [0.25, 0.5], (2,)),
    ],
)
def test_other_shapes_are_refused(
    tmp_path: Path, quantization: dict[str, Any], value: object, shape: tuple[int, ...]
) -> None:
    scales = spell(*PAIR, value=value)
    folder = save_folder(tmp_path / "f", scales, quantization=quantization, shape=shape)

    assert statuses(ask("transformers", folder)) == both("refused")


def test_per_head_scales_are_used(tmp_path: Path) -> None:
    scales = spell(*PAIR, value=[[[0.25]], [[0.5]]])
    report = ask("transformers", save_folder(tmp_path / "f", scales, quantization=PER_HEAD))

    assert report.ok
    assert values(report) == [(0.5, 0.5)] * 2


@pytest.mark.parametrize("quantization", [None, FP8, MODELOPT])
def test_scales_of_other_methods_are_unexpected(
    tmp_path: Path, quantization: dict[str, Any] | None
) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR), quantization=quantization)

    assert statuses(ask("transformers", folder)) == both("dropped")


def test_quark_is_refused_without_its_package(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR), quantization=QUARK)

    assert statuses(ask("transformers", folder)) == both("refused")


@pytest.mark.parametrize("scheme", [None, {**PER_TENSOR["kv_cache_scheme"], "dynamic": True}])  # type: ignore[dict-item]
def test_schemes_without_static_scales_drop_them(tmp_path: Path, scheme: object) -> None:
    quantization = {**PER_TENSOR, "kv_cache_scheme": scheme}
    folder = save_folder(tmp_path / "f", spell(*PAIR), quantization=quantization)

    assert statuses(ask("transformers", folder)) == both("dropped")


def test_a_missing_scale_stays_uninitialised(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR, layers=1), quantization=PER_TENSOR)

    report = ask("transformers", folder)

    assert statuses(report) == [("used", "used"), ("misread", "misread")]
    assert values(report)[1] == (None, None)
    assert "MISSING" in report.layers[1].k.why


@pytest.mark.parametrize("suffixes", [("kv_scale",), ("k_proj.k_scale", "v_proj.v_scale")])
def test_other_names_are_dropped_and_the_parameters_uninitialised(
    tmp_path: Path, suffixes: tuple[str, ...]
) -> None:
    folder = save_folder(tmp_path / "f", spell(*suffixes), quantization=PER_TENSOR)

    report = ask("transformers", folder)

    assert statuses(report) == both("dropped")
    assert report.layers[0].k.why.count("MISSING") == 1


def test_one_file_goes_before_the_index(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR), quantization=PER_TENSOR)
    save_file(load_file(folder / WEIGHTS), folder / "model.safetensors")

    report = ask("transformers", folder)

    assert statuses(report) == both("dropped")
    assert any("ignores model.safetensors.index.json" in text for text in report.problems)
    assert "is not opened" in report.layers[0].k.why


def test_a_shard_that_the_index_does_not_name_is_not_opened(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR), quantization=PER_TENSOR, listed=False)

    report = ask("transformers", folder)

    assert statuses(report) == both("dropped")
    assert "is not opened" in report.layers[0].k.why


def test_a_folder_without_the_two_names_is_refused(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR), quantization=PER_TENSOR)
    (folder / INDEX).unlink()

    assert statuses(ask("transformers", folder)) == both("refused")


def test_names_without_the_models_root_are_loaded(tmp_path: Path) -> None:
    """Transformers adds `model.` where a parameter is called so (5.23, run)."""
    pairs = spell(*PAIR)
    rootless = {name.removeprefix("model."): value for name, value in pairs.items()}
    report = ask("transformers", save_folder(tmp_path / "f", rootless, quantization=PER_TENSOR))

    assert statuses(report) == both("used")


def test_experts_need_a_group_with_weights(tmp_path: Path) -> None:
    """Of 16 bits too, where each has a tensor (AttributeError in 5.23, run)."""
    group = {"targets": ["Linear"], "weights": None, "input_activations": None}
    quantization = {**PER_TENSOR, "config_groups": {"group_0": group}}
    expert = {"model.layers.0.mlp.experts.0.up_proj.weight": [1.0, 1.0]}
    plain, experts = (
        ask("transformers", save_folder(tmp_path / name, tensors, quantization=quantization))
        for name, tensors in (("f", spell(*PAIR)), ("g", spell(*PAIR) | expert))
    )

    assert statuses(plain) == both("used")
    assert statuses(experts) == both("refused")


def test_empty_groups_stop_models_with_experts_alone(tmp_path: Path) -> None:
    quantization = {**PER_TENSOR, "config_groups": {}}
    folder = save_folder(tmp_path / "f", spell(*PAIR), quantization=quantization)

    experts = ask("transformers", folder, expert_stats().header.geometry)

    assert statuses(experts) == [("refused", "refused")]
    assert "IndexError" in experts.layers[0].k.why
    assert ask("transformers", folder).ok


def test_a_group_that_matches_nothing_serves_models_with_experts(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR), quantization=PER_TENSOR)

    assert ask("transformers", folder, expert_stats().header.geometry).ok


@pytest.mark.parametrize("groups", [None, 7])
def test_groups_that_are_none_are_refused(tmp_path: Path, groups: object) -> None:
    quantization = {**PER_TENSOR, "config_groups": groups}
    folder = save_folder(tmp_path / "f", spell(*PAIR), quantization=quantization)

    assert statuses(ask("transformers", folder)) == both("refused")


@pytest.mark.parametrize("model_type", ["opt", "biogpt", "xglm"])
def test_a_config_that_counts_no_kv_heads_is_refused(tmp_path: Path, model_type: str) -> None:
    geometry = plain_geometry(model_type=model_type)
    plain = save_folder(tmp_path / "a", spell(*PAIR), quantization=PER_TENSOR)
    counted = save_folder(
        tmp_path / "b", spell(*PAIR), quantization=PER_TENSOR, num_key_value_heads=4
    )

    assert statuses(ask("transformers", plain, geometry)) == both("refused")
    assert "ValueError" in ask("transformers", plain, geometry).layers[0].k.why
    assert ask("transformers", counted, geometry).ok


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox", "falcon", "bloom", "gptj", "mpt"])
def test_models_whose_attention_is_not_recognised(tmp_path: Path, model_type: str) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR), quantization=PER_TENSOR)

    report = ask("transformers", folder, plain_geometry(model_type=model_type))

    assert statuses(report) == both("dropped")


def test_latent_attention_takes_scales_per_tensor_and_none_per_head(tmp_path: Path) -> None:
    geometry = latent_stats().header.geometry
    scales = spell(*PAIR, layers=1)
    tensor = save_folder(tmp_path / "a", scales, quantization=PER_TENSOR)
    head = save_folder(tmp_path / "b", scales, quantization=PER_HEAD, shape=(1, 1, 1))

    assert ask("transformers", tensor, geometry).ok
    assert statuses(ask("transformers", head, geometry)) == [("refused", "refused")]


def test_an_asymmetric_scheme_needs_zero_points(tmp_path: Path) -> None:
    scheme = {**PER_TENSOR["kv_cache_scheme"], "symmetric": False}  # type: ignore[dict-item]
    quantization = {**PER_TENSOR, "kv_cache_scheme": scheme}
    points = spell("k_zero_point", "v_zero_point", value=0.0)
    without = save_folder(tmp_path / "a", spell(*PAIR), quantization=quantization)
    complete = save_folder(tmp_path / "b", spell(*PAIR) | points, quantization=quantization)

    assert statuses(ask("transformers", without)) == both("misread")
    assert ask("transformers", complete).ok


def test_layers_that_read_anothers_cache_get_its_scale(tmp_path: Path) -> None:
    first = {f"model.layers.0.self_attn.{suffix}": 0.5 for suffix in PAIR}
    scales = spell(*PAIR) | first
    folder = save_folder(tmp_path / "f", scales, quantization=PER_TENSOR)

    report = ask("transformers", folder, shared_stats().header.geometry)

    assert values(report) == [(0.5, 0.5), (0.25, 0.25), (0.25, 0.25), (0.5, 0.5)]


@pytest.mark.parametrize("value", [float("nan"), 0.0, -0.5, float("inf"), 1e-9])
def test_numbers_that_are_no_scales_are_not_ok(tmp_path: Path, value: float) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR, value=value), quantization=PER_TENSOR)

    report = ask("transformers", folder, plain_geometry(checkpoint_dtype="float16"))

    assert statuses(report) == both("misread")


def test_another_scheme_than_fp8_is_misread(tmp_path: Path) -> None:
    scheme = {**PER_TENSOR["kv_cache_scheme"], "type": "int"}  # type: ignore[dict-item]
    quantization = {**PER_TENSOR, "kv_cache_scheme": scheme}

    report = ask(
        "transformers", save_folder(tmp_path / "f", spell(*PAIR), quantization=quantization)
    )

    assert statuses(report) == both("misread")


@pytest.mark.parametrize("dtype", ["float8_e4m3fnuz", "float8_e5m2"])
def test_scales_for_another_format_are_misread(tmp_path: Path, dtype: str) -> None:
    folder = save_folder(
        tmp_path / "f", spell(*PAIR), quantization=PER_TENSOR, kv_cache_torch_dtype=dtype
    )

    assert statuses(ask("transformers", folder)) == both("misread")
