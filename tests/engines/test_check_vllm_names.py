"""Models in which vLLM 0.32.0 has no place for a scale, or another than the file means."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8calib.model.shapes import ModelGeometry
from tests.engines.check_handmade import (
    FP8,
    MODELOPT,
    PER_TENSOR,
    QUARK,
    ask,
    both,
    moved_geometry,
    plain_geometry,
    save_folder,
    spell,
    statuses,
    values,
)
from tests.formats.handmade import latent_stats, make_geometry

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


@pytest.mark.parametrize(
    ("model_type", "module", "suffixes", "quantization"),
    [
        ("gpt2", "transformer.h.{}.attn", ("k_proj.output_scale", "v_proj.output_scale"), QUARK),
        ("gpt_neox", "gpt_neox.layers.{}.attention", PAIR, PER_TENSOR),
    ],
)
def test_roots_that_are_added(
    tmp_path: Path,
    model_type: str,
    module: str,
    suffixes: tuple[str, ...],
    quantization: dict[str, object],
) -> None:
    """A name without the model's root is loaded (0.32.0, run)."""
    geometry = moved_geometry(module, model_type=model_type)
    names = spell(*suffixes, path=module.partition(".")[2])
    folder = save_folder(tmp_path / "f", names, quantization=quantization)

    assert statuses(ask("vllm", folder, geometry)) == both("used")


def test_gpt_oss_renames_q_proj_before_it_looks_for_a_parameter(tmp_path: Path) -> None:
    """Others skip the name (0.32.0, run)."""
    names = spell(*PAIR, "q_proj.q_scale")
    folder = save_folder(tmp_path / "f", names, quantization=PER_TENSOR)
    found = [
        statuses(ask("vllm", folder, plain_geometry(model_type=each)))
        for each in ("gpt_oss", "deepseek_v2")
    ]

    assert found == [both("refused"), both("used")]


def test_without_scales_it_is_served_with_ones(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "f", {}, quantization=PER_TENSOR)

    report = ask("vllm", folder, plain_geometry(model_type="jamba"))

    assert (statuses(report), values(report)) == (both("defaulted"), [(1.0, 1.0)] * 2)


@pytest.mark.parametrize("model_type", ["bamba", "diffllama", "minimax", "mpt", "xglm"])
def test_models_it_does_not_run_are_refused(tmp_path: Path, model_type: str) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR), quantization=PER_TENSOR)

    assert statuses(ask("vllm", folder, plain_geometry(model_type=model_type))) == both("refused")


EXCLUDING_QUARK = {
    **QUARK,
    "exclude": [name.removesuffix(".weight") for name in spell("o_proj.weight", "q_norm.weight")],
}
WEIGHTS = spell("k_proj.weight", "v_proj.weight", "o_proj.weight", value=[[1.0]])


@pytest.mark.parametrize("quantization", [PER_TENSOR, FP8, MODELOPT])
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.self_attn.k_scale",
        "mtp.layers.0.self_attn.k_scale",
        "model.layers.0.self_attn.q_proj.q_scale",
        "model.layers.0.self_attn.k_proj.k_zero_point",
        "model.layers.0.mlp.k_scale",
        "model.layers.0.self_attn.attn.kv_scale",
        "model.layers.0.self_attn.K_scale",
        "model.layers.0.self_attn.key_scale",
        "model.layers.0.self_attn._k_scale",
        "model.layers.0.self_attn.k_cache_scale",
        "layers.0.self_attn.k_scale",
        "k_scale",
    ],
)
def test_a_name_without_a_parameter_stops_the_loader(
    tmp_path: Path, quantization: dict[str, object], name: str
) -> None:
    scales = spell(*PAIR) | WEIGHTS
    plain = save_folder(tmp_path / "plain", scales, quantization=quantization)
    stray = save_folder(tmp_path / "stray", {**scales, name: 0.5}, quantization=quantization)

    assert statuses(ask("vllm", plain)) == both("used")
    report = ask("vllm", stray)
    assert statuses(report) == both("refused")
    assert name in report.layers[0].k.why


@pytest.mark.parametrize("quantization", [PER_TENSOR, EXCLUDING_QUARK])
@pytest.mark.parametrize(
    "suffix",
    [
        *("o_proj.input_scale", "o_proj.weight_scale", "o_proj.output_scale", "input_scale"),
        *("q_norm.output_scale", "q_norm.weight_zero_point"),
    ],
)
def test_scales_of_weights_that_are_not_quantized_stop_the_loader(
    tmp_path: Path, quantization: dict[str, object], suffix: str
) -> None:
    norms = spell("q_norm.weight", value=[1.0])
    scales = spell(*PAIR) | WEIGHTS | norms | spell(suffix, layers=1)

    report = ask("vllm", save_folder(tmp_path / "f", scales, quantization=quantization))

    assert statuses(report) == both("refused")
    assert suffix in report.layers[0].k.why


@pytest.mark.parametrize("quantization", [PER_TENSOR, EXCLUDING_QUARK])
@pytest.mark.parametrize(
    ("name", "is_refused"),
    [
        ("model.layers.0.self_attn.o_proj.weight_scale", False),
        ("model.layers.0.self_attn.q_norm.input_scale", False),
        ("model.layers.0.self_attn.o_proj.output_scale", True),
        ("model.layers.0.self_attn.k_proj.weight_scale", True),
        ("lm_head.weight_scale", True),
    ],
)
def test_the_loader_of_qwen3_moe_ignores_some_scales_of_weights(
    tmp_path: Path, quantization: dict[str, object], name: str, is_refused: bool
) -> None:
    norms = spell("q_norm.weight", value=[1.0]) | {"lm_head.weight": [[1.0]]}
    scales = spell(*PAIR) | WEIGHTS | norms | {name: 1.0}
    folder = save_folder(tmp_path / "f", scales, quantization=quantization)

    report = ask("vllm", folder, plain_geometry(model_type="qwen3_moe"))

    assert (statuses(report) == both("refused")) is is_refused


def test_the_number_of_an_expert_is_not_that_of_a_draft_layer(tmp_path: Path) -> None:
    expert = spell("experts.2.down_proj.k_scale", path="model.layers.{}.mlp")
    draft = spell(*PAIR, layers=1, path="model.layers.2.self_attn")
    geometry = plain_geometry(num_draft_layers=1)
    stray = save_folder(tmp_path / "stray", spell(*PAIR) | expert, quantization=PER_TENSOR)
    drafted = save_folder(tmp_path / "drafted", spell(*PAIR) | draft, quantization=PER_TENSOR)

    assert statuses(ask("vllm", stray, geometry)) == both("refused")
    assert ask("vllm", drafted, geometry).ok


def test_scales_of_weights_that_the_config_quantizes_have_a_place(tmp_path: Path) -> None:
    group = {
        "targets": ["Linear"],
        "weights": {"type": "float", "num_bits": 8, "strategy": "tensor"},
    }
    quantization = {**PER_TENSOR, "ignore": [], "config_groups": {"group_0": group}}
    scales = spell(*PAIR) | WEIGHTS | spell("o_proj.weight_scale")

    report = ask("vllm", save_folder(tmp_path / "f", scales, quantization=quantization))
    assert statuses(report) == both("used")


OUTPUTS = ("k_proj.output_scale", "v_proj.output_scale")
NAMES_FIRST = (
    *("ernie4_5", "gemma4_text", "glm4", "granite", "llama", "mistral", "mixtral", "phi3"),
    *("qwen2", "qwen3", "qwen3_moe"),
)
FUSES_FIRST = (
    *("apertus", "arcee", "biogpt", "cohere", "cohere2", "dots1", "exaone4", "gemma", "gemma2"),
    *("gemma3_text", "glm", "helium", "hunyuan_v1_dense", "nanochat", "nemotron", "nemotron_h"),
    *("olmo", "olmo2", "olmo3", "olmoe", "opt", "phi", "qwen2_moe", "seed_oss", "smollm3"),
    *("starcoder2",),
)
"""Model types by what vLLM 0.32.0 did with these names (run, one by one)."""


@pytest.mark.parametrize("quantization", [FP8, QUARK])
@pytest.mark.parametrize(
    ("model_type", "architecture", "status"),
    [
        *((model_type, "Handmade", "used") for model_type in NAMES_FIRST),
        *((model_type, "Handmade", "refused") for model_type in FUSES_FIRST),
        ("gemma2", "PaliGemmaForConditionalGeneration", "used"),
        ("llama", "VipLlavaForConditionalGeneration", "refused"),
    ],
)
def test_quarks_names_are_lost_where_k_proj_becomes_qkv_proj_first(
    tmp_path: Path,
    quantization: dict[str, object],
    model_type: str,
    architecture: str,
    status: str,
) -> None:
    folder = save_folder(tmp_path / "f", spell(*OUTPUTS) | WEIGHTS, quantization=quantization)

    report = ask("vllm", folder, plain_geometry(model_type=model_type, architecture=architecture))

    assert statuses(report) == both(status)
    assert ("qkv_proj" in report.layers[0].k.why) == (status == "refused")


@pytest.mark.parametrize(
    ("quantization", "statuses_", "number"),
    [
        (PER_TENSOR, "used", 0.25),
        (FP8, "dropped", 1.0),
        (MODELOPT, "dropped", 1.0),
        (QUARK, "dropped", 1.0),
        ({**PER_TENSOR, "kv_cache_scheme": None}, "dropped", 1.0),
    ],
)
def test_the_cache_of_falcon_is_fp8_only_with_a_scheme_of_compressed_tensors(
    tmp_path: Path, quantization: dict[str, object], statuses_: str, number: float
) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR), quantization=quantization)

    report = ask("vllm", folder, plain_geometry(model_type="falcon"))

    assert (statuses(report), values(report)) == (both(statuses_), [(number, number)] * 2)


@pytest.mark.parametrize("quantization", [FP8, MODELOPT, QUARK])
@pytest.mark.parametrize(
    ("model_type", "dtype", "held"),
    [
        ("llama", "bfloat16", 0.0123291015625),
        ("llama", "float32", 0.0123291015625),
        ("llama", "float16", 0.0123443603515625),
        ("gemma2", "float16", 0.0123291015625),
    ],
)
def test_scales_are_rounded_to_the_dtype_that_the_model_is_served_in(
    tmp_path: Path, quantization: dict[str, object], model_type: str, dtype: str, held: float
) -> None:
    """What vLLM 0.32 held on a CPU with --dtype auto; compressed-tensors' scales stay fp32."""
    geometry = plain_geometry(model_type=model_type, checkpoint_dtype=dtype)
    scales = spell("k_scale", value=0.0123456) | spell("v_scale", value=0.5)
    folder = save_folder(tmp_path / "f", scales, quantization=quantization)
    exact = save_folder(tmp_path / "g", scales, quantization=PER_TENSOR)

    report = ask("vllm", folder, geometry)

    assert report.ok
    assert values(report) == [(held, 0.5)] * 2
    assert any("are rounded to" in problem for problem in report.problems)
    is_half = (model_type, dtype) == ("llama", "float16")
    assert any("FlashAttention 3 stops" in problem for problem in report.problems) is is_half
    assert "FlashAttention 3 stops" not in str(ask("vllm-cpu", folder, geometry).problems)
    assert values(ask("vllm", exact, geometry))[0][0] == pytest.approx(0.0123456, rel=1e-7)


def test_a_model_that_embeds_text_is_served_in_float16_instead_of_float32(tmp_path: Path) -> None:
    """Of an olmo3 without architectures vLLM 0.32 on a CPU held 0.1486816, not 0.1484375."""
    geometry = plain_geometry(
        model_type="olmo3", architecture="Olmo3ForCausalLM", checkpoint_dtype="float32"
    )
    for named, held in ((None, 0.148681640625), (["Olmo3ForCausalLM"], 0.1484375)):
        scales = spell(*PAIR, value=0.1487)
        folder = save_folder(tmp_path / str(held), scales, quantization=FP8, architectures=named)
        assert values(ask("vllm", folder, geometry))[0][0] == held


@pytest.mark.parametrize(("value", "status"), [(2e-8, "refused"), (7e4, "misread")])
def test_a_scale_outside_float16_is_refused_or_infinite(
    tmp_path: Path, value: float, status: str
) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR, value=value), quantization=FP8)

    report = ask("vllm", folder, plain_geometry(checkpoint_dtype="float16"))

    assert statuses(report) == both(status)
    assert ask("vllm", folder).allow_suspicious().ok


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_bare_scales_of_latents_are_skipped(tmp_path: Path, model_type: str) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR, layers=1))

    report = ask("vllm", folder, _latent(model_type))

    assert (statuses(report), values(report)) == ([("dropped", "dropped")], [(1.0, 1.0)])


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


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("tp", "starts"), [(1, True), (2, True), (4, True), (3, False), (8, False)]
)
def test_ranks_that_cannot_share_the_heads_are_refused(
    tmp_path: Path, engine: str, tp: int, starts: bool
) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR), quantization=PER_TENSOR)

    report = ask(engine, folder, tp=tp)

    assert (statuses(report) == both("refused")) is not starts
    if not starts:
        assert f"--tp {tp} does not divide the 4 attention heads" in report.layers[0].k.why
