"""Time the peers' calibration passes against a plain forward, in the peers' environment.

python -m scripts.benchmarks.peers.passes MODEL TOKENS DTYPE DEVICE ROUNDS
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path

from scripts.benchmarks.peers.checkpoints import make_modifier, run_oneshot
from scripts.benchmarks.peers.modelopt_calibration import WITH_KV_CACHE, load_model, quantize
from scripts.benchmarks.workers.timing import load_batches, print_seconds, run_plain

KV_CACHE = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "symmetric": True,
    "dynamic": False,
}


def main(name: str, tokens: Path, dtype: str, device: str, rounds: int) -> None:
    """Time each peer on a fresh copy of the model; the copying is not timed."""
    model = load_model(name, dtype, device)
    batches = load_batches(tokens, device)

    def prepare_modelopt() -> Callable[[], object]:
        fresh = copy.deepcopy(model)
        return lambda: quantize(fresh, batches, WITH_KV_CACHE)

    def prepare_llmcompressor(pipeline: str) -> Callable[[], object]:
        fresh = copy.deepcopy(model)
        return lambda: run_oneshot(fresh, batches, make_modifier(KV_CACHE), pipeline=pipeline)

    runs = {
        "plain": lambda: lambda: run_plain(model, batches),
        "modelopt": prepare_modelopt,
        "llmcompressor_basic": lambda: prepare_llmcompressor("basic"),
        "llmcompressor_sequential": lambda: prepare_llmcompressor("sequential"),
    }
    print_seconds(runs, rounds=rounds, device=device)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
