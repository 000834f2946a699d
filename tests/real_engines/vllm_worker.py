"""Load one model in vLLM, print what it holds and what it says: `vllm_worker.py JOB RESULT`.

Runs in vLLM's own environment, in a process of its own, because a loaded engine is hard to unload.
JOB and RESULT are JSON files; the caller's side is `vllm_job.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm._custom_ops import cpu_fused_moe, cpu_prepack_moe_weight
from vllm.model_executor.kernels.linear import (
    EmulationMxfp8LinearKernel,
    register_linear_kernel,
)
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.platforms import PlatformEnum

BLOCK_SIZE = 32
NUM_BLOCKS = 256
"""Small, because making the cache takes longer than reading a tiny model."""
TINY_SERVER: dict[str, Any] = {
    "kv_cache_dtype": "fp8",
    "max_model_len": 64,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 64,
    "block_size": BLOCK_SIZE,
    "skip_tokenizer_init": True,
    "enforce_eager": True,
}
"""For models whose parameters are read, and which answer no request."""


def main() -> None:
    """Answer the job of the command line."""
    job_path, result_path = map(Path, sys.argv[1:])
    job = json.loads(job_path.read_text())
    result_path.write_text(json.dumps(_answer(job)))


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    try:
        llm = _load(job)
    except Exception as error:  # noqa: BLE001 -- whatever the engine says is the answer
        return {"error": _first_cause(error)}
    ranks = llm.collective_rpc("list_layers")
    answer: dict[str, Any] = {"layers": ranks[0], "ranks": ranks}
    if job["logprobs"]:
        answer["logprobs"] = _score(llm, job["logprobs"])
    if job["prompt"]:
        answer["text"] = _generate(llm, job["prompt"])
    return answer


def _load(job: dict[str, Any]) -> LLM:
    # vLLM looks for no kernel of MXFP8 on a CPU; this one multiplies by the decoded weights there.
    register_linear_kernel(EmulationMxfp8LinearKernel, PlatformEnum.CPU, "mxfp8")
    TritonExperts.apply = _multiply_experts
    return LLM(
        model=job["model"],
        dtype=job["dtype"],
        kv_cache_dtype=job["kv_cache_dtype"],
        max_model_len=job["max_model_len"],
        max_num_batched_tokens=job["max_model_len"],
        max_num_seqs=4,
        num_gpu_blocks_override=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        skip_tokenizer_init=not job["prompt"],
        enforce_eager=True,
        tensor_parallel_size=job["tp"],
        worker_extension_cls="vllm_worker.LayerReader",
        enable_prefix_caching=False,
        disable_log_stats=True,
    )


def _multiply_experts(
    _: TritonExperts,
    *,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: MoEActivation,
    apply_router_weight_on_input: bool,
    **_unused: object,
) -> None:
    """Multiply by experts that vLLM has decoded, with the CPU's kernel of 16-bit experts.

    vLLM chooses its emulation of MXFP8 experts on a CPU too, and multiplies with Triton, which the
    CPU build turns off: "module 'triton.language' has no attribute 'bfloat16'".
    """
    isa = "vec"
    cpu_fused_moe(
        output,
        hidden_states,
        cpu_prepack_moe_weight(w1, isa),
        cpu_prepack_moe_weight(w2, isa),
        None,
        None,
        topk_weights,
        topk_ids,
        activation.value,
        isa,
        apply_router_weight_on_input,
    )


def _first_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


class LayerReader:
    """Mixed by vLLM into the worker of each rank."""

    model_runner: Any

    def list_layers(self) -> dict[str, dict[str, Any]]:
        """Name every attention layer with its scales and the dtype of the cache it writes."""
        context = self.model_runner.compilation_config.static_forward_context
        return {
            name: _layer(module) for name, module in context.items() if hasattr(module, "_k_scale")
        }


def _layer(module: Any) -> dict[str, Any]:
    cache = module.kv_cache
    cache = cache[0] if isinstance(cache, list | tuple) else cache
    return {
        "k": module._k_scale.float().flatten().tolist(),
        "v": module._v_scale.float().flatten().tolist(),
        "k_host": module._k_scale_float,
        "v_host": module._v_scale_float,
        "q": module._q_scale.float().flatten().tolist(),
        "kv_cache_dtype": module.kv_cache_dtype,
        "cache_element_bytes": cache.element_size(),
    }


def _score(llm: LLM, sequences: list[list[int]]) -> list[list[float]]:
    """Give log p(token t | earlier tokens) for tokens 2..L of each sequence."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1, detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in sequences]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        [
            place[token].logprob
            for place, token in zip(out.prompt_logprobs[1:], ids[1:], strict=True)
        ]
        for out, ids in zip(outputs, sequences, strict=True)
    ]


def _generate(llm: LLM, prompt: str) -> str:
    params = SamplingParams(max_tokens=12, temperature=0.0)
    return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].text


if __name__ == "__main__":
    main()
