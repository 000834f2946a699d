"""What `--gpu` leaves of the types of the KV cache and of the schemes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import fp8calib
from fp8calib.engines.facts.gpus import GENERATIONS, GPUS, find_gpu, join_generations
from fp8calib.engines.registry import find_emulated
from fp8calib.errors import ModelError, UsageError
from fp8calib.render.verify_tables import cache_table
from tests import zoo

TEXT = torch.randint(0, 96, (4, 33), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Build a tiny model whose heads have 64 values."""
    return zoo.build("llama", head_dim=64)


@pytest.mark.parametrize(
    ("name", "generation"),
    [
        ("h100", "sm_90"),
        ("H200", "sm_90"),
        ("B200", "sm_100"),
        ("MI300X", "gfx942"),
        ("mi355x", "gfx950"),
        ("l4", "sm_89"),
        ("L40S", "sm_89"),
        ("A100", "sm_80"),
        ("RTX 4090", "sm_89"),
        ("rtx-5090", "sm_120"),
        ("RTX6000PRO", "sm_120"),
    ],
)
def test_gpu_has_its_generation(name: str, generation: str) -> None:
    assert find_gpu(name).generation == generation


def test_unknown_gpu_is_refused() -> None:
    with pytest.raises(UsageError, match="--gpu h1000: this GPU is not known"):
        find_gpu("h1000")


@pytest.mark.parametrize(
    ("engine", "gpu", "cache_type", "backends"),
    [
        ("vllm==0.33", "h100", "fp8", ("flash_attn", "flashinfer", "triton_attn")),
        ("vllm==0.33", "b200", "fp8", ("flashinfer", "flash_attn", "triton_attn")),
        ("vllm==0.26", "b200", "fp8", ("flashinfer", "triton_attn")),
        ("vllm==0.33", "a100", "int8_per_token_head", ("triton_attn",)),
        ("vllm==0.33", "b200", "nvfp4", ("flashinfer",)),
        ("vllm==0.31", "h100", "nvfp4", ()),
        ("vllm==0.33", "h100", "nvfp4_4over6", ()),
        ("vllm==0.33", "h100", "ultraquant_4bit", ()),
        ("vllm==0.33", "mi355x", "ultraquant_4bit", ("ultraquant",)),
    ],
)
def test_release_serves_a_type_with_these_backends(
    engine: str, gpu: str, cache_type: str, backends: tuple[str, ...]
) -> None:
    """What vLLM's own functions answer; tests/real_engines asks them again."""
    record, _ = find_emulated(engine)
    assert record.list_backends(cache_type, GPUS[gpu]) == backends


@pytest.mark.parametrize(
    ("names", "joined"),
    [
        ((), ""),
        (GENERATIONS, "sm_80 to sm_121, gfx942 to gfx1201"),
        (("sm_103", "sm_100"), "sm_100, sm_103"),
        (("sm_80", "sm_90", "sm_100", "sm_103", "gfx950"), "sm_80, sm_90 to sm_103, gfx950"),
    ],
)
def test_generations_are_joined_as_ranges(names: tuple[str, ...], joined: str) -> None:
    assert join_generations(names) == joined


def test_table_has_the_figures_and_the_gpus_of_each_type(model: PreTrainedModel) -> None:
    """By what vLLM's own functions answer for heads of 64."""
    asked = {"data": TEXT, "seq_len": 32, "engine": "vllm==0.33"}
    report = fp8calib.verify(model, **asked, kv_cache_dtype=["nvfp4", "int8_per_token_head"])
    table = cache_table(report)
    assert table is not None
    found = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    named = {name: row["GPUs"] for name, row in found.items()}
    assert named == {
        "nvfp4": "sm_100, sm_103",
        "int8_per_token_head": "sm_80 to sm_121, gfx942 to gfx1201",
        "scale-1.0": "sm_80 to sm_121, gfx942 to gfx1201",
    }
    for one in report.candidates:
        assert found[one.name]["top-1"] == f"{one.top1_agreement:.2%}"
        assert found[one.name]["ratio ± se"].startswith(f"{one.ppl_ratio:.4f} ± ")
    report = fp8calib.verify(model, **asked, kv_cache_dtype=["nvfp4"], gpu="b200")
    assert [one.kv_cache.gpus for one in report.candidates if one.kv_cache] == [("sm_100",)] * 2


def test_every_generation_serves_fp8() -> None:
    record, _ = find_emulated("vllm")
    for name in GPUS:
        assert record.list_backends("fp8", GPUS[name])
    assert {each.generation for each in record.storage} == set(GENERATIONS)


def test_heads_that_no_backend_was_asked_about_have_none() -> None:
    """They had every backend that refuses none of the sizes that were asked about."""
    model = zoo.build("llama", head_dim=24)
    asked = {"data": TEXT, "seq_len": 32, "kv_cache_dtype": ["all"]}
    report = fp8calib.verify(model, **asked)
    assert all(one.kv_cache and not one.kv_cache.backends for one in report.candidates)
    assert len(report.candidates) > 3
    report = fp8calib.verify(model, **asked, gpu="h100")
    assert [one.name for one in report.candidates] == ["scale-1.0"]
    assert "whether vLLM 0.33.0 stores heads of 24 was not asked" in " ".join(report.warnings)


@pytest.mark.parametrize(
    ("size", "gpu", "backends"),
    [
        (512, "h100", ("flashinfer", "triton_attn")),
        (512, "mi300x", ("rocm_aiter_unified_attn", "triton_attn")),
        (120, "b200", ("flash_attn", "triton_attn")),
        (16, "mi300x", ()),
    ],
)
def test_large_and_odd_heads_are_stored_by_these_backends(
    size: int, gpu: str, backends: tuple[str, ...]
) -> None:
    record, _ = find_emulated("vllm==0.28")
    assert record.list_backends("fp8", GPUS[gpu], {size}) == backends


def test_all_are_the_types_that_the_gpu_serves(model: PreTrainedModel) -> None:
    report = fp8calib.verify(
        model, data=TEXT, seq_len=32, engine="vllm==0.33", kv_cache_dtype=["all"], gpu="h100"
    )
    named = {one.name: one.kv_cache for one in report.candidates}
    assert "int8_per_token_head" in named
    assert not {"nvfp4", "nvfp4_4over6", "ultraquant_4bit"} & set(named)
    assert report.gpu == "H100 (sm_90)"
    left = " ".join(report.warnings)
    assert "nvfp4 is left out: vLLM 0.33.0 does not store it for heads of 64 on H100" in left
    assert "nvfp4_4over6 is left out: vLLM 0.33.0 does not store it on H100 (sm_90), but " in left
    unscaled = named["scale-1.0"]
    assert unscaled is not None
    assert unscaled.backends == ("flash_attn", "flashinfer", "triton_attn")


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        ({"engine": "sglang"}, "what SGLang .* serves on it is not known"),
        ({"engine": ["vllm", "vllm==0.31"]}, "--gpu is about one engine"),
        ({"gpu": "a100", "scheme": "fp8-dynamic"}, "leaves inputs in 16 bits on A100"),
        ({"gpu": "h100", "scheme": "mxfp8"}, "which has no mxfp8"),
    ],
)
def test_what_a_gpu_does_not_run_is_refused(
    asked: dict[str, object], part: str, model: PreTrainedModel
) -> None:
    with pytest.raises(UsageError, match=part):
        fp8calib.verify(model, data=TEXT, seq_len=32, **{"gpu": "h100", **asked})  # type: ignore[arg-type]


@pytest.mark.parametrize(("gpu", "is_noted"), [(None, True), ("b200", True), ("h100", False)])
def test_what_a_gpu_rounds_beside_the_cache_is_named_for_it_alone(
    gpu: str | None, is_noted: bool
) -> None:
    model = zoo.build("llama", head_dim=128)
    report = fp8calib.verify(model, data=TEXT, seq_len=32, kv_cache_dtype=["nvfp4"], gpu=gpu)
    assert any("on B200 q is rounded" in text for text in report.warnings) is is_noted


def test_named_type_that_the_gpu_does_not_serve_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(ModelError, match=r"nvfp4_4over6: vLLM .* does not store it on H100"):
        fp8calib.verify(model, data=TEXT, seq_len=32, kv_cache_dtype=["nvfp4_4over6"], gpu="h100")


def test_range_of_mi300x_is_named(model: PreTrainedModel) -> None:
    report = fp8calib.verify(model, data=TEXT, seq_len=32, gpu="mi300x")
    assert any("stores FP8 as e4m3fnuz" in text for text in report.warnings)
    report = fp8calib.verify(model, data=TEXT, seq_len=32, gpu="mi300x", fp8_dtype="e4m3fnuz")
    assert not any("stores FP8 as" in text for text in report.warnings)


@pytest.mark.parametrize(
    ("scheme", "gpu", "is_plain"),
    [
        ("mxfp8", "h100", True),
        ("mxfp8", "b200", False),
        ("fp8-dynamic", "a100", True),
        ("fp8-dynamic", "h100", False),
    ],
)
def test_inputs_of_a_checkpoint_are_quantized_where_the_gpu_multiplies_them(
    scheme: str, gpu: str, is_plain: bool, tmp_path: Path
) -> None:
    zoo.save("llama", tmp_path / "m", hidden_size=64, intermediate_size=96, dtype=torch.bfloat16)
    fp8calib.quantize(tmp_path / "m", scheme=scheme, out=tmp_path / "out")

    def measure(**asked: object) -> tuple[float, str]:
        asked = {"data": TEXT, "seq_len": 32, **asked}
        report = fp8calib.verify(tmp_path / "m", **asked)  # type: ignore[arg-type]
        return report.candidates[0].kld_mean, " ".join(report.warnings)

    found, told = measure(scales=tmp_path / "out", gpu=gpu)
    alone = {"mxfp8": "mxfp8-a16", "fp8-dynamic": "w8a16"}[scheme]
    plain, _ = measure(scheme=alone, engine="reference")
    quantized, _ = measure(scheme=scheme, engine="vllm")
    assert plain != quantized
    assert found == (plain if is_plain else quantized)
    assert ("leaves its inputs in 16 bits" in told) is is_plain
    assert "on other GPUs" not in told
    if scheme == "mxfp8":
        assert measure(scheme=alone, gpu=gpu)[0] == found
