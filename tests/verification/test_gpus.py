"""What a GPU serves of the types of the KV cache and of the schemes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fp8calib.engines.gpus import (
    GPUS,
    explain_unmultiplied,
    explain_unserved,
    find_gpu,
    list_backends,
    list_unmultiplied,
)
from fp8calib.engines.registry import find_emulated
from fp8calib.errors import UsageError
from fp8calib.model.geometry import Role
from fp8calib.numerics.schemes import SCHEMES
from fp8calib.plugins.plan import plan
from tests import zoo
from tests.verification.by_hand import emulate_scheme, opened

TEXT = torch.randint(0, 96, (4, 33), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    ("engine", "gpu", "cache_type", "backends"),
    [
        ("vllm==0.33", "h100", "fp8", ("flash_attn", "flashinfer", "triton_attn")),
        ("vllm==0.33", "b200", "fp8", ("flashinfer", "flash_attn", "triton_attn")),
        ("vllm==0.33", "a100", "int8_per_token_head", ("triton_attn",)),
        ("vllm==0.33", "b200", "nvfp4", ("flashinfer",)),
        ("vllm==0.31", "h100", "nvfp4", ()),
        ("vllm==0.33", "mi355x", "ultraquant_4bit", ("ultraquant",)),
    ],
)
def test_release_serves_a_type_with_these_backends(
    engine: str, gpu: str, cache_type: str, backends: tuple[str, ...]
) -> None:
    """What vLLM's own functions answer; tests/real_engines asks them again."""
    record, _ = find_emulated(engine)
    assert list_backends(record, cache_type, [GPUS[gpu]]) == backends


@pytest.mark.parametrize(
    ("cache_type", "gpu", "size", "part"),
    [
        ("fp8", "h100", 24, "vLLM 0.33.0 is not known to store it for heads of 24 on H100 (sm_90)"),
        ("nvfp4", "h100", 64, "is not known to store it for heads of 64 on H100 (sm_90)"),
        ("int8_per_token_head", "h100", 64, ""),
    ],
)
def test_why_a_gpu_does_not_serve_a_type_is_told(
    cache_type: str, gpu: str, size: int, part: str
) -> None:
    told = explain_unserved(find_emulated("vllm==0.33")[0], cache_type, gpu, {size})
    assert bool(told) is bool(part)
    assert part in told


def test_unknown_gpus_are_refused(tmp_path: Path) -> None:
    names = ("h100", "B200", "MI300X", "A100", "RTX 4090", "rtx-5090")
    generations = ["sm_90", "sm_100", "gfx942", "sm_80", "sm_89", "sm_120"]
    assert [GPUS[find_gpu(name)] for name in names] == generations
    with pytest.raises(UsageError, match="--gpu h1000: this GPU is not known"):
        find_gpu("h1000")
    zoo.save("llama", tmp_path / "m")
    with pytest.raises(UsageError, match=r"what SGLang .* serves on it is not known"):
        plan(tmp_path / "m", data=TEXT, engine="sglang", gpu="h100", max_bytes="90%")


@pytest.mark.parametrize(
    ("scheme", "gpu", "is_plain"),
    [
        ("mxfp8", "h100", True),
        ("mxfp8", "b200", False),
        ("fp8-dynamic", "a100", True),
        ("fp8-dynamic", "h100", False),
    ],
)
def test_inputs_are_quantized_where_the_gpu_multiplies_them(
    scheme: str, gpu: str, is_plain: bool, tmp_path: Path
) -> None:
    engine, numerics = find_emulated("vllm")
    told = explain_unmultiplied(engine, SCHEMES[scheme], gpu)
    assert ("leaves inputs in 16 bits on" in told) is is_plain
    numerics = replace(numerics, unmultiplied=list_unmultiplied(engine, gpu))
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    with opened(zoo.build("llama", **sizes), tmp_path / "m") as subject:
        found = emulate_scheme(subject, SCHEMES[scheme], numerics).quantizers
    inputs = [site for site in found if site.role is Role.INPUT]
    assert bool(inputs) is not is_plain
