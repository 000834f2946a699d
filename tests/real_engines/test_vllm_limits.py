"""What `fp8calib.engines.limitations` says vLLM cannot do, vLLM does not."""

from __future__ import annotations

from pathlib import Path

from fp8calib.engines.limitations import VLLM
from fp8calib.engines.serving_commands import limitations
from fp8calib.fp8.formats import E4M3FN
from fp8calib.stats.calibration_stats import load_stats
from tests.real_engines.exports import Exports, read_scales
from tests.real_engines.vllm_job import VllmServer


def _blocking_reasons(out: Path, format_name: str) -> list[str]:
    geometry = load_stats(out / "stats.safetensors").geometry
    found = limitations(geometry, format_name, E4M3FN)
    return [item.why for item in found if item.engine == VLLM and item.is_blocking]


def test_the_bare_tgi_form_is_a_value_error(exports: Exports, vllm: VllmServer) -> None:
    out = exports("llama", "tgi")
    assert _blocking_reasons(out, "tgi") == [
        "scales without a quantization_config are a ValueError at load"
    ]

    answer = vllm(out / "tgi")

    assert answer.error.startswith(
        "ValueError: There is no module or parameter named 'layers.0.self_attn.kv_scale'"
    )


def test_mpt_is_not_run_any_more(exports: Exports, vllm: VllmServer) -> None:
    out = exports("mpt")
    assert _blocking_reasons(out, "kv-overlay") == ["it does not run this kind of model (any more)"]

    answer = vllm(out / "kv-overlay")

    assert "MptForCausalLM was supported in vLLM until v0.28.0" in answer.error


def test_attention_without_a_place_for_scales_is_a_value_error(
    exports: Exports, vllm: VllmServer
) -> None:
    out = exports("jamba")
    (why,) = _blocking_reasons(out, "kv-overlay")
    assert "has no place for scales" in why

    answer = vllm(out / "kv-overlay")

    assert answer.error.startswith("ValueError: There is no module or parameter named")


def test_latent_attention_keeps_scales_of_one(exports: Exports, vllm: VllmServer) -> None:
    out = exports("deepseek_v3")
    assert _blocking_reasons(out, "kv-overlay") == [
        "under compressed-tensors no KV scale reaches latent (MLA) attention: 1.0 is used"
    ]
    assert all(k != [1.0] for k, _ in read_scales(out / "kv-overlay").values())

    answer = vllm(out / "kv-overlay", kv_cache_dtype="auto")

    assert answer.error == ""
    assert answer.scales() == {0: ([1.0], [1.0]), 1: ([1.0], [1.0])}
