"""FP8 checkpoints through vLLM's own weight loader: every code and every scale in its place.

`test_wrapped.py` has models that see or hear.
"""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fp8calib.formats.fp8.checkpoint import Fp8Checkpoint
from fp8calib.formats.fp8.registry import list_written_fp8
from tests.engines.test_check_weights import make
from tests.quantization.by_hand import run, separate_scales
from tests.quantization.stacked import STACKED
from tests.real_engines.fuzz.compare import compare_matrices, dequantize
from tests.real_engines.vllm_job import load_in_vllm

Tensors = dict[str, torch.Tensor]
Case = tuple[str, str, str, bool]
"""Family, form, scheme, and whether fused weights share a scale."""
WIDE: dict[str, Any] = {"hidden_size": 256, "vocab_size": 128}
HEADS: dict[str, Any] = {**WIDE, "head_dim": 64}
"""Query heads and KV heads fill whole blocks."""
SIZES: dict[str, dict[str, Any]] = {
    "llama": {**HEADS, "intermediate_size": 384},
    "mixtral": {**HEADS, "intermediate_size": 128},
    "qwen3_moe": {**HEADS, "moe_intermediate_size": 128},
}
STACKS: dict[str, dict[str, Any]] = {
    "gemma4_text": {"head_dim": 64, "global_head_dim": 64, "moe_intermediate_size": 128},
    "granitemoe": {},
    "granitemoehybrid": {"mamba_d_head": 64, "shared_intermediate_size": 128},
    "granitemoe_swa": {},
    "granitemoeshared": {"shared_intermediate_size": 128},
    "llama4_text": {"head_dim": 64, "intermediate_size_mlp": 128},
}
"""Families with stacks of experts, and what makes a model large enough for vLLM."""
NAMES = ("gate_proj", "up_proj", "down_proj")
EXPERTS = {
    "mixtral": ("block_sparse_moe.experts", "w1", "w3", "w2"),
    "qwen3_moe": ("mlp.experts", *NAMES),
    "gemma4_text": ("experts", *NAMES),
    "llama4_text": ("feed_forward.experts", *NAMES),
    **{name: ("block_sparse_moe.experts", *NAMES) for name in STACKS if "granite" in name},
}
"""Where experts lie in a layer, and what their projections are called."""
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
LINEARS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
REFUSED = {("compressed-tensors", "w8a16"), ("modelopt", "fp8-dynamic"), ("mxfp8", "mxfp8")}
"""Of experts, by vLLM, as `fp8calib.engines.weights.rules` says."""
WRITTEN = [(form.name, scheme) for form in list_written_fp8() for scheme in form.schemes]
DENSE: list[Case] = [
    # The names of scales in MXFP8's own form are refused: `test_vllm_mx.py`.
    *(("llama", *written, True) for written in WRITTEN if written[0] != "mxfp8"),
    *(("llama", form, "fp8-static", False) for form, s in WRITTEN if s == "fp8-static"),
]
CASES: list[Case] = [
    *DENSE,
    *(
        (family, *written, True)
        for family in ("mixtral", "qwen3_moe")
        for written in WRITTEN
        if written not in REFUSED
    ),
    *((family, "compressed-tensors", "fp8-dynamic", True) for family in STACKS),
    *(
        (family, "compressed-tensors", "fp8-block", True)
        for family in ("gemma4_text", "granitemoe", "llama4_text")
    ),
]
IGNORED = {
    ("llama4_text", "fp8-block"): ("*.self_attn.[qkv]_proj",),
    ("llama4_text", "fp8-dynamic"): ("*.0.feed_forward.experts",),
}
"""vLLM reorders q and k at load, which blocks do not survive (`fp8calib.engines.weights.rules`).
The experts of single layers may stay unquantized."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Path]:
    """Quantize every family; those without stacks by statistics."""
    outs = {}
    for case in CASES:
        family, form, scheme, is_shared = case
        folder = tmp_path_factory.mktemp(family)
        if family in SIZES:
            with nullcontext() if is_shared else separate_scales():
                outs[case] = make(folder, form, scheme, family, **SIZES[family])
            continue
        changes = {**WIDE, "intermediate_size": 128, **STACKS[family]}
        made = replace(STACKED[family], changes={**STACKED[family].changes, **changes})
        made.save(made.build(family), folder / "model")
        ignored = IGNORED.get((family, scheme), ())
        outs[case] = run(folder / "model", folder / "out", scheme, ignore=ignored).out
    return outs


@pytest.fixture(scope="module")
def loaded(written: dict[Case, Path]) -> dict[Case, Tensors]:
    """Let vLLM load them all, and give its parameters."""
    return load_in_vllm(written)


def list_modules(names: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """List modules of vLLM below `model.layers`: the begin of its parameters, and its members."""
    for name in names:
        parent, _, own = f"model.layers.{name}".rpartition(".")
        yield f"{parent}.{own}.", [f"{parent}.{part}" for part in FUSED.get(own, (own,))]


def list_experts(family: str) -> Iterator[tuple[str, list[str]]]:
    """List both stacks of each layer likewise: gate above up, one expert after another."""
    place, gate, up, down = EXPERTS[family]
    for path in (f"model.layers.{layer}.{place}" for layer in (0, 1)):
        for stack, parts in (("w13_", (gate, up)), ("w2_", (down,))):
            members = [f"{path}.{expert}.{part}" for expert in range(4) for part in parts]
            yield f"{path}.routed_experts.{stack}", members


def expect_bytes(held: Tensors, folder: Path, modules: Iterable[tuple[str, list[str]]]) -> None:
    """Compare all that vLLM holds of modules with the file, as bytes."""
    stored = load_file(folder / "model.safetensors")
    for begin, members in modules:
        first = f"{members[0]}."
        suffixes = [name.removeprefix(first) for name in stored if name.startswith(first)]
        assert "weight" in suffixes
        for suffix in suffixes:
            found = held[f"loaded.{begin}{suffix}"]
            parts = [as_loaded(stored[f"{member}.{suffix}"]) for member in members]
            if "experts" in begin and found.numel() * 2 == len(parts):
                parts = parts[::2]  # gate and up have one input, and one place for its scale
            raw = torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])
            assert torch.equal(found.reshape(-1).view(torch.uint8), raw), (begin, suffix)


def as_loaded(tensor: torch.Tensor) -> torch.Tensor:
    """Round what is not quantized to the dtype that vLLM is told to use."""
    is_weight = tensor.dtype is torch.float32 and tensor.numel() >= 128 * 128
    return tensor.bfloat16() if is_weight else tensor


@pytest.mark.parametrize("case", CASES)
def test_codes_and_scales_arrive(
    written: dict[Case, Path], loaded: dict[Case, Tensors], case: Case
) -> None:
    dense = list_modules(f"{layer}.{name}" for layer in (0, 1) for name in LINEARS)
    modules = dense if case[0] == "llama" else list_experts(case[0])
    expect_bytes(loaded[case], written[case], modules)


@pytest.mark.parametrize("case", DENSE)
def test_the_weights_that_vllm_computes_with_are_those_we_emulate(
    written: dict[Case, Path], loaded: dict[Case, Tensors], case: Case
) -> None:
    """After vLLM has prepared them, which rounds per-tensor weights once more."""
    with Fp8Checkpoint.open(
        written[case], fuse=True, through_float16=True, keeps_equal_scales=True
    ) as checkpoint:
        ready = {n.removeprefix("ready."): t for n, t in loaded[case].items() if "ready." in n}
        prepared = dequantize(ready, is_transposed=True)
        for begin, members in list_modules(f"{i}.{name}" for i in (0, 1) for name in LINEARS):
            parts = [checkpoint.read(f"{member}.weight") for member in members]
            assert compare_matrices(prepared[f"{begin}weight"], torch.cat(parts)) < 1e-6
