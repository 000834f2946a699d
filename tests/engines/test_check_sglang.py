"""Expected verdicts from SGLang 0.5.23's `kv_cache.py`, its remapping, and its models' loaders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fp8calib.engines.facts.release import SGLANG_RELEASES
from fp8calib.engines.replay.folder import open_folder
from fp8calib.engines.sglang.replay import has_kv_method, name_sglang_parameter
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
    plain_geometry,
    save_folder,
    spell,
    statuses,
    values,
)
from tests.formats.handmade import latent_stats

NAN = float("nan")
PAIR = ("k_scale", "v_scale")
PROJECTIONS = ("k_proj.k_scale", "v_proj.v_scale")
INNER = ("attn.k_scale", "attn.v_scale")
GPT2 = "transformer.h.{}.attn"


@pytest.mark.parametrize(
    ("quantization", "suffixes"),
    [
        (PER_TENSOR, PAIR),
        (PER_TENSOR, ("kv_scale",)),
        (FP8, PAIR),
        (FP8, ("kv_scale",)),
        (MODELOPT, ("k_proj.k_scale", "v_proj.v_scale")),
        (QUARK, ("k_proj.output_scale", "v_proj.output_scale")),
    ],
)
def test_models_that_remap_names_use_every_methods_own(
    tmp_path: Path, quantization: dict[str, Any], suffixes: tuple[str, ...]
) -> None:
    report = ask("sglang", save_folder(tmp_path / "f", spell(*suffixes), quantization=quantization))

    assert report.ok
    assert values(report) == [(0.25, 0.25)] * 2


@pytest.mark.parametrize("model_type", ["qwen2", "mixtral", "qwen2_moe", "opt"])
def test_models_that_do_not_remap_know_the_parameters_own_name_alone(
    tmp_path: Path, model_type: str
) -> None:
    geometry = plain_geometry(model_type=model_type)
    outer = save_folder(tmp_path / "outer", spell(*PAIR), quantization=PER_TENSOR)
    inner = save_folder(tmp_path / "inner", spell(*INNER), quantization=PER_TENSOR)

    assert statuses(ask("sglang", outer, geometry)) == both("dropped")
    assert ask("sglang", inner, geometry).ok
    assert statuses(ask("sglang", inner)) == both("dropped")


@pytest.mark.parametrize(
    ("model_type", "suffixes", "status"),
    [
        ("qwen3_5_text", PAIR, "used"),
        ("qwen3_5_text", PROJECTIONS, "used"),
        ("qwen3_next", PAIR, "refused"),
        ("qwen3_next", PROJECTIONS, "used"),
        ("phimoe", PAIR, "used"),
        ("cohere", (*PAIR, "q_scale"), "refused"),
        ("llama", (*PAIR, "q_scale"), "used"),
        ("gemma3_text", ("k_cache.scale", "v_cache.scale"), "refused"),
        ("phimoe", PROJECTIONS, "refused"),
        ("mixtral", PROJECTIONS, "refused"),
        ("gemma2", PROJECTIONS, "refused"),
        ("gemma3n_text", PROJECTIONS, "dropped"),
        ("olmo", PAIR, "refused"),
        ("falcon_h1", PAIR, "refused"),
        ("granite", ("kv_scale",), "dropped"),
        ("gemma", ("kv_scale",), "refused"),
        ("beam", PAIR, "dropped"),
    ],
)
def test_models_whose_loaders_have_ways_of_their_own(
    tmp_path: Path, model_type: str, suffixes: tuple[str, ...], status: str
) -> None:
    """All loaders of the wheel are run on names by `tests/real_engines/test_sglang_releases.py`."""
    folder = save_folder(tmp_path / "f", spell(*suffixes), quantization=FP8)

    assert statuses(ask("sglang", folder, plain_geometry(model_type=model_type))) == both(status)


@pytest.mark.parametrize(("value", "status"), [(1.0, "dropped"), (1.5, "refused")])
def test_qwen3_next_passes_over_scales_of_one(tmp_path: Path, value: float, status: str) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR, value=value), quantization=FP8)

    report = ask("sglang", folder, plain_geometry(model_type="qwen3_next"))

    assert statuses(report) == both(status)


def test_qwen3_next_passes_over_scales_of_its_draft_layers(tmp_path: Path) -> None:
    scales = {**spell(*PROJECTIONS), "mtp.layers.0.self_attn.k_scale": 0.5}
    folder = save_folder(tmp_path / "f", scales, quantization=FP8)

    report = ask("sglang", folder, plain_geometry(model_type="qwen3_next"))

    assert statuses(report) == both("used")


@pytest.mark.parametrize(
    ("name", "mapped"),
    [
        ("model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.attn.k_scale"),
        ("model.layers.0.self_attn.attn.k_scale", "model.layers.0.self_attn.attn.attn.k_scale"),
        ("model.layers.0.self_attn.v_proj.v_scale", "model.layers.0.self_attn.attn.v_scale"),
        ("model.layers.0.self_attn.q_scale", "model.layers.0.self_attn.q_scale"),
    ],
)
def test_names_are_remapped_as_sglangs_function_does(name: str, mapped: str) -> None:
    assert name_sglang_parameter(name, "llama", SGLANG_RELEASES[-1]) == mapped


@pytest.mark.parametrize("suffixes", [PAIR, ("kv_scale",)])
def test_bare_scales_have_no_place(tmp_path: Path, suffixes: tuple[str, ...]) -> None:
    report = ask("sglang", save_folder(tmp_path / "f", spell(*suffixes)))

    assert statuses(report) == both("dropped")
    assert values(report) == [(1.0, 1.0)] * 2


def test_a_shard_that_the_index_does_not_name_is_skipped(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR), quantization=PER_TENSOR, listed=False)

    assert statuses(ask("sglang", folder)) == both("defaulted")
    (folder / INDEX).unlink()
    assert ask("sglang", folder).ok


@pytest.mark.parametrize(
    ("k", "v", "status", "numbers"),
    [
        (0.5, 0.0, ("used", "misread"), (0.5, 0.5)),
        (0.0, 0.0, ("defaulted", "defaulted"), (1.0, 1.0)),
        (-0.5, 0.0, ("defaulted", "defaulted"), (1.0, 1.0)),
        (0.0, 0.5, ("refused", "refused"), (None, None)),
        (NAN, NAN, ("refused", "refused"), (None, None)),
        (float("inf"), 0.5, ("misread", "used"), (None, 0.5)),
        (2.0**-127, 2.0**-126, ("misread", "used"), (2.0**-127, 2.0**-126)),
    ],
)
@pytest.mark.parametrize("quantization", [PER_TENSOR, FP8])
def test_numbers_that_are_no_scales(
    tmp_path: Path,
    quantization: dict[str, Any],
    k: float,
    v: float,
    status: tuple[str, str],
    numbers: tuple[float | None, float | None],
) -> None:
    scales = spell("k_scale", value=k) | spell("v_scale", value=v)
    report = ask("sglang", save_folder(tmp_path / "f", scales, quantization=quantization))

    assert statuses(report) == [status] * 2
    assert values(report) == [numbers] * 2


@pytest.mark.parametrize(
    ("suffix", "status"), [("k_scale", ("used", "misread")), ("v_scale", ("refused", "refused"))]
)
def test_one_scale_of_two(tmp_path: Path, suffix: str, status: tuple[str, str]) -> None:
    report = ask("sglang", save_folder(tmp_path / "f", spell(suffix), quantization=PER_TENSOR))

    assert statuses(report) == [status] * 2


def test_per_head_schemes_are_ignored_and_per_head_shapes_refused(tmp_path: Path) -> None:
    scales = spell(*PAIR, value=[[[0.25]], [[0.5]]])
    scheme = save_folder(tmp_path / "scheme", scales, quantization=PER_HEAD)
    shape = save_folder(tmp_path / "shape", scales, quantization=PER_TENSOR)

    assert statuses(ask("sglang", scheme)) == both("dropped")
    assert statuses(ask("sglang", shape)) == both("refused")


@pytest.mark.parametrize(
    ("key", "value"), [("type", "int"), ("num_bits", 4), ("dynamic", True), ("symmetric", False)]
)
def test_other_schemes_are_ignored(tmp_path: Path, key: str, value: object) -> None:
    scheme = {**PER_TENSOR["kv_cache_scheme"], key: value}  # type: ignore[dict-item]
    quantization = {**PER_TENSOR, "kv_cache_scheme": scheme}
    folder = save_folder(tmp_path / "f", spell(*PAIR), quantization=quantization)

    assert statuses(ask("sglang", folder)) == both("dropped")
    assert not has_kv_method(open_folder(folder), plain_geometry(), SGLANG_RELEASES[-1])


@pytest.mark.parametrize(("value", "status"), [(0.25, "misread"), (1.0, "used")])
def test_latent_attention_multiplies_what_it_stored_without_a_scale(
    tmp_path: Path, value: float, status: str
) -> None:
    geometry = latent_stats().header.geometry
    names = spell("k_proj.k_scale", "v_proj.v_scale", value=value, layers=1)
    modelopt = save_folder(tmp_path / "a", names, quantization=MODELOPT)
    overlay = save_folder(tmp_path / "b", spell(*PAIR, layers=1), quantization=PER_TENSOR)

    report = ask("sglang", modelopt, geometry)

    assert (statuses(report), values(report)) == ([(status, status)], [(value, value)])
    is_said = "multiply the logits by k_scale" in report.layers[0].k.why
    assert is_said is (status == "misread")
    assert statuses(ask("sglang", overlay, geometry)) == [("dropped", "dropped")]


@pytest.mark.parametrize("suffixes", [PAIR, INNER, ("k_proj.output_scale", "v_proj.output_scale")])
@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe", "gpt_oss", "glm4_moe", "lfm2"])
def test_attention_without_parameters_for_scales_drops_them(
    tmp_path: Path, model_type: str, suffixes: tuple[str, ...]
) -> None:
    folder = save_folder(tmp_path / "f", spell(*suffixes), quantization=FP8)

    report = ask("sglang", folder, plain_geometry(model_type=model_type))

    assert (statuses(report), values(report)) == (both("dropped"), [(1.0, 1.0)] * 2)


def test_nvfp4_weights_give_attention_parameters_for_scales(tmp_path: Path) -> None:
    names = spell("k_proj.k_scale", "v_proj.v_scale")
    quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4"}

    assert ask("sglang", save_folder(tmp_path / "f", names, quantization=quantization)).ok


def test_gpt2_stops_at_a_name_it_does_not_know(tmp_path: Path) -> None:
    geometry = moved_geometry(GPT2, model_type="gpt2")
    inner = f"{GPT2}.attn"
    ours = save_folder(tmp_path / "ours", spell(*PAIR, path=inner), quantization=PER_TENSOR)
    outer = save_folder(tmp_path / "outer", spell(*PAIR, path=GPT2), quantization=PER_TENSOR)

    assert ask("sglang", ours, geometry).ok
    assert statuses(ask("sglang", outer, geometry)) == both("refused")
    assert "KeyError" in ask("sglang", outer, geometry).layers[0].k.why


@pytest.mark.parametrize(
    "quantization", [{"quant_method": "modelopt"}, {**PER_TENSOR, "kv_cache_scheme": 7}, 7]
)
def test_configs_that_stop_sglang(tmp_path: Path, quantization: object) -> None:
    report = ask("sglang", save_folder(tmp_path / "f", spell(*PAIR), quantization=quantization))

    assert statuses(report) == both("refused")


@pytest.mark.parametrize(
    "quantization", [{"quant_method": "awq"}, {"quant_method": "modelopt", "quant_algo": "FP8"}]
)
def test_methods_that_say_nothing_of_the_cache(
    tmp_path: Path, quantization: dict[str, Any]
) -> None:
    report = ask("sglang", save_folder(tmp_path / "f", spell(*PAIR), quantization=quantization))

    assert statuses(report) == both("dropped")


@pytest.mark.parametrize("dtype", ["float8_e4m3fnuz", "float8_e5m2"])
def test_scales_for_another_format_are_misread(tmp_path: Path, dtype: str) -> None:
    folder = save_folder(
        tmp_path / "f", spell(*PAIR), quantization=PER_TENSOR, kv_cache_torch_dtype=dtype
    )

    assert statuses(ask("sglang", folder)) == both("misread")


@pytest.mark.parametrize(
    ("model_type", "status", "architecture"),
    [
        ("llama4_text", "dropped", "Llama4ForConditionalGeneration"),
        ("gemma3n_text", "used", "Gemma3nForConditionalGeneration"),
        ("qwen2", "refused", "Qwen2AudioForConditionalGeneration"),
        ("qwen2_vl_text", "refused", "Qwen2VLForConditionalGeneration"),
        ("llama", "used", "LlavaForConditionalGeneration"),
        *(
            (name, "used", "")
            for name in ("llama", "mistral", "exaone4", "phi3", "gemma2", "gemma3")
        ),
        *((name, "dropped", "") for name in ("qwen2", "mixtral", "qwen3_moe", "opt", "starcoder2")),
        *((name, "refused", "") for name in ("gemma", "granite", "olmo2", "stablelm", "gpt2")),
    ],
)
def test_scales_of_an_export_are_loaded_by_model_type(
    tmp_path: Path, model_type: str, status: str, architecture: str
) -> None:
    geometry = plain_geometry(model_type=model_type, architecture=architecture)
    folder = save_folder(tmp_path / "f", spell("k_scale", "v_scale"), quantization=PER_TENSOR)

    report = ask("sglang", folder, geometry)

    assert statuses(report) == both(status)
    assert ("KeyError" in report.layers[0].k.why) == (status == "refused")
