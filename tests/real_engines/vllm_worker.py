"""Start engines of vLLM and ask them: `vllm_worker.py JOB RESULT`.

Runs in vLLM's own environment. JOB lists engines, one after another in a fork each; an engine has
`options` of `LLM` and `steps`. RESULT lists the answers to the steps, by engine; that of an engine
that does not start is its error. The caller's side is `vllm_job.py`.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm._custom_ops import cpu_fused_moe, cpu_prepack_moe_weight
from vllm.model_executor.kernels.linear import EmulationMxfp8LinearKernel, register_linear_kernel
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.platforms import PlatformEnum

import fp8calib
from fp8calib.plugins import vllm as inside
from fp8calib.plugins.vllm.worker import FP8CalibWorker

TINY_SERVER: dict[str, Any] = {
    "kv_cache_dtype": "fp8",
    "max_model_len": 64,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 64,
    "block_size": 32,
    "skip_tokenizer_init": True,
    "enforce_eager": True,
}
"""Making a larger cache takes longer than reading a tiny model."""
ATTRIBUTES = ("_{}_scale", "_{}_scale_float", "_{}_scale_cpu")


class Worker(FP8CalibWorker):
    """Mixed into the workers: lists what layers hold, and changes scales behind vLLM's back."""

    def list_layers(self) -> dict[str, dict[str, Any]]:
        """Name every attention layer with its scales and the size of what its cache stores."""
        context = self.model_runner.compilation_config.static_forward_context
        return {
            name: _layer(module) for name, module in context.items() if hasattr(module, "_k_scale")
        }

    def fp8calib_plant(self, fault: str) -> None:
        """Plant one of the faults below on this rank."""
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        modules = [module for _, module in self.fp8calib_list_attention()]
        if fault in ("swapped", "shifted", "doubled"):
            _move(fault, modules)
            return
        ranks, layers, roles, number, copies = FAULTS[fault]
        for module in modules[layers] if rank in ranks else ():
            for role in roles:
                _put(module, role, number, ATTRIBUTES[copies])


_ALL = slice(None)
FAULTS: dict[str, tuple[tuple[int, ...], slice, str, float, slice]] = {
    "one_layer": ((1,), slice(2, 3), "k", 1.0, _ALL),
    "zeros": ((0, 1), _ALL, "kvq", 0.0, _ALL),
    "zeros_on_device": ((0, 1), _ALL, "kv", 0.0, slice(1)),
    "stale_float": ((1,), slice(1, None), "kv", 1.0, slice(1, 2)),
    "stale_cpu": ((0,), _ALL, "v", 1.0, slice(2, None)),
    "query": ((0, 1), slice(1), "q", 0.5, _ALL),
    "not_a_number": ((1,), slice(3, 4), "v", float("nan"), _ALL),
}
"""Ranks, layers, roles, the number that is put there, and into which of `ATTRIBUTES`."""


def _move(fault: str, modules: list[Any]) -> None:
    """Give the layers scales of other roles, of the next layer, or twice their own."""
    held = [{role: getattr(each, f"_{role}_scale_float") for role in "kv"} for each in modules]
    for index, module in enumerate(modules):
        for role, other in ("kv", "vk"):
            if fault == "swapped":
                _put(module, role, held[index][other])
            elif fault == "doubled":
                _put(module, role, 2 * held[index][role])
            else:
                _put(module, role, held[min(index + 1, len(held) - 1)][role])


def _put(module: Any, role: str, number: float, attributes: tuple[str, ...] = ATTRIBUTES) -> None:
    for attribute in (each.format(role) for each in attributes):
        held = getattr(module, attribute, None)
        if isinstance(held, torch.Tensor):
            held.fill_(number)
        elif held is not None:
            setattr(module, attribute, number)


def _layer(module: Any) -> dict[str, Any]:
    cache = module.kv_cache
    cache = cache[0] if isinstance(cache, list | tuple) else cache
    return {
        "k": module._k_scale.float().flatten().tolist(),
        "v": module._v_scale.float().flatten().tolist(),
        "cache_element_bytes": cache.element_size(),
    }


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


def main() -> None:
    """Answer the job of the command line."""
    job, result = map(Path, sys.argv[1:])
    # vLLM looks for no kernel of MXFP8 on a CPU; this one multiplies by the decoded weights there.
    register_linear_kernel(EmulationMxfp8LinearKernel, PlatformEnum.CPU, "mxfp8")
    TritonExperts.apply = _multiply_experts
    answers = []
    for index, engine in enumerate(json.loads(job.read_text())):
        part = result.with_suffix(f".{index}")
        if os.fork() == 0:
            part.write_text(json.dumps(_answer(engine)))
            os._exit(0)
        os.wait()
        answers.append(json.loads(part.read_text()))
    result.write_text(json.dumps(answers))


def _answer(engine: dict[str, Any]) -> list[Any] | dict[str, str]:
    own = {"worker_extension_cls": "vllm_worker.Worker", "disable_log_stats": True}
    own |= {"enable_prefix_caching": False, "gpu_memory_utilization": 0.1}
    try:
        llm = LLM(**{**TINY_SERVER, **own, **engine["options"]})
    except Exception as error:  # noqa: BLE001 -- whatever vLLM says is the answer
        return {"error": _first_cause(error)}
    return [_do(llm, *step) for step in engine["steps"]]


def _first_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def _do(llm: LLM, verb: str, *arguments: Any) -> Any:
    verbs: dict[str, Any] = {
        "layers": lambda: llm.collective_rpc("list_layers"),
        "score": lambda: _score(llm, *arguments),
        "read": lambda: llm.collective_rpc("fp8calib_read_scales"),
        "plant": lambda: llm.collective_rpc("fp8calib_plant", args=arguments),
        "sleep": lambda: llm.sleep(level=0),  # pauses; a CPU has no other level
        "wake": llm.wake_up,
        "audit": lambda: _dump(inside.audit(llm, *arguments)),
        "refit": lambda: _dump(inside.load_kv_scales(llm, *arguments)),
    }
    try:
        return verbs[verb]()
    except fp8calib.Fp8CalibError as error:
        return {"error": error.kind, "message": error.message, "hint": error.hint}


def _dump(result: fp8calib.CheckResult) -> Any:
    return json.loads(result.model_dump_json())


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


if __name__ == "__main__":
    main()
