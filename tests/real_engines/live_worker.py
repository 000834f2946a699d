"""Start a vLLM, damage its scales and audit them: `live_worker.py JOB RESULT`.

Runs in vLLM's own environment. A job lists `engines`, one after another in a fork each; an engine
has `options` of `LLM` and `steps`. RESULT lists the answers to the steps, by engine.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams

import fp8calib
from fp8calib.plugins import vllm as inside
from fp8calib.plugins.vllm.worker import FP8CalibWorker

TINY: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_dtype": "fp8",
    "max_model_len": 64,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 64,
    "block_size": 32,
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "disable_log_stats": True,
    "gpu_memory_utilization": 0.1,
    "worker_extension_cls": "live_worker.Faults",
}
ATTRIBUTES = ("_{}_scale", "_{}_scale_float", "_{}_scale_cpu")


class Faults(FP8CalibWorker):
    """Mixed into the workers: changes scales behind vLLM's back."""

    def fp8calib_plant(self, fault: str) -> None:
        """Plant one of the faults below on this rank."""
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        modules = [module for _, module in self.fp8calib_list_attention()]
        getattr(self, f"fp8calib_plant_{fault}")(rank, modules)

    def fp8calib_plant_one_layer(self, rank: int, modules: list[Any]) -> None:
        """Reset K of layer 2 on the last rank."""
        if rank == 1:
            _put(modules[2], "k", 1.0)

    def fp8calib_plant_zeros(self, rank: int, modules: list[Any]) -> None:  # noqa: ARG002
        """Set everything to zero."""
        for module in modules:
            for role in "kvq":
                _put(module, role, 0.0)

    def fp8calib_plant_zeros_on_device(self, rank: int, modules: list[Any]) -> None:  # noqa: ARG002
        """Set the tensors of the device to zero."""
        for module in modules:
            for role in "kv":
                _put(module, role, 0.0, ATTRIBUTES[:1])

    def fp8calib_plant_stale_float(self, rank: int, modules: list[Any]) -> None:
        """Leave the float of layers 1 to 3 at 1.0 on the last rank."""
        for module in modules[1:] if rank == 1 else ():
            for role in "kv":
                _put(module, role, 1.0, ATTRIBUTES[1:2])

    def fp8calib_plant_stale_cpu(self, rank: int, modules: list[Any]) -> None:
        """Leave the CPU copy of V at 1.0 on the first rank."""
        for module in modules if rank == 0 else ():
            _put(module, "v", 1.0, ATTRIBUTES[2:])

    def fp8calib_plant_swapped(self, rank: int, modules: list[Any]) -> None:  # noqa: ARG002
        """Swap K and V."""
        for module in modules:
            k, v = module._k_scale_float, module._v_scale_float
            _put(module, "k", v)
            _put(module, "v", k)

    def fp8calib_plant_shifted(self, rank: int, modules: list[Any]) -> None:  # noqa: ARG002
        """Give each layer the scales of the next one."""
        for role in "kv":
            numbers = [getattr(module, f"_{role}_scale_float") for module in modules]
            for module, number in zip(modules, numbers[1:], strict=False):
                _put(module, role, number)

    def fp8calib_plant_doubled(self, rank: int, modules: list[Any]) -> None:  # noqa: ARG002
        """Double all scales, as for e4m3fnuz."""
        for module in modules:
            for role in "kv":
                _put(module, role, 2 * getattr(module, f"_{role}_scale_float"))

    def fp8calib_plant_query(self, rank: int, modules: list[Any]) -> None:  # noqa: ARG002
        """Change q of layer 0."""
        _put(modules[0], "q", 0.5)

    def fp8calib_plant_not_a_number(self, rank: int, modules: list[Any]) -> None:
        """Put NaN into V of layer 3 of the last rank."""
        if rank == 1:
            _put(modules[3], "v", float("nan"))


def _put(module: Any, role: str, number: float, attributes: tuple[str, ...] = ATTRIBUTES) -> None:
    for attribute in (each.format(role) for each in attributes):
        held = getattr(module, attribute, None)
        if isinstance(held, torch.Tensor):
            held.fill_(number)
        elif held is not None:
            setattr(module, attribute, number)


def main() -> None:
    """Answer the job of the command line."""
    job, result = map(Path, sys.argv[1:])
    answers = []
    for index, engine in enumerate(json.loads(job.read_text())):
        part = result.with_suffix(f".{index}")
        if os.fork() == 0:
            part.write_text(json.dumps(_answer(engine)))
            os._exit(0)
        os.wait()
        answers.append(json.loads(part.read_text()))
    result.write_text(json.dumps(answers))


def _answer(engine: dict[str, Any]) -> list[Any]:
    try:
        llm = LLM(**{**TINY, **engine["options"]})
    except Exception:  # noqa: BLE001 -- whatever vLLM says is the answer
        return [{"error": traceback.format_exc()[-3000:]}]
    return [_do(llm, *step) for step in engine["steps"]]


def _do(llm: LLM, verb: str, *arguments: Any) -> Any:
    verbs: dict[str, Any] = {
        "read": lambda: llm.collective_rpc("fp8calib_read_scales"),
        "plant": lambda: llm.collective_rpc("fp8calib_plant", args=arguments),
        "score": lambda: _score(llm, *arguments),
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


def _score(llm: LLM, ids: list[int]) -> float:
    """Sum log p of the tokens after the first."""
    llm.reset_prefix_cache()
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1, detokenize=False)
    output = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0]
    places = zip(output.prompt_logprobs[1:], ids[1:], strict=True)
    return sum(place[token].logprob for place, token in places)


if __name__ == "__main__":
    main()
