"""Time what accelerate takes for the same text: weights in host memory beyond a limit of the GPU's.

python -m scripts.benchmarks.workers.offloaded_pass MODEL TOKENS DTYPE DEVICE GIGABYTES

On a CPU the limit is that of memory, and weights beyond it stay on the disk.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from fp8calib.calibration.job import GPU_BATCH_TOKENS
from scripts.benchmarks.workers.streamed_pass import limit_memory
from scripts.benchmarks.workers.timing import load_batches, run_plain

WEIGHTS_SHARE = 0.5
"""Of the limit: the activations of a batch need the rest."""


def main(model: str, tokens: str, dtype: str, device: str, gigabytes: float) -> None:
    """Load the model with `device_map="auto"`, and run its body."""
    room: dict[int | str, int] = {"cpu": 2**50}
    if device != "cpu":
        limit_memory(device, gigabytes)
    at = "cpu" if device == "cpu" else torch.device(device).index or 0
    room[at] = int(gigabytes * 1e9 * WEIGHTS_SHARE)
    batches = load_batches(Path(tokens), "cpu")
    size = 1 if device == "cpu" else max(1, GPU_BATCH_TOKENS // batches[0].shape[1])
    batches = load_batches(Path(tokens), device, size)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        loaded = AutoModelForCausalLM.from_pretrained(
            model,
            dtype=getattr(torch, dtype),
            device_map="auto",
            max_memory=room,
            offload_folder=folder,
        )
        placed = getattr(loaded, "hf_device_map", {})  # there is none where one device holds all
        if not set(placed.values()) - {at}:
            sys.exit("the model fits into this memory")
        run_plain(loaded.get_decoder(), batches)
        if device != "cpu":
            torch.cuda.synchronize(device)
    print(json.dumps({"offloaded": time.perf_counter() - started}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], float(sys.argv[5]))
