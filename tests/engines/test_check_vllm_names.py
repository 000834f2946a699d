"""Models in which vLLM 0.32.0 has no place for a scale, or another than the file means."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8calib.geometry.model_geometry import ModelGeometry
from tests.dialects.handmade import latent_stats, make_geometry
from tests.engines.check_handmade import (
    FP8,
    PER_TENSOR,
    ask,
    both,
    plain_geometry,
    save_folder,
    spell,
    statuses,
    values,
)

PAIR = ("k_scale", "v_scale")


@pytest.mark.parametrize("model_type", ["jamba", "lfm2", "lfm2_moe", "zamba2"])
@pytest.mark.parametrize("quantization", [PER_TENSOR, FP8])
@pytest.mark.parametrize("suffixes", [PAIR, ("attn.k_scale", "attn.v_scale"), ("q_scale",)])
def test_attention_without_a_place_refuses_scales(
    tmp_path: Path, model_type: str, quantization: dict[str, object], suffixes: tuple[str, ...]
) -> None:
    folder = save_folder(tmp_path / "f", spell(*suffixes), quantization=quantization)

    report = ask("vllm", folder, plain_geometry(model_type=model_type))

    assert statuses(report) == both("refused")
    assert "has no parameters for scales" in report.layers[0].k.why


def test_without_scales_it_is_served_with_ones(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "f", {}, quantization=PER_TENSOR)

    report = ask("vllm", folder, plain_geometry(model_type="jamba"))

    assert (statuses(report), values(report)) == (both("defaulted"), [(1.0, 1.0)] * 2)


@pytest.mark.parametrize("model_type", ["bamba", "diffllama", "minimax", "mpt", "xglm"])
def test_models_it_does_not_run_are_refused(tmp_path: Path, model_type: str) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR), quantization=PER_TENSOR)

    assert statuses(ask("vllm", folder, plain_geometry(model_type=model_type))) == both("refused")


def _latent(model_type: str) -> ModelGeometry:
    attention = latent_stats().header.geometry.layers[0].attention
    assert attention is not None
    return make_geometry([attention], model_type=model_type)


@pytest.mark.parametrize("quantization", [PER_TENSOR, FP8])
@pytest.mark.parametrize(
    ("model_type", "status", "number"),
    [("deepseek_v3", "dropped", 1.0), ("youtu", "misread", 0.25), ("minicpm3", "misread", 0.25)],
)
def test_scales_of_latents_are_no_scales_of_expanded_heads(
    tmp_path: Path, quantization: dict[str, object], model_type: str, status: str, number: float
) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR, layers=1), quantization=quantization)

    report = ask("vllm", folder, _latent(model_type))

    assert (statuses(report), values(report)) == ([(status, status)], [(number, number)])


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tgi", "transformers"])
@pytest.mark.parametrize(
    ("tp", "starts"), [(1, True), (2, True), (4, True), (3, False), (8, False)]
)
def test_ranks_that_cannot_share_the_heads_are_refused(
    tmp_path: Path, engine: str, tp: int, starts: bool
) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR), quantization=PER_TENSOR)

    report = ask(engine, folder, tp=tp)

    is_split = engine != "transformers"
    assert (statuses(report) == both("refused")) is (is_split and not starts)
    if is_split and not starts:
        assert f"--tp {tp} does not divide the 4 attention heads" in report.layers[0].k.why
