"""Expected verdicts, read in TGI: `get_kv_scales`, the files, the weights loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8calib.dialects.read import read_scales
from fp8calib.engines.registry import find_emulated
from fp8calib.geometry.model_geometry import Linear, Part
from fp8calib.verification.emulation.kv import emulate_kv
from tests.dialects.handmade import latent_stats, make_attention, make_geometry
from tests.engines.check_handmade import (
    FP8,
    MODELOPT,
    PER_TENSOR,
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

PAIR = ("k_scale", "v_scale")
EMPTY_GROUPS: dict[str, Any] = {**PER_TENSOR, "config_groups": {}}


@pytest.mark.parametrize("quantization", [None, EMPTY_GROUPS, FP8])
@pytest.mark.parametrize("listed", [True, False])
def test_scales_by_the_modules_name_are_used_index_or_not(
    tmp_path: Path, quantization: dict[str, Any] | None, listed: bool
) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR), quantization=quantization, listed=listed)

    assert values(ask("tgi", folder)) == [(0.25, 0.25)] * 2
    assert ask("tgi", folder).ok


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    ("model_type", "value"), [("llama", 0.0999755859375), ("gemma2", 0.10009765625)]
)
def test_check_and_verify_round_kv_scale_alike(
    tmp_path: Path, dtype: str, model_type: str, value: float
) -> None:
    """To float16 or, for gemma2, bfloat16, whatever the checkpoint's dtype (`get_model`)."""
    folder = save_folder(tmp_path / "f", spell("kv_scale", value=0.1), model_type=model_type)
    geometry = plain_geometry(checkpoint_dtype=dtype, model_type=model_type)

    report = ask("tgi", folder, geometry)

    assert report.ok
    assert values(report) == [(value, value)] * 2
    assert any("rounded" in problem for problem in report.problems)
    numerics = find_emulated("tgi")[1]
    found = emulate_kv(read_scales(folder, geometry).table, numerics)
    assert {float(each.scale) for each in found.values() if each.scale is not None} == {value}


@pytest.mark.parametrize(
    ("quantization", "suffixes", "is_joint"),
    [
        (None, ("kv_scale",), True),
        (FP8, ("kv_scale",), True),
        (FP8, ("kv_scale", *PAIR), False),
        (FP8, PAIR, False),
        (None, PAIR, False),
    ],
)
def test_the_table_records_where_one_number_is_stored_for_k_and_v(
    tmp_path: Path, quantization: dict[str, Any] | None, suffixes: tuple[str, ...], is_joint: bool
) -> None:
    folder = save_folder(tmp_path / "f", spell(*suffixes, value=0.1), quantization=quantization)

    table = read_scales(folder, plain_geometry()).table

    assert {scale.is_joint for scale in table.scales.values()} == {is_joint}


def test_a_kv_scale_that_vanishes_in_fp16_is_not_ok(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "f", spell("kv_scale", value=1e-9))

    report = ask("tgi", folder, plain_geometry(checkpoint_dtype="float16"))

    assert statuses(report) == both("misread")
    assert values(report) == [(0.0, 0.0)] * 2


def test_a_pair_goes_before_kv_scale(tmp_path: Path) -> None:
    scales = spell(*PAIR) | spell("kv_scale", value=0.5)

    assert values(ask("tgi", save_folder(tmp_path / "f", scales))) == [(0.25, 0.25)] * 2


@pytest.mark.parametrize(
    ("suffix", "status"),
    [("k_scale", ("dropped", "defaulted")), ("v_scale", ("defaulted", "dropped"))],
)
def test_half_a_pair_is_dropped(tmp_path: Path, suffix: str, status: tuple[str, str]) -> None:
    report = ask("tgi", save_folder(tmp_path / "f", spell(suffix)))

    assert statuses(report) == [status] * 2
    assert values(report) == [(1.0, 1.0)] * 2


def test_half_a_pair_beside_kv_scale_leaves_kv_scale(tmp_path: Path) -> None:
    scales = spell("k_scale") | spell("kv_scale", value=0.5)

    assert values(ask("tgi", save_folder(tmp_path / "f", scales))) == [(0.5, 0.5)] * 2


@pytest.mark.parametrize("suffixes", [("k_proj.k_scale", "v_proj.v_scale"), ("attn.k_scale",)])
def test_other_tools_names_are_dropped(tmp_path: Path, suffixes: tuple[str, ...]) -> None:
    folder = save_folder(tmp_path / "f", spell(*suffixes), quantization=MODELOPT)

    assert ask("tgi", folder).layers[0].k.status == "dropped"


def test_scales_of_exactly_one_take_the_unscaled_path(tmp_path: Path) -> None:
    report = ask("tgi", save_folder(tmp_path / "f", spell(*PAIR, value=1.0)))

    assert report.ok
    assert any("casts without clamping" in problem for problem in report.problems)


@pytest.mark.parametrize("value", [[[[0.25]], [[0.5]]], [0.25, 0.5]])
def test_more_than_one_number_is_a_value_error(tmp_path: Path, value: object) -> None:
    report = ask("tgi", save_folder(tmp_path / "f", spell(*PAIR, value=value)))

    assert statuses(report) == both("refused")
    assert "must be scalar tensors" in report.layers[0].k.why


@pytest.mark.parametrize("value", [float("nan"), 0.0, -0.5, float("inf"), 2.0**-127])
def test_numbers_that_are_no_scales_are_used_and_not_ok(tmp_path: Path, value: float) -> None:
    report = ask("tgi", save_folder(tmp_path / "f", spell(*PAIR, value=value)))

    assert statuses(report) == both("misread")


def test_models_that_do_not_ask_for_scales(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR))

    assert statuses(ask("tgi", folder, plain_geometry(model_type="qwen3"))) == both("dropped")


def test_latent_scales_are_misread(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR, layers=1))

    report = ask("tgi", folder, latent_stats().header.geometry)

    assert statuses(report) == [("misread", "misread")]
    assert "expanded to heads" in report.layers[0].k.why


def test_gpt2s_own_path_is_the_name(tmp_path: Path) -> None:
    path = "transformer.h.{}.attn"
    geometry = moved_geometry(path, model_type="gpt2")

    assert ask("tgi", save_folder(tmp_path / "a", spell(*PAIR, path=path)), geometry).ok
    inner = save_folder(tmp_path / "b", spell(*PAIR, path=f"{path}.attn"))
    assert statuses(ask("tgi", inner, geometry)) == both("dropped")


@pytest.mark.parametrize("word", ["args", "arguments", "training", "adapter"])
def test_files_with_some_words_in_their_names_are_not_opened(tmp_path: Path, word: str) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR))
    (folder / SCALES).rename(folder / f"kv-{word}.safetensors")

    assert statuses(ask("tgi", folder)) == both("defaulted")


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR))
    save_file(load_file(folder / SCALES), folder / "copy.safetensors")

    assert statuses(ask("tgi", folder)) == both("refused")


@pytest.mark.parametrize(
    ("dtype", "why"),
    [("float8_e4m3fnuz", "does not convert KV scales"), ("float8_e5m2", "ignores")],
)
def test_scales_for_another_format_are_misread(tmp_path: Path, dtype: str, why: str) -> None:
    folder = save_folder(tmp_path / "f", spell("kv_scale"), kv_cache_torch_dtype=dtype)

    report = ask("tgi", folder)

    assert statuses(report) == both("misread")
    assert why in report.layers[0].k.why


def _with_linear() -> Any:
    root = "model.layers.0.self_attn"
    part = Part(name="q_proj", count=4, unit=2, per_group=4)
    linear = Linear(
        module=f"{root}.q_proj",
        section="attention",
        root=root,
        in_features=8,
        out_features=8,
        shard="column",
        parts=(part,),
        weight_name=f"{root}.q_proj.weight",
        checkpoint_name=f"{root}.q_proj.weight",
    )
    return make_geometry([make_attention(0)], [[linear]])


def _group(targets: list[str]) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    return {"group_0": {"targets": targets, "weights": weights}}


@pytest.mark.parametrize(
    ("groups", "ignore", "form", "why"),
    [
        ({}, ["re:.*"], "dense", ""),
        ({}, ["model.layers.0.self_attn.q_proj"], "dense", ""),
        ({}, ["re:.*q_proj"], "dense", ""),
        ({}, ["Linear"], "dense", ""),
        ({}, [], "dense", "Cannot find compressed-tensors target"),
        ({}, ["lm_head", "re:.*k_proj"], "dense", "Cannot find compressed-tensors target"),
        (_group(["Linear"]), ["lm_head"], "float-quantized", ""),
        (_group(["re:^no-module$"]), ["re:.*"], "naive-quantized", ""),
        (_group(["re:^no-module$"]), ["re:.*"], "dense", "unsupported compressed-tensors"),
        (_group(["re:("]), [], "float-quantized", "not a regular expression"),
        (_group(["re:(a+)+$"]), [], "float-quantized", "does not evaluate this expression"),
        ({}, [7], "dense", "Cannot find compressed-tensors target"),
        ({"group_0": 7}, ["re:.*"], "dense", "Cannot parse"),
        (None, ["re:.*"], "dense", "Cannot parse"),
    ],
)
def test_the_compressed_tensors_loader_must_know_every_linear(
    tmp_path: Path, groups: object, ignore: list[str], form: str, why: str
) -> None:
    quantization = {**PER_TENSOR, "config_groups": groups, "ignore": ignore, "format": form}
    folder = save_folder(tmp_path / "f", spell(*PAIR, layers=1), quantization=quantization)

    report = ask("tgi", folder, _with_linear())

    assert statuses(report) == [("refused", "refused") if why else ("used", "used")]
    assert why in report.layers[0].k.why


def test_an_unfinished_quantization_is_refused(tmp_path: Path) -> None:
    quantization = {**EMPTY_GROUPS, "quantization_status": "initialized"}

    report = ask("tgi", save_folder(tmp_path / "f", spell(*PAIR), quantization=quantization))

    assert statuses(report) == both("refused")


@pytest.mark.parametrize(
    ("method", "leaf", "dtype", "why"),
    [
        ("modelopt", "weight", torch.float8_e4m3fn, ""),
        ("quark", "weight", torch.bfloat16, ""),
        ("gptq", "qweight", torch.int32, ""),
        ("aqlm", "codes", torch.int8, "there is no model.layers.0.self_attn.q_proj.weight"),
    ],
)
def test_methods_that_tgi_does_not_name_need_a_weight(
    tmp_path: Path, method: str, leaf: str, dtype: torch.dtype, why: str
) -> None:
    """`get_loader` gives `HybridFP8UnquantLoader` for the methods that it does not name."""
    quantization = {"quant_method": method, "quant_algo": "FP8"}
    folder = save_folder(tmp_path / "f", spell(*PAIR, layers=1), quantization=quantization)
    scales = load_file(folder / SCALES)
    weight = torch.zeros(8, 8).to(dtype)
    path = "model.layers.0.self_attn.q_proj"
    stored = {f"{path}.{leaf}": weight, f"{path}.weight_scale": torch.ones(())}
    save_file({**scales, **stored}, folder / SCALES)

    report = ask("tgi", folder, _with_linear())

    assert statuses(report) == [("refused", "refused") if why else ("used", "used")]
    assert why in report.layers[0].k.why
