"""What vLLM does with scales of a vision tower: `vllm_vision.py JOB RESULT`, in its environment.

JOB names a `model`, `files` of scales, `tensors` of q, k and v (safetensors) and `saved`, where
vLLM is to save its own scales of them. RESULT gives the scales of each layer by file, or the error.
A CPU has no kernel for FP8 in a tower, so vLLM is told that it has FlashInfer's; nothing calls it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import vllm.model_executor.layers.attention.mm_encoder_attention as attention
from no_torchvision import replace_torchvision
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment
from vllm_worker import TINY_SERVER

WRAPS_AFTER = attention._FP8_AMAX_HISTORY_LEN
"""How many times a layer sees q, k and v before vLLM saves the scales."""


def main() -> None:
    """Answer the job of the command line, each file in a process of its own."""
    job_path, result_path = map(Path, sys.argv[1:])
    job = json.loads(job_path.read_text())
    replace_torchvision()
    registry._run_in_subprocess = lambda inspect: inspect()
    _set_torch_accelerator_to_noop()
    type(current_platform).get_vit_attn_backend = classmethod(
        lambda *_, **__: AttentionBackendEnum.FLASHINFER
    )
    attention.is_flashinfer_cudnn_fp8_prefill_attn_supported = lambda: True
    attention._get_flashinfer_workspace_buffer = lambda: None
    answers = {}
    for path in [*job["files"], None]:
        part = result_path.with_suffix(".part")
        child = os.fork()
        if child == 0:
            part.write_text(json.dumps(_answer(job, path)))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status == 0, f"{path}: the process ended with {status}"
        answers[path or "saved"] = json.loads(part.read_text())
    result_path.write_text(json.dumps(answers))


def _answer(job: dict[str, Any], path: str | None) -> Any:
    try:
        layers = _load(job, path)
    except Exception as error:  # noqa: BLE001 -- whatever the engine says is the answer
        return f"{type(error).__name__}: {error}"
    if path is None:
        tensors = load_file(job["tensors"])
        for _ in range(WRAPS_AFTER):
            for name, layer in layers.items():
                layer._quantize_qkv_fp8(*(tensors[f"{name}.{role}"] for role in "qkv"))
    return {
        name: {role: getattr(layer, f"_fp8_{role}_scale").item() for role in "qkv"}
        for name, layer in layers.items()
    }


def _load(job: dict[str, Any], path: str | None) -> dict[str, Any]:
    """Load the model; without a file, vLLM finds and saves scales itself."""
    option = "mm_encoder_fp8_scale_save_path" if path is None else "mm_encoder_fp8_scale_path"
    config = EngineArgs(
        model=job["model"],
        dtype="bfloat16",
        mm_encoder_attn_dtype="fp8",
        **{option: path or job["saved"]},
        **TINY_SERVER | {"kv_cache_dtype": "auto"},
    ).create_engine_config()
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
        init_worker_distributed_environment(config, 0, f"file://{folder}/ranks", 0, "gloo")
        loader = get_model_loader(config.load_config)
        model = loader.load_model(vllm_config=config, model_config=config.model_config)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, attention.MMEncoderAttention)
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
