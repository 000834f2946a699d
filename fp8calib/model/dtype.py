"""Choose the dtype of the forward pass from the checkpoint's dtype and the hardware."""

from __future__ import annotations

import math
import re
from pathlib import Path

import torch

from fp8calib.checkpoint.checkpoint import Checkpoint, stored_dtype
from fp8calib.errors import UsageError
from fp8calib.machine import available_bytes
from fp8calib.text import GIB

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_BF16_FLAGS = ("amx_bf16", "avx512_bf16")
_HEADROOM = 1.2


def choose_dtype(requested: str, *, device: str, checkpoint: Checkpoint) -> tuple[str, str]:
    """Resolve `auto` to a dtype.

    On a GPU it is the checkpoint's dtype. On a CPU it is bfloat16 if the processor multiplies it in
    hardware or if float32 does not fit into memory, else float32. Nothing is timed.

    Returns:
        The name of the dtype, and the reason for people.
    """
    if requested != "auto":
        if requested not in DTYPES:
            raise UsageError(f"--dtype {requested}: not one of auto, {', '.join(DTYPES)}")
        return requested, "as requested"
    stored = stored_dtype(checkpoint)
    if device != "cpu":
        is_known = stored in DTYPES
        return (stored, "the checkpoint's") if is_known else ("bfloat16", f"for {stored} weights")
    flags = _cpu_flags()
    flag = next((name for name in _BF16_FLAGS if name in flags), None)
    if flag is not None:
        return "bfloat16", f"the processor has {flag}"
    num_elements = sum(math.prod(entry.shape) for entry in checkpoint.tensors.values())
    needed = num_elements * 4 * _HEADROOM
    available = available_bytes()
    if needed > available:
        return "bfloat16", (
            f"float32 needs {needed / GIB:.1f} GiB and {available / GIB:.1f} GiB are free"
        )
    return "float32", f"the processor has neither {' nor '.join(_BF16_FLAGS)}"


def _cpu_flags() -> frozenset[str]:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.is_file() else ""
    found = re.search(r"^flags.*:(.*)", text, re.MULTILINE)
    return frozenset() if found is None else frozenset(found[1].split())
