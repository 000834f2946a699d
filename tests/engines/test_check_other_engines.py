"""Engines that `check` asks by name alone; their rules were read, and none of them was run here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fp8calib.engines.registry import ENGINES, list_defaults
from tests.dialects.handmade import latent_stats, make_geometry
from tests.engines.check_handmade import (
    FP8,
    MODELOPT,
    PER_HEAD,
    PER_TENSOR,
    QUARK,
    Numbers,
    ask,
    both,
    save_folder,
    spell,
    statuses,
    values,
)

PAIR = spell("k_scale", "v_scale")
HEADS = spell("k_scale", "v_scale", value=[[[0.25]], [[0.5]]])
PROJECTIONS = spell("k_proj.k_scale", "v_proj.v_scale")
BEFORE = {**PER_TENSOR, "ignore": ["re:.*"]}
"""The config of overlays that fp8calib wrote before it knew of TPUs."""
BRIEF = ("tensorrt-llm", "vllm-tpu", "vllm-gaudi", "lmdeploy", "atom", "lightllm")


def test_they_are_asked_only_by_name() -> None:
    assert not set(BRIEF) & set(list_defaults())
    assert [key for key, engine in ENGINES.items() if engine.is_brief] == list(BRIEF)


@pytest.mark.parametrize(
    ("engine", "quantization", "scales", "status"),
    [
        ("vllm-tpu", PER_TENSOR, PAIR, "used"),
        ("vllm-tpu", BEFORE, PAIR, "dropped"),
        ("vllm-tpu", {**PER_TENSOR, "ignore": ["lm_head", "re:.*proj$"]}, PAIR, "used"),
        ("vllm-tpu", {**PER_TENSOR, "ignore": ["model.layers.0.self_attn.attn"]}, PAIR, "partly"),
        ("vllm-tpu", PER_HEAD, HEADS, "used"),
        ("vllm-tpu", FP8, PAIR, "dropped"),
        ("vllm-tpu", MODELOPT, PROJECTIONS, "refused"),
        ("vllm-tpu", QUARK, spell("k_proj.output_scale", "v_proj.output_scale"), "refused"),
        ("vllm-tpu", None, PAIR, "refused"),
        ("vllm-gaudi", PER_TENSOR, PAIR, "used"),
        ("vllm-gaudi", BEFORE, PAIR, "used"),
        ("vllm-gaudi", PER_HEAD, HEADS, "dropped"),
        ("vllm-gaudi", FP8, PAIR, "dropped"),
        ("vllm-gaudi", MODELOPT, PROJECTIONS, "dropped"),
        ("vllm-gaudi", QUARK, spell("k_proj.output_scale", "v_proj.output_scale"), "refused"),
        ("tensorrt-llm", PER_TENSOR, PAIR, "dropped"),
        ("tensorrt-llm", MODELOPT, PROJECTIONS, "dropped"),
        ("tensorrt-llm", FP8, PAIR, "dropped"),
        ("tensorrt-llm", None, PAIR, "dropped"),
        ("tensorrt-llm", None, {}, "defaulted"),
        ("lmdeploy", PER_TENSOR, PAIR, "refused"),
        ("lmdeploy", MODELOPT, {}, "refused"),
        ("lmdeploy", FP8, PAIR, "dropped"),
        ("lmdeploy", None, PAIR, "dropped"),
        ("lmdeploy", FP8, {}, "defaulted"),
        ("atom", PER_TENSOR, PAIR, "dropped"),
        ("atom", MODELOPT, PROJECTIONS, "dropped"),
    ],
)
def test_what_they_do_with_kv_scales(
    tmp_path: Path,
    engine: str,
    quantization: dict[str, Any] | None,
    scales: Numbers,
    status: str,
) -> None:
    report = ask(engine, save_folder(tmp_path / "f", scales, quantization=quantization))

    expected = [("dropped", "dropped"), ("used", "used")] if status == "partly" else both(status)
    assert statuses(report) == expected
    used = {"used": 0.25, "defaulted": 1.0}.get(status)
    if used is not None and quantization is not PER_HEAD:
        assert values(report) == [(used, used)] * 2


def test_an_engine_whose_constant_depends_on_the_gpu_has_no_number(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "f", PAIR, quantization=PER_TENSOR)

    assert values(ask("atom", folder)) == [(None, None)] * 2
    assert (
        values(ask("vllm-tpu", save_folder(tmp_path / "g", PAIR, quantization=BEFORE)))
        == [(1.0, 1.0)] * 2
    )


@pytest.mark.parametrize(
    ("architecture", "is_noted"),
    [("LlamaForCausalLM", True), ("MistralForCausalLM", False), ("GptOssForCausalLM", False)],
)
def test_tpus_run_some_models_in_jax_with_constants(
    tmp_path: Path, architecture: str, is_noted: bool
) -> None:
    folder = save_folder(
        tmp_path / "f", PAIR, quantization=PER_TENSOR, architectures=[architecture]
    )

    problems = ask("vllm-tpu", folder).problems

    assert any("MODEL_IMPL_TYPE=vllm" in problem for problem in problems) is is_noted


@pytest.mark.parametrize(("engine", "is_unknown"), [("vllm-gaudi", True), ("vllm-tpu", False)])
def test_what_gaudi_does_with_latents_is_unknown(
    tmp_path: Path, engine: str, is_unknown: bool
) -> None:
    attention = latent_stats().header.geometry.layers[0].attention
    assert attention is not None
    scales = spell("k_scale", value=0.25, layers=1) | spell("v_scale", value=0.75, layers=1)
    folder = save_folder(tmp_path / "f", scales, quantization=PER_TENSOR)

    report = ask(engine, folder, make_geometry([attention], model_type="deepseek_v3"))

    assert any("latents" in why for why in report.unknown) is is_unknown
    assert not report.ok
