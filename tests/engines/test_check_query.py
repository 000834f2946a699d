"""Scales of q and of probabilities are told among the problems, and names of rarer tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fp8calib.formats.read import read_scales
from tests.engines.check_handmade import (
    FP8,
    MODELOPT,
    PER_HEAD,
    PER_TENSOR,
    QUARK,
    ask,
    both,
    moved_geometry,
    plain_geometry,
    save_folder,
    spell,
    statuses,
)

PAIR = ("k_scale", "v_scale")
OUTPUTS = ("k_proj.output_scale", "v_proj.output_scale")
HYV3 = ("k_cache.scale", "v_cache.scale")
ENGINES = ("vllm", "sglang", "transformers")


def _problem(problems: tuple[str, ...], word: str) -> str:
    (found,) = [text for text in problems if word in text]
    return found


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("vllm", "is loaded (2, such as model.layers.0.self_attn.q_scale of"),
        ("sglang", "does not read it"),
    ],
)
def test_a_scale_of_q_is_told_and_decides_nothing(tmp_path: Path, engine: str, said: str) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR, "q_scale"), quantization=PER_TENSOR)

    report = ask(engine, folder)

    assert report.ok
    assert said in _problem(report.problems, "q_scale")


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_is_told_where_there_is_none(tmp_path: Path, engine: str) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR), quantization=PER_TENSOR)

    assert not [p for p in ask(engine, folder).problems if "q_scale" in p or "prob" in p]


@pytest.mark.parametrize(
    ("quantization", "said"),
    [(PER_TENSOR, "is not a scale, but vLLM uses it"), (FP8, "vLLM uses 1.0")],
)
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_scale_of_q_that_is_none_is_told(
    tmp_path: Path, quantization: dict[str, Any], said: str, value: float
) -> None:
    scales = {**spell(*PAIR), **spell("q_scale", value=value)}
    report = ask("vllm", save_folder(tmp_path / "f", scales, quantization=quantization))

    assert report.ok
    assert said in _problem(report.problems, "q_scale")


def test_a_scale_of_q_per_head_is_refused_where_one_is_wanted(tmp_path: Path) -> None:
    heads = spell("q_scale", value=[[[0.5]]] * 4)
    per_tensor = {**spell(*PAIR), **heads}
    per_head = {**spell(*PAIR, value=[[[0.5]]] * 2), **heads}

    refused = ask("vllm", save_folder(tmp_path / "a", per_tensor, quantization=PER_TENSOR))
    loaded = ask("vllm", save_folder(tmp_path / "b", per_head, quantization=PER_HEAD))

    assert statuses(refused) == both("refused")
    assert statuses(loaded) == both("used")


@pytest.mark.parametrize(
    ("quantization", "suffixes", "name", "status"),
    [
        (QUARK, OUTPUTS, "prob_output_scale", "used"),
        (FP8, PAIR, "prob_output_scale", "used"),
        (FP8, PAIR, "attn.prob_scale", "used"),
        (FP8, PAIR, "prob_scale", "refused"),
        (MODELOPT, PAIR, "prob_output_scale", "refused"),
        (PER_TENSOR, PAIR, "prob_output_scale", "refused"),
        (PER_TENSOR, PAIR, "attn.prob_scale", "refused"),
    ],
)
def test_vllm_has_a_place_for_probabilities_under_some_methods(
    tmp_path: Path, quantization: dict[str, Any], suffixes: tuple[str, ...], name: str, status: str
) -> None:
    scales = spell(*suffixes, name)
    report = ask("vllm", save_folder(tmp_path / "f", scales, quantization=quantization))

    assert statuses(report) == both(status)
    if status == "used":
        assert name in _problem(report.problems, "prob_scale is loaded")


def test_hunyuans_names_are_known(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "f", spell(*HYV3, "q.scale"), quantization=PER_TENSOR)

    vllm = ask("vllm", folder)

    assert statuses(vllm) == both("used")
    assert "q.scale" in _problem(vllm.problems, "q_scale is loaded")
    report = ask("sglang", folder)
    assert statuses(report) == both("dropped")
    assert all(layer.k.fix and layer.v.fix for layer in report.layers)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_nemotron_hs_mixers_are_attention_too(tmp_path: Path, engine: str) -> None:
    path = "backbone.layers.{}.mixer"
    geometry = moved_geometry(path, model_type="nemotron_h")
    scales = spell("k_proj.k_scale", "v_proj.v_scale", path=path)
    folder = save_folder(tmp_path / "f", scales, quantization=MODELOPT)

    assert statuses(ask(engine, folder, geometry)) == both("used")


def test_hunyuans_names_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    values = {name: torch.tensor(0.25 + i) for i, name in enumerate(spell(*HYV3))}
    save_file(values, path)

    table = read_scales(path, plain_geometry()).table

    assert [scale.values.item() for scale in table.scales.values()] == [0.25, 1.25, 2.25, 3.25]
