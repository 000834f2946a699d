"""FP8 checkpoints through vLLM's own weight loader: every code and every scale in its place."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.formats.fp8.checkpoint import Fp8Checkpoint
from fp8calib.formats.fp8.registry import FP8_DIALECTS, list_written
from fp8calib.numerics.schemes import SCHEMES, find_scheme
from fp8calib.quantization.calibrated_scales import find_scales
from fp8calib.quantization.layer_schemes import LayerSchemes
from fp8calib.quantization.plan import PlanSettings
from fp8calib.quantization.select import select
from tests import zoo
from tests.cli.program import succeed
from tests.doors import make_plan, run_calibration
from tests.plugins.gptq.test_checkpoints import command
from tests.quantization.by_hand import run, separate_scales
from tests.real_engines.vllm_job import load_in_vllm
from tests.zoo import draw

SIZES = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "vocab_size": 128}
"""Query heads and KV heads fill whole blocks."""
FORMS = [form for form in list_written() if form.name != "mxfp8"]
"""The names of scales in MXFP8's own form are refused: `test_vllm_mx.py`."""
SHARED = [(form.name, scheme, True) for form in FORMS for scheme in form.schemes]
SEPARATE = [(form.name, "fp8-static", False) for form in FORMS]
GPTQ = [("gptq", scheme, True) for scheme in SCHEMES]
CASES = [*SHARED, *SEPARATE, *GPTQ]
"""Form, scheme, and whether fused weights share a scale. `gptq` is the form that `quantize` writes
by default, its weights rounded by GPTQ.
"""
FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.down_proj": ("mlp.down_proj",),
}
PATHS = [(f"model.layers.{layer}", fused) for layer in (0, 1) for fused in FUSED]
Case = tuple[str, str, bool]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Path]:
    """Quantize a llama with KV scales in every way there is."""
    folder = tmp_path_factory.mktemp("llama")
    zoo.save("llama", folder / "model", **SIZES)
    stats = run_calibration(folder / "model", make_plan(draw([20, 20])))[1]
    outs = {}
    with Checkpoint.open(folder / "model") as checkpoint:
        for form, scheme, shared in (*SHARED, *SEPARATE):
            settings = PlanSettings(
                schemes=LayerSchemes(find_scheme(scheme)),
                dialect=FP8_DIALECTS[form],
            )
            scales = find_scales(stats, checkpoint, settings, select(checkpoint))
            out = folder / f"{form}-{scheme}-{shared}"
            with nullcontext() if shared else separate_scales():
                run(folder / "model", out, scheme, form, scales=scales)
            outs[form, scheme, shared] = out
    for form, scheme, shared in GPTQ:
        outs[form, scheme, shared] = folder / f"{form}-{scheme}"
        succeed(*command(folder / "model", folder, scheme, out=f"{form}-{scheme}"))
    return outs


@pytest.fixture(scope="module")
def loaded(written: dict[Case, Path]) -> dict[Case, Tensors]:
    """Let vLLM load them all, and give its parameters."""
    return load_in_vllm(written)


@pytest.mark.parametrize("case", CASES)
def test_codes_and_scales_arrive(
    written: dict[Case, Path], loaded: dict[Case, Tensors], case: Case
) -> None:
    """As bytes, one part of a fused weight after another."""
    stored = load_file(written[case] / "model.safetensors")
    for path, fused in PATHS:
        first = f"{path}.{FUSED[fused][0]}."
        suffixes = {name.removeprefix(first) for name in stored if name.startswith(first)}
        for suffix in suffixes:
            parts = [stored[f"{path}.{part}.{suffix}"] for part in FUSED[fused]]
            found = loaded[case][f"loaded.{path}.{fused}.{suffix}"]
            assert found.dtype is parts[0].dtype
            raw = torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])
            assert torch.equal(found.reshape(-1).view(torch.uint8), raw), (fused, suffix)


@pytest.mark.parametrize("case", CASES)
def test_the_weights_that_vllm_computes_with_are_those_we_emulate(
    written: dict[Case, Path], loaded: dict[Case, Tensors], case: Case
) -> None:
    """After vLLM has prepared them, which rounds per-tensor weights once more."""
    with Fp8Checkpoint.open(
        written[case], fuse=True, through_float16=True, keeps_equal_scales=True
    ) as checkpoint:
        for path, fused in PATHS:
            found = dequantize(loaded[case], f"ready.{path}.{fused}")
            parts = [checkpoint.read(f"{path}.{part}.weight") for part in FUSED[fused]]
            torch.testing.assert_close(found, torch.cat(parts), rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", [*SHARED, *GPTQ])
def test_a_shared_scale_leaves_nothing_to_round_again(
    loaded: dict[Case, Tensors], case: Case
) -> None:
    for path, fused in PATHS:
        codes, again = (
            loaded[case][f"{stage}.{path}.{fused}.weight"] for stage in ("loaded", "ready")
        )
        is_kept = "block" in case[1] or case[1].startswith("mxfp8")
        again = again if is_kept else again.T
        assert torch.equal(codes.float(), again.float()), fused


@pytest.mark.parametrize("case", SHARED)
def test_scales_of_the_cache_arrive(
    written: dict[Case, Path], loaded: dict[Case, Tensors], case: Case
) -> None:
    stored = load_file(written[case] / "model.safetensors")
    for layer in (0, 1):
        attention = f"model.layers.{layer}.self_attn"
        for role in "kv":
            inner = f".{role}_proj" if case[0] == "modelopt" else ""
            expected = stored[f"{attention}{inner}.{role}_scale"].flatten()
            found = loaded[case][f"loaded.{attention}.attn.{role}_scale"].flatten()
            # `fp8` and `modelopt` hold it in the model's dtype while they load
            # (vLLM 0.32.0 `quantization/kv_cache.py`).
            assert torch.equal(found, expected.to(found.dtype))


def dequantize(tensors: Tensors, name: str) -> torch.Tensor:
    """Multiply the codes that vLLM holds by their scales: fp32 [out, in]."""
    codes = tensors[f"{name}.weight"].float()
    if f"{name}.weight_scale_inv" in tensors:
        return codes * spread_blocks(tensors[f"{name}.weight_scale_inv"], codes.shape)
    scale = tensors[f"{name}.weight_scale"]
    if scale.dtype is torch.uint8:
        powers = (scale.float() - 127).exp2()
        return codes * powers.repeat_interleave(32, 1)
    if scale.dim() == 2 and scale.shape[1] > 1:
        return codes * spread_blocks(scale, codes.shape)
    return codes.T * (scale.reshape(-1, 1) if scale.numel() > 1 else scale)


def spread_blocks(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Give every element the scale of its 128 x 128 block."""
    rows, columns = (torch.arange(size) // 128 for size in shape)
    return scale[rows][:, columns]
