"""FP8 experts, a tensor each on disk, in the stacks that vLLM loads them into."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.formats.fp8.registry import FP8_DIALECTS, list_written
from fp8calib.numerics.schemes import find_scheme
from fp8calib.quantization.calibrated_scales import find_scales
from fp8calib.quantization.layer_schemes import LayerSchemes
from fp8calib.quantization.plan import PlanSettings
from fp8calib.quantization.select import select
from tests import zoo
from tests.doors import make_plan, run_calibration
from tests.quantization.by_hand import run
from tests.real_engines.vllm_job import load_in_vllm
from tests.zoo import draw

SIZES = {"hidden_size": 256, "head_dim": 64, "vocab_size": 128}
FAMILIES = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2", {"intermediate_size": 128}),
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj", {"moe_intermediate_size": 128}),
}
"""Where experts lie in a layer, what they are called, and how large whole blocks make them."""
REFUSED = {("compressed-tensors", "w8a16"), ("modelopt", "fp8-dynamic"), ("mxfp8", "mxfp8")}
"""By vLLM, as `fp8calib.engines.weights.rules` says."""
CASES = [
    (family, form.name, scheme)
    for family in FAMILIES
    for form in list_written()
    for scheme in form.schemes
    if (form.name, scheme) not in REFUSED
]
Case = tuple[str, str, str]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Path]:
    """Quantize both families in every way there is."""
    outs = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        zoo.save(family, folder / "model", **SIZES, **FAMILIES[family][-1])
        stats = run_calibration(folder / "model", make_plan(draw([20, 20])))[1]
        with Checkpoint.open(folder / "model") as checkpoint:
            for _, form, scheme in (case for case in CASES if case[0] == family):
                settings = PlanSettings(
                    schemes=LayerSchemes(find_scheme(scheme)), dialect=FP8_DIALECTS[form]
                )
                scales = find_scales(stats, checkpoint, settings, select(checkpoint))
                out = folder / f"{form}-{scheme}"
                run(folder / "model", out, scheme, form, scales=scales)
                outs[family, form, scheme] = out
    return outs


@pytest.fixture(scope="module")
def loaded(written: dict[Case, Path]) -> dict[Case, dict[str, torch.Tensor]]:
    """Let vLLM load them all, and give its parameters."""
    return load_in_vllm(written)


@pytest.mark.parametrize("case", CASES)
def test_every_expert_lies_in_its_place(
    written: dict[Case, Path], loaded: dict[Case, dict[str, torch.Tensor]], case: Case
) -> None:
    """Codes and scales, as bytes: gate above up, one expert after another."""
    place, gate, up, down, _ = FAMILIES[case[0]]
    stored = load_file(written[case] / "model.safetensors")
    compared = 0
    for layer in (0, 1):
        path = f"model.layers.{layer}.{place}.experts"
        first = f"{path}.0.{gate}."
        suffixes = {name.removeprefix(first) for name in stored if name.startswith(first)}
        assert "weight" in suffixes
        for suffix in suffixes:
            for fused, parts in (("w13", (gate, up)), ("w2", (down,))):
                found = loaded[case][f"loaded.{path}.routed_experts.{fused}_{suffix}"]
                # gate and up have one input, and for the most part one place for its scale
                held = parts[:1] if suffix == "input_scale" and found.dim() == 1 else parts
                names = [f"{path}.{e}.{part}.{suffix}" for e in range(4) for part in held]
                raw = torch.cat([stored[name].reshape(-1).view(torch.uint8) for name in names])
                assert torch.equal(found.reshape(-1).view(torch.uint8), raw), (fused, suffix)
                compared += 1
    assert compared == 4 * len(suffixes)
