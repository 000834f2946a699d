"""Whether a kernel of a GPU is used: what it gives is compared with what torch gives."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec

import torch
from torch import nn

from fp8calib.errors import Fp8CalibWarning, first_line

Results = Mapping[str, torch.Tensor]


def gpus_of(model: nn.Module) -> set[torch.device]:
    """Give the GPUs that hold parameters of a model."""
    return {each.device for each in model.parameters() if each.device.type == "cuda"}


def free_bytes(device: torch.device) -> int:
    """Count the bytes of a GPU that are free, or held by torch and unused."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def is_trusted(
    device: torch.device,
    by_kernel: Callable[[], Results],
    by_torch: Callable[[], Results],
    *,
    tolerance: float = 0.0,
) -> bool:
    """Whether a device is CUDA's, Triton is installed, and the kernel gives torch's results.

    The host waits for the device, so kernels are tried before the batches. Without the kernel
    everything is the same, but slower; a warning says why it is not used.
    """
    return (
        device.type == "cuda"
        and find_spec("triton") is not None
        and agree(by_kernel, by_torch, tolerance=tolerance)
    )


def agree(
    by_kernel: Callable[[], Results], by_torch: Callable[[], Results], *, tolerance: float = 0.0
) -> bool:
    """Compare what a kernel gives with what torch gives; a warning says what is wrong.

    `tolerance` is relative to each number; without it all are equal.
    """
    try:
        found = {name: x.cpu() for name, x in by_kernel().items()}
    except torch.OutOfMemoryError:  # it says nothing about the kernel
        raise
    except Exception as error:  # noqa: BLE001 -- compilers and drivers raise anything
        text = f"a kernel is not used: {first_line(error)}"
        warnings.warn(text, Fp8CalibWarning, stacklevel=2)
        return False
    expected = by_torch()
    differing = [
        name
        for name, x in expected.items()
        if not torch.allclose(found[name], x.cpu(), rtol=tolerance, atol=0)
    ]
    if differing:
        text = f"a kernel is not used: {', '.join(differing)} differ from torch's"
        warnings.warn(text, Fp8CalibWarning, stacklevel=2)
    return not differing
