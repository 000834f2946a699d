"""Time a calibration that is streamed through little GPU memory, and the bus alone.

python -m scripts.benchmarks.workers.streamed_pass MODEL TOKENS DTYPE DEVICE GIGABYTES
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import torch

import fp8calib

BLOCK_BYTES = 2**30


def main(model: str, tokens: str, dtype: str, device: str, gigabytes: float) -> None:
    """Limit torch's allocator, and say so to the plan of the run."""
    memory = limit_memory(device, gigabytes)
    with (
        redirect_stdout(sys.stderr),
        mock.patch.object(torch.cuda, "mem_get_info", return_value=memory),
    ):
        rows = [json.loads(line)["input_ids"] for line in Path(tokens).read_text().splitlines()]
        done = fp8calib.calibrate(
            model,
            tokens,
            samples=len(rows),
            seq_len=len(rows[0]),
            dtype=dtype,
            device=device,
            observe=("kv", "query", "inputs"),
        )
    if not done.memory["streamed"]:
        sys.exit("the model fits into this memory")
    size = sum(path.stat().st_size for path in Path(model).glob("*.safetensors"))
    bus = size / _measure_bus(device)
    print(json.dumps({"streamed": done.duration_s, "bus": bus}))


def limit_memory(device: str, gigabytes: float) -> tuple[int, int]:
    """Limit torch's allocator; give the free and the total bytes."""
    total, room = torch.cuda.mem_get_info(device)[1], int(gigabytes * 1e9)
    torch.cuda.set_per_process_memory_fraction(room / total, device)
    return room, total


def _measure_bus(device: str) -> float:
    """Measure the bytes a second from pinned memory."""
    source = torch.empty(BLOCK_BYTES, dtype=torch.uint8).pin_memory()
    target = torch.empty_like(source, device=device)
    seconds = []
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return BLOCK_BYTES / min(seconds)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], float(sys.argv[5]))
