"""What `calibrate` prints that vLLM cannot do, vLLM does not."""

from __future__ import annotations

import json
from pathlib import Path

import fp8calib
from tests.real_engines.exports import Exports, read_scales
from tests.real_engines.vllm_job import VllmServer


def _blocking_reasons(out: Path, format_name: str) -> list[str]:
    """List why vLLM does not serve what was written, as the check behind it says."""
    report = json.loads((out / "report.json").read_text())
    return [
        item["summary"].removeprefix("not ok: ")
        for item in report["checked"]
        if item["path"] == format_name
        and item["engine"].startswith("vLLM")
        and item["verdict"] == "not ok"
    ]


def test_the_bare_tgi_form_is_a_value_error(exports: Exports, vllm: VllmServer) -> None:
    out = exports("llama", "tgi")
    checked = fp8calib.check(out / "tgi", engine="vllm").engines["vllm"]
    assert not checked.ok
    assert "without a quantization_config no module has a place for it (ValueError)" in (
        checked.layers[0].k.why
    )

    answer = vllm(out / "tgi")

    assert answer.error.startswith(
        "ValueError: There is no module or parameter named 'layers.0.self_attn.kv_scale'"
    )


def test_mpt_is_not_run_any_more(exports: Exports, vllm: VllmServer) -> None:
    out = exports("mpt")
    assert _blocking_reasons(out, "kv-overlay") == ["vLLM 0.33 does not run mpt"]

    answer = vllm(out / "kv-overlay")

    assert "MptForCausalLM was supported in vLLM until v0.28.0" in answer.error


def test_attention_without_a_place_for_scales_is_a_value_error(
    exports: Exports, vllm: VllmServer
) -> None:
    out = exports("jamba")
    (why,) = _blocking_reasons(out, "kv-overlay")
    assert "no parameters for scales" in why

    answer = vllm(out / "kv-overlay")

    assert answer.error.startswith("ValueError: There is no module or parameter named")


def test_latent_attention_keeps_scales_of_one(exports: Exports, vllm: VllmServer) -> None:
    out = exports("deepseek_v3")
    (why,) = _blocking_reasons(out, "kv-overlay")
    assert "no KV scale reaches multi-head latent attention in vLLM, so it uses 1.0" in why
    assert all(k != [1.0] for k, _ in read_scales(out / "kv-overlay").values())

    answer = vllm(out / "kv-overlay", kv_cache_dtype="auto")

    assert answer.error == ""
    assert answer.scales() == {0: ([1.0], [1.0]), 1: ([1.0], [1.0])}
