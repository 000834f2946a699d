"""Serving commands and limitations of files that were just written, found by replaying engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from fp8calib.dialects.registry import find_dialect
from fp8calib.dialects.write import write_formats
from fp8calib.engines.registry import ENGINES
from fp8calib.engines.serving import Serving, find_scale_serving
from fp8calib.fp8.formats import E4M3FN, E4M3FNUZ, Fp8Format
from fp8calib.stats.calibration_stats import CalibrationStats
from tests.dialects.handmade import (
    hybrid_stats,
    latent_stats,
    linear_stats,
    make_kv_sites,
    make_stats,
    plain_stats,
    save_source,
)
from tests.engines.check_handmade import moved_geometry

VLLM, OLD_VLLM, SGLANG, TGI, TRANSFORMERS = (
    "vLLM",
    "vLLM 0.4-0.6",
    "SGLang",
    "TGI",
    "transformers",
)
Serve = Callable[..., Serving]


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """Give what writes a format of statistics and asks who serves it."""

    def write_and_ask(
        stats: CalibrationStats,
        name: str,
        fmt: Fp8Format = E4M3FN,
        *,
        query: bool = False,
        tp: int = 1,
    ) -> Serving:
        model_type = stats.geometry.model_type
        (tmp_path / "out").mkdir()
        with save_source(stats, tmp_path / "source", model_type=model_type) as source:
            write_formats(
                stats,
                [name],
                tmp_path / "out",
                fmt=fmt,
                tps=[tp],
                source=source,
                query=query,
                fallback=None,
            )
        return find_scale_serving(
            tmp_path / "out" / find_dialect(name).path(tp),
            Path("out dir") / find_dialect(name).path(tp),
            stats.geometry,
            model=source.folder,
            model_name="org/model",
            tp=tp,
        )

    return write_and_ask


def list_blocked(serving: Serving) -> set[str]:
    return {item.engine for item in serving.limitations if item.is_blocking}


def of_type(model_type: str) -> CalibrationStats:
    return plain_stats(model_type=model_type)


def moved_stats(pattern: str, model_type: str) -> CalibrationStats:
    geometry = moved_geometry(pattern, model_type=model_type)
    return make_stats(geometry, make_kv_sites(geometry))


GPT2 = moved_stats("transformer.h.{}.attn", "gpt2")


@pytest.mark.parametrize(
    ("stats", "name", "blocked"),
    [
        (plain_stats(), "kv-overlay", set()),
        (plain_stats(), "kv-overlay-head", {SGLANG, TGI}),
        (plain_stats(), "tgi", {VLLM, SGLANG, TRANSFORMERS}),
        (plain_stats(), "kv-scales", {TRANSFORMERS}),
        (plain_stats(), "vllm-json", {VLLM, SGLANG, TGI, TRANSFORMERS}),
        (linear_stats(), "rfc", {VLLM, OLD_VLLM, SGLANG, TGI, TRANSFORMERS}),
        (latent_stats(), "kv-overlay", {VLLM, SGLANG, TGI}),
        (latent_stats(), "kv-overlay-head", {VLLM, SGLANG, TGI, TRANSFORMERS}),
        (latent_stats(), "vllm-json", {VLLM, SGLANG, TGI, TRANSFORMERS}),
        (of_type("opt"), "kv-overlay", {SGLANG, TGI, TRANSFORMERS}),
        (of_type("qwen2"), "kv-overlay", {SGLANG}),
        (of_type("mixtral"), "kv-overlay", {SGLANG}),
        (of_type("gemma"), "kv-overlay", {SGLANG}),
        (of_type("granite"), "kv-scales", {SGLANG, TRANSFORMERS}),
        (of_type("opt"), "vllm-json", {VLLM, SGLANG, TGI, TRANSFORMERS}),
        (GPT2, "kv-overlay", {TRANSFORMERS}),
        (of_type("falcon"), "kv-overlay", {SGLANG, TRANSFORMERS}),
        (of_type("gpt_neox"), "kv-overlay", {SGLANG, TRANSFORMERS}),
        (GPT2, "kv-scales", {VLLM, SGLANG, TRANSFORMERS}),
        (of_type("mpt"), "kv-overlay", {VLLM, SGLANG, TGI, TRANSFORMERS}),
        (of_type("jamba"), "kv-overlay", {VLLM, SGLANG, TGI}),
        (of_type("llama4_text"), "kv-overlay", {SGLANG, TGI}),
        (of_type("dbrx"), "kv-overlay", {TRANSFORMERS}),
        (of_type("lfm2"), "kv-scales", {VLLM, SGLANG, TGI, TRANSFORMERS}),
        (of_type("bamba"), "kv-overlay-head", {VLLM, SGLANG, TGI}),
        (of_type("llama4_text"), "vllm-json", {VLLM, SGLANG, TGI, TRANSFORMERS}),
        (of_type("qwen3"), "tgi", {VLLM, SGLANG, TGI, TRANSFORMERS}),
        (of_type("mistral"), "vllm-json", {VLLM, SGLANG, TGI, TRANSFORMERS}),
        (hybrid_stats(), "kv-overlay", {SGLANG, TGI}),
    ],
)
def test_the_engines_that_cannot_use_a_file_are_these(
    serve: Serve, stats: CalibrationStats, name: str, blocked: set[str]
) -> None:
    # transformers' own loader answers in test_check_agrees_*, and takes a second for each.
    with patch.dict(ENGINES):  # which keeps their order
        del ENGINES["transformers"]
        assert list_blocked(serve(stats, name)) == blocked - {TRANSFORMERS}


def list_commands(serving: Serving) -> list[tuple[str, str]]:
    return [(item.engine, item.command) for item in serving.commands]


def test_an_overlay_is_served_by_three_commands(serve: Serve) -> None:
    assert list_commands(serve(plain_stats(), "kv-overlay")) == [
        (VLLM, "vllm serve 'out dir/kv-overlay' --kv-cache-dtype fp8"),
        (
            SGLANG,
            "python -m sglang.launch_server --model-path 'out dir/kv-overlay' "
            "--kv-cache-dtype fp8_e4m3",
        ),
        (
            TGI,
            "text-generation-launcher --model-id 'out dir/kv-overlay' --kv-cache-dtype fp8_e4m3fn",
        ),
    ]


def test_a_scales_file_is_served_beside_the_model_with_its_ranks(serve: Serve) -> None:
    assert list_commands(serve(plain_stats(), "vllm-json", tp=2)) == [
        (
            OLD_VLLM,
            "python -m vllm.entrypoints.openai.api_server --model org/model --kv-cache-dtype fp8 "
            "--quantization-param-path 'out dir/kv_cache_scales.tp2.json' "
            "--tensor-parallel-size 2",
        ),
    ]


@pytest.mark.parametrize(
    ("stats", "name", "engines"),
    [
        (plain_stats(), "kv-overlay-head", [VLLM]),
        (plain_stats(), "tgi", [TGI]),
        (plain_stats(), "kv-scales", []),
        (linear_stats(), "rfc", []),
        (latent_stats(), "kv-overlay", []),
    ],
)
def test_an_engine_that_cannot_use_a_file_gets_no_command(
    serve: Serve, stats: CalibrationStats, name: str, engines: list[str]
) -> None:
    assert [engine for engine, _ in list_commands(serve(stats, name))] == engines


def explain(serving: Serving, engine: str, *, is_blocking: bool) -> list[str]:
    return [
        item.why
        for item in serving.limitations
        if item.engine == engine and item.is_blocking is is_blocking
    ]


@pytest.mark.parametrize("name", ["rfc", "vllm-json"])
def test_an_engine_that_reads_no_json_refuses_no_key_of_one(serve: Serve, name: str) -> None:
    serving = serve(linear_stats(), name)
    for engine in (TGI, TRANSFORMERS):
        (why,) = explain(serving, engine, is_blocking=True)
        assert f"{engine} reads no JSON of scales" in why


@pytest.mark.parametrize(
    ("stats", "name", "engine", "words"),
    [
        (plain_stats(), "kv-overlay-head", VLLM, "FlashAttention 3 or later"),
        (plain_stats(), "kv-overlay-head", VLLM, "on a backend that takes one number, the largest"),
        (of_type("opt"), "vllm-json", OLD_VLLM, "Llama 2 only"),
        (plain_stats(), "kv-scales", VLLM, "quantization_config of kv-overlay"),
        (plain_stats(), "kv-scales", SGLANG, "quantization_config of kv-overlay"),
        (plain_stats(), "kv-scales", TGI, "only inside the model's folder"),
        (plain_stats(), "tgi", TGI, "rounded to float16"),
        (plain_stats(), "tgi", TGI, "pull request 2028"),
    ],
)
def test_conditions_are_listed_for_engines_that_can_use_a_file(
    serve: Serve, stats: CalibrationStats, name: str, engine: str, words: str
) -> None:
    serving = serve(stats, name)
    assert engine not in list_blocked(serving)
    assert any(words in why for why in explain(serving, engine, is_blocking=False))


def test_llama_2_itself_is_promised_by_old_vllm(serve: Serve) -> None:
    assert explain(serve(plain_stats(), "vllm-json"), OLD_VLLM, is_blocking=False) == []


def test_only_vllm_reads_the_scale_of_q(serve: Serve) -> None:
    serving = serve(plain_stats(), "kv-overlay", query=True)

    about_q = {item.engine: item for item in serving.limitations if "q_scale" in item.why}
    assert "is loaded" in about_q.pop(VLLM).why
    assert set(about_q) == {SGLANG, TGI}
    assert not any("is loaded" in item.why for item in about_q.values())


def test_no_engine_reads_a_file_of_scales_for_fnuz(serve: Serve) -> None:
    serving = serve(plain_stats(), "vllm-json", E4M3FNUZ)
    assert list_blocked(serving) == {VLLM, OLD_VLLM, SGLANG, TGI, TRANSFORMERS}
    assert list_commands(serving) == []
    for engine in (OLD_VLLM, SGLANG):
        (why,) = explain(serving, engine, is_blocking=True)
        assert "kv_cache.dtype is 'float8_e4m3fnuz', not float8_e4m3fn" in why


def test_an_overlay_for_fnuz_is_served_by_vllm_on_amd_alone(serve: Serve) -> None:
    """SGLang doubles the scales there, TGI's and transformers' caches are e4m3fn everywhere."""
    serving = serve(plain_stats(), "kv-overlay", E4M3FNUZ)
    assert list_blocked(serving) == {SGLANG, TGI, TRANSFORMERS}
    assert [engine for engine, _ in list_commands(serving)] == [VLLM]
    why = explain(serving, VLLM, is_blocking=False)[0]
    assert "right on AMD gfx94x alone" in why
