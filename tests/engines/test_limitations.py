"""Serving commands, the engines that cannot honour a file, and the bytes of the cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8calib.dialects.registry import list_format_names
from fp8calib.engines.limitations import OLD_VLLM, SGLANG, TGI, TRANSFORMERS, VLLM
from fp8calib.engines.serving_commands import kv_bytes_per_token, limitations, serving_commands
from fp8calib.fp8.formats import E4M3FN, E4M3FNUZ, Fp8Format
from fp8calib.geometry.model_geometry import ModelGeometry
from tests.dialects.handmade import (
    hybrid_stats,
    latent_stats,
    make_attention,
    make_geometry,
    shared_stats,
)

LLAMA = make_geometry([make_attention(0), make_attention(1)])
DEEPSEEK = latent_stats().geometry


def _of_type(model_type: str) -> ModelGeometry:
    return make_geometry([make_attention(0)], model_type=model_type)


def _blocked(geometry: ModelGeometry, name: str, fmt: Fp8Format = E4M3FN) -> set[str]:
    return {limit.engine for limit in limitations(geometry, name, fmt) if limit.is_blocking}


@pytest.mark.parametrize(
    ("geometry", "name", "blocked"),
    [
        (LLAMA, "kv-overlay", set()),
        (LLAMA, "kv-overlay-head", {SGLANG, TGI}),
        (LLAMA, "tgi", {VLLM, SGLANG, TRANSFORMERS}),
        (LLAMA, "kv-scales", {TRANSFORMERS}),
        (LLAMA, "vllm-json", {VLLM, TGI, TRANSFORMERS}),
        (LLAMA, "rfc", {VLLM, OLD_VLLM, SGLANG, TGI, TRANSFORMERS}),
        (DEEPSEEK, "kv-overlay", {VLLM, SGLANG, TGI}),
        (DEEPSEEK, "kv-overlay-head", {VLLM, SGLANG, TGI, TRANSFORMERS}),
        (DEEPSEEK, "vllm-json", {VLLM, SGLANG, TGI, TRANSFORMERS}),
        (_of_type("opt"), "kv-overlay", {SGLANG, TGI, TRANSFORMERS}),
        (_of_type("qwen2"), "kv-overlay", {SGLANG}),
        (_of_type("mixtral"), "kv-overlay", {SGLANG}),
        (_of_type("gemma"), "kv-overlay", {SGLANG}),
        (_of_type("granite"), "kv-scales", {SGLANG, TRANSFORMERS}),
        (_of_type("opt"), "vllm-json", {VLLM, TGI, TRANSFORMERS}),
        (_of_type("gpt2"), "kv-overlay", {SGLANG, TRANSFORMERS}),
        (_of_type("falcon"), "kv-overlay", {SGLANG, TRANSFORMERS}),
        (_of_type("gpt_neox"), "kv-overlay", {SGLANG, TRANSFORMERS}),
        (_of_type("gpt2"), "kv-scales", {VLLM, SGLANG, TRANSFORMERS}),
        (_of_type("mpt"), "kv-overlay", {VLLM, SGLANG, TGI, TRANSFORMERS}),
        (_of_type("jamba"), "kv-overlay", {VLLM, SGLANG, TGI}),
        (_of_type("llama4_text"), "kv-overlay", {TGI, TRANSFORMERS}),
        (_of_type("dbrx"), "kv-overlay", {TRANSFORMERS}),
        (_of_type("lfm2"), "kv-scales", {VLLM, SGLANG, TRANSFORMERS}),
        (_of_type("bamba"), "kv-overlay-head", {VLLM, SGLANG, TGI}),
        (_of_type("hunyuan_v1_dense"), "vllm-json", {VLLM, TGI, TRANSFORMERS}),
        (_of_type("llama4_text"), "vllm-json", {VLLM, SGLANG, TGI, TRANSFORMERS}),
        (_of_type("qwen3"), "tgi", {VLLM, SGLANG, TGI, TRANSFORMERS}),
        (_of_type("mistral"), "vllm-json", {VLLM, TGI, TRANSFORMERS}),
        (hybrid_stats().geometry, "kv-overlay", {SGLANG, TGI}),
    ],
)
def test_the_engines_that_cannot_use_a_file_are_these(
    geometry: ModelGeometry, name: str, blocked: set[str]
) -> None:
    assert _blocked(geometry, name) == blocked


@pytest.mark.parametrize("name", ["rfc", "vllm-json"])
def test_an_engine_that_reads_no_json_refuses_no_key_of_one(name: str) -> None:
    whys = {
        limit.engine: limit.why for limit in limitations(LLAMA, name, E4M3FN) if limit.is_blocking
    }
    assert {whys[TGI], whys[TRANSFORMERS]} == {"it reads no JSON of scales"}


def test_fnuz_scales_files_are_refused_by_every_engine() -> None:
    assert _blocked(LLAMA, "vllm-json", E4M3FNUZ) == {VLLM, OLD_VLLM, SGLANG, TGI, TRANSFORMERS}
    assert serving_commands(LLAMA, "vllm-json", Path("a"), model="m", fmt=E4M3FNUZ) == []


def _conditions(geometry: ModelGeometry, name: str, **options: bool) -> list[tuple[str, str]]:
    return [
        (limit.engine, limit.why)
        for limit in limitations(geometry, name, E4M3FN, **options)
        if not limit.is_blocking
    ]


@pytest.mark.parametrize(
    ("geometry", "name", "engine", "words"),
    [
        (LLAMA, "kv-overlay-head", VLLM, "FlashAttention 3 or later"),
        (LLAMA, "kv-overlay", VLLM, "gfx94x"),
        (LLAMA, "kv-overlay-head", VLLM, "on a CPU the largest"),
        (shared_stats().geometry, "kv-overlay", TRANSFORMERS, "reported as unexpected"),
        (LLAMA, "vllm-json", SGLANG, "depends on the attention backend"),
        (_of_type("opt"), "vllm-json", OLD_VLLM, "Llama 2 only"),
        (LLAMA, "kv-scales", VLLM, "quantization_config of kv-overlay"),
        (LLAMA, "tgi", TGI, "rounded to the model's dtype"),
    ],
)
def test_conditions_are_told_of_engines_that_can_use_a_file(
    geometry: ModelGeometry, name: str, engine: str, words: str
) -> None:
    assert any(words in why for who, why in _conditions(geometry, name) if who == engine)


def test_only_vllm_reads_the_scale_of_q() -> None:
    added = set(_conditions(LLAMA, "kv-overlay", query=True)) - set(
        _conditions(LLAMA, "kv-overlay")
    )

    assert {engine for engine, _ in added} == {SGLANG, TGI, TRANSFORMERS}


@pytest.mark.parametrize("name", list_format_names())
@pytest.mark.parametrize("fmt", [E4M3FN, E4M3FNUZ])
def test_every_limitation_names_reason_and_source(name: str, fmt: Fp8Format) -> None:
    for geometry in (LLAMA, DEEPSEEK, shared_stats().geometry, _of_type("gpt_neox")):
        found = limitations(geometry, name, fmt, query=True)
        assert found
        assert all(limit.why and limit.source for limit in found)
        assert len(set(found)) == len(found)


def test_an_overlay_is_served_by_three_commands() -> None:
    commands = serving_commands(LLAMA, "kv-overlay", Path("out/kv-overlay"), model="m")

    assert [(command.engine, command.command) for command in commands] == [
        (VLLM, "vllm serve out/kv-overlay --kv-cache-dtype fp8"),
        (
            SGLANG,
            "python -m sglang.launch_server --model-path out/kv-overlay --kv-cache-dtype fp8_e4m3",
        ),
        (
            TGI,
            "text-generation-launcher --model-id out/kv-overlay --kv-cache-dtype fp8_e4m3fn",
        ),
    ]


def test_a_scales_file_is_served_beside_the_model_with_its_ranks() -> None:
    path = Path("out dir/kv_cache_scales.tp2.json")
    commands = serving_commands(LLAMA, "vllm-json", path, model="org/model", tp=2)

    assert [(command.engine, command.command) for command in commands] == [
        (
            SGLANG,
            "python -m sglang.launch_server --model-path org/model --kv-cache-dtype fp8_e4m3 "
            "--quantization-param-path 'out dir/kv_cache_scales.tp2.json' --tp-size 2",
        ),
        (
            OLD_VLLM,
            "python -m vllm.entrypoints.openai.api_server --model org/model --kv-cache-dtype fp8 "
            "--quantization-param-path 'out dir/kv_cache_scales.tp2.json' "
            "--tensor-parallel-size 2",
        ),
    ]


@pytest.mark.parametrize(
    ("geometry", "name", "engines"),
    [
        (LLAMA, "kv-overlay-head", [VLLM]),
        (LLAMA, "tgi", [TGI]),
        (LLAMA, "kv-scales", []),
        (LLAMA, "rfc", []),
        (DEEPSEEK, "kv-overlay", []),
    ],
)
def test_an_engine_that_cannot_use_a_file_gets_no_command(
    geometry: ModelGeometry, name: str, engines: list[str]
) -> None:
    commands = serving_commands(geometry, name, Path("a"), model="m")
    assert [command.engine for command in commands] == engines


@pytest.mark.parametrize(
    ("checkpoint_dtype", "before"), [("bfloat16", 32), ("float16", 32), ("float32", 64)]
)
def test_the_cache_takes_one_byte_an_element_instead_of_the_checkpoints_size(
    checkpoint_dtype: str, before: int
) -> None:
    geometry = make_geometry(
        [make_attention(0), make_attention(1), make_attention(2, producer=0), None],
        checkpoint_dtype=checkpoint_dtype,
    )
    assert kv_bytes_per_token(geometry) == (before, 16)  # 2 layers of 2 heads of 2 + 2


def test_a_latent_and_its_rotary_part_are_cached_once() -> None:
    assert kv_bytes_per_token(DEEPSEEK) == (12, 6)
