"""What SGLang does with `--quantization-param-path`.

Its models set `k_scale` and `v_scale` of a layer to the number (`models/llama.py`,
load_kv_cache_scales), by which `mem_cache/memory_pool.py` (MHATokenToKVPool.set_kv_buffer) divides
K and V. Attention multiplies by `k_scale_float` and `v_scale_float`, which stay None:
`flashinfer_backend.py` (FlashInferAttnBackend.forward_decode) takes None for 1.0, `sm_scale *
k_scale` of `triton_backend.py` and `k_scale.expand` of `flashattention_backend.py` are errors, and
so is `.to` of `fused_fp8_qkv_kv_cache.py` (_scale_to_f32), which `trtllm_mha_backend.py` calls.
Read in 0.5.16 and 0.5.23; `aiter_backend.py` passes the number to kernels that were not read.
"""

from __future__ import annotations

from pathlib import Path

from fp8calib.engines.facts.release import Release
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.scales_file import replay_scales_file
from fp8calib.engines.replay.verdicts import EngineReport, Refusal
from fp8calib.engines.sglang.model_types import find_sglang_type, takes_sglang_json
from fp8calib.engines.sglang.replay import has_kv_method
from fp8calib.engines.status import Status
from fp8calib.model.shapes import ModelGeometry

_WHY = (
    "SGLang divides K and V by the scale where it stores them, and does not multiply where it "
    "reads them: FlashInfer attends to the quotients, FlashAttention, Triton and TRT-LLM fail"
)
_FIX = "serve a kv-overlay instead"


def replay_sglang_json(
    path: Path, geometry: ModelGeometry, tp: int, model: ScaleFolder, release: Release
) -> EngineReport:
    """Replay SGLang's loader on a JSON file, on `tp` ranks of a model.

    Raises:
        Refusal: SGLang does not start.
    """
    if not takes_sglang_json(geometry, release):
        owner = f"{release.title}'s {find_sglang_type(geometry)}"
        why = f"{owner} reads no file of scales: RuntimeError at start"
        raise Refusal(why, fix=_FIX)
    report = replay_scales_file(path, geometry, tp)
    if any(layer.k.status is Status.DEFAULTED for layer in report.layers):
        return report
    if has_kv_method(model, geometry, release):
        why = "the model's quantization_config makes k_scale a parameter: setting it is a TypeError"
        raise Refusal(why, fix="store the scales in the checkpoint")
    return report.change(lambda one: one.misread(_WHY, _FIX))
