"""The dtype a forward pass runs in, decided from the processor's flags and from memory."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.model import device as chosen
from fp8calib.model.device import choose_dtype


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """Give 1000 bfloat16 numbers and a single fp32 one."""
    weights = {"a": torch.ones(1000, dtype=torch.bfloat16), "b": torch.ones(1)}
    save_file(weights, tmp_path / "model.safetensors")
    return Checkpoint.open(tmp_path)


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Give a processor with no flag that counts and 1 GiB of free memory."""
    set_flags(monkeypatch, "fpu avx2 avx512f")
    monkeypatch.setattr(chosen, "available_bytes", lambda: 2**30)
    return monkeypatch


def set_flags(patch: pytest.MonkeyPatch, flags: str) -> None:
    patch.setattr(chosen, "_cpu_flags", lambda: frozenset(flags.split()))


@pytest.mark.usefixtures("processor")
def test_other_processors_use_float32(checkpoint: Checkpoint) -> None:
    dtype, why = choose_dtype("auto", device="cpu", checkpoint=checkpoint)
    assert (dtype, why) == ("float32", "the processor has neither amx_bf16 nor avx512_bf16")


@pytest.mark.parametrize(("free_bytes", "expected"), [(4804, "bfloat16"), (4805, "float32")])
def test_a_model_that_does_not_fit_in_float32_uses_bfloat16(
    checkpoint: Checkpoint, processor: pytest.MonkeyPatch, free_bytes: int, expected: str
) -> None:
    # 1001 numbers of 4 bytes and a fifth more: 4804.8 bytes
    processor.setattr(chosen, "available_bytes", lambda: free_bytes)
    assert choose_dtype("auto", device="cpu", checkpoint=checkpoint)[0] == expected


@pytest.mark.usefixtures("processor")
def test_a_gpu_uses_the_checkpoints_own(checkpoint: Checkpoint) -> None:
    found = choose_dtype("auto", device="cuda:0", checkpoint=checkpoint)
    assert found == ("bfloat16", "the checkpoint's")
