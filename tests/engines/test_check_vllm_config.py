"""Which quantization configs vLLM 0.32.0 starts with, and which of them hold KV scales.

As vLLM for CPU loaded the same configs; `tests/real_engines/test_check_agrees.py` repeats some.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

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
PROJECTIONS = spell("k_proj.k_scale", "v_proj.v_scale")
OUTPUTS = spell("k_proj.output_scale", "v_proj.output_scale")
LAYERS = {"model.layers.0.mlp.up_proj": {"quant_algo": "FP8"}}
MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": LAYERS}
SCHEME = {"type": "float", "num_bits": 8}
SPARSITY = {"format": "sparse-24-bitmask", "targets": ["Linear"]}
ONE_GROUP = {"group_0": {"targets": ["re:^none$"], "weights": None}}
TEXT = {"weights": {"type": "float", "num_bits": 8, "strategy": "tensor"}}
OF_ATTENTION = {"group_0": {"targets": ["LlamaAttention"], "weights": None}}


@pytest.mark.parametrize(
    ("quantization", "scales", "status"),
    [
        ({**PER_TENSOR, "quant_method": "compressed_tensors"}, PAIR, "used"),
        ({**PER_TENSOR, "quant_method": "Compressed-Tensors"}, PAIR, "used"),
        ({**FP8, "quant_method": "FP8"}, PAIR, "used"),
        ({"quant_method": "mxfp8"}, PAIR, "used"),
        ({"quant_method": "auto-round", "bits": 4}, PAIR, "dropped"),
        ({**MODELOPT, "quant_algo": "fp8"}, PROJECTIONS, "used"),
        ({**MIXED, "kv_cache_scheme": SCHEME}, PROJECTIONS, "used"),
        (MIXED, PROJECTIONS, "dropped"),
        ({**MIXED, "quantized_layers": {}, "kv_cache_scheme": SCHEME}, PROJECTIONS, "refused"),
        ({}, PAIR, "refused"),
        ({"quant_method": ""}, PAIR, "refused"),
        ({"quant_method": 8}, PAIR, "refused"),
        ({**PER_TENSOR, "config_groups": None}, PAIR, "unknown"),
        ({**PER_TENSOR, "config_groups": ONE_GROUP}, PAIR, "unknown"),
        ({**PER_TENSOR, "config_groups": OF_ATTENTION}, PAIR, "used"),
        ({**PER_TENSOR, "config_groups": {"group_0": {}}}, PAIR, "unknown"),
        ({**PER_TENSOR, "sparsity_config": SPARSITY}, PAIR, "refused"),
        ({**PER_TENSOR, "sparsity_config": {}}, PAIR, "used"),
        ({**FP8, "weight_block_size": [128, 128]}, PAIR, "unknown"),
        (
            {**FP8, "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
            PAIR,
            "used",
        ),
        ({**PER_TENSOR, "ignore": None}, PAIR, "unknown"),
        ({**PER_TENSOR, "ignore": 7}, PAIR, "unknown"),
        ({**PER_TENSOR, "ignore": [7]}, PAIR, "unknown"),
        ({**PER_TENSOR, "ignore": "re:.*"}, PAIR, "unknown"),
        ({**PER_TENSOR, "config_groups": {"g": {**TEXT, "targets": "Linear"}}}, PAIR, "unknown"),
        ({**PER_TENSOR, "config_groups": {"g": {"targets": "Attention"}}}, PAIR, "unknown"),
        ({**PER_TENSOR, "config_groups": {"g": {**TEXT, "targets": [7]}}}, PAIR, "unknown"),
        ({**MODELOPT, "ignore": None}, PROJECTIONS, "unknown"),
        ({**MODELOPT, "ignore": "*"}, PROJECTIONS, "unknown"),
        ({**MODELOPT, "ignore": [7]}, PROJECTIONS, "unknown"),
        ({**FP8, "ignored_layers": None}, PAIR, "used"),
        ({**FP8, "quant_method": "deepseek_v4_fp8"}, PAIR, "used"),
        ({**QUARK, "exclude": None}, OUTPUTS, "unknown"),
        ({**QUARK, "exclude": ["re:.*_proj$", "lm_head"]}, OUTPUTS, "used"),
        ({**QUARK, "exclude": ["re:.*self_attn.*"]}, OUTPUTS, "dropped"),
        ({**QUARK, "exclude": ["model.layers.0.self_attn.attn"]}, OUTPUTS, "partly"),
    ],
)
def test_what_vllm_makes_of_a_config(
    tmp_path: Path, quantization: dict[str, Any], scales: Numbers, status: str
) -> None:
    folder = save_folder(tmp_path / "f", scales, quantization=quantization)

    expected = [("dropped", "dropped"), ("used", "used")] if status == "partly" else both(status)
    assert statuses(ask("vllm", folder)) == expected


@pytest.mark.parametrize(
    ("algorithm", "status"),
    [("FP8", "used"), ("NVFP4", "used"), ("MXFP8", "refused"), (None, "refused")],
)
def test_modelopts_own_file_alone_names_no_method_and_needs_none(
    tmp_path: Path, algorithm: str | None, status: str
) -> None:
    """The form of ModelOpt before 0.31, in which NVIDIA published."""
    folder = save_folder(tmp_path / "f", PROJECTIONS)
    section = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": []}
    side = {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": section}
    (folder / "hf_quant_config.json").write_text(json.dumps(side))

    assert statuses(ask("vllm", folder)) == both(status)


def test_the_layers_of_a_mixed_precision_may_stand_in_modelopts_own_file(tmp_path: Path) -> None:
    quantization = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    folder = save_folder(tmp_path / "f", PROJECTIONS, quantization=quantization)
    assert statuses(ask("vllm", folder)) == both("refused")

    for algorithm, status in (("FP8", "used"), (None, "dropped")):
        section = {"quantized_layers": LAYERS, "kv_cache_quant_algo": algorithm}
        side = {"quantization": {"quant_algo": "MIXED_PRECISION", **section}}
        (folder / "hf_quant_config.json").write_text(json.dumps(side))

        assert statuses(ask("vllm", folder)) == both(status)


def test_zero_points_of_another_shape_are_refused(tmp_path: Path) -> None:
    zero_points = spell("k_zero_point", "v_zero_point", value=[0.0, 0.0])
    compressed = save_folder(tmp_path / "a", PAIR | zero_points, quantization=PER_TENSOR)
    other = save_folder(tmp_path / "b", PAIR | zero_points, quantization=FP8)

    assert statuses(ask("vllm", compressed)) == both("refused")
    assert ask("vllm", other).ok


@pytest.mark.parametrize(("count", "status"), [(4, "used"), (2, "used"), (3, "refused")])
def test_scales_of_q_per_head_are_reduced_by_whole_groups(
    tmp_path: Path, count: int, status: str
) -> None:
    scales = spell("k_scale", "v_scale", value=[[[0.25]], [[0.5]]])
    scales |= spell("q_scale", value=[[[0.5]]] * count)

    report = ask("vllm", save_folder(tmp_path / "f", scales, quantization=PER_HEAD))

    assert statuses(report) == both(status)


def test_of_too_many_heads_the_first_are_taken(tmp_path: Path) -> None:
    scales = spell("k_scale", "v_scale", value=[0.25, 0.5, 0.75])

    report = ask("vllm", save_folder(tmp_path / "f", scales, quantization=PER_HEAD))

    assert (statuses(report), values(report)) == (both("misread"), [(0.5, 0.5)] * 2)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("section", "status"),
    [
        ({"kv_cache_quant_algo": "FP8"}, "used"),
        ({"kv_cache_quant_algo": "fp8"}, "used"),
        ({"kv_cache_quant_algo": "NVFP4"}, "misread"),
        ({"kv_cache_quant_algo": "INT8"}, "misread"),
    ],
)
def test_scales_of_another_cache_than_fp8s_are_misread(
    tmp_path: Path, engine: str, section: dict[str, object], status: str
) -> None:
    folder = save_folder(tmp_path / "f", PROJECTIONS)
    side = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", **section}}
    (folder / "hf_quant_config.json").write_text(json.dumps(side))

    assert statuses(ask(engine, folder)) == both(status)


def test_a_scheme_of_modelopt_with_other_bits_is_misread(tmp_path: Path) -> None:
    scheme = {"type": "float", "num_bits": 4}
    quantization = {**MODELOPT, "kv_cache_scheme": scheme}
    folder = save_folder(tmp_path / "f", PROJECTIONS, quantization=quantization)

    report = ask("vllm", folder)

    assert statuses(report) == both("misread")
    assert "4 bits of 'float'" in report.layers[0].k.why
