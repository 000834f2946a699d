"""Checkpoints that `quantize` wrote of stacked experts, in the place of a model's own weights."""

from pathlib import Path

import pytest
import torch
from transformers.models.aria import modeling_aria

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.engines.registry import find_emulated
from fp8calib.formats.fp8.checkpoint import Fp8Checkpoint
from fp8calib.model.load import load_model, open_source
from fp8calib.numerics.schemes import SCHEMES
from tests.quantization.by_hand import run
from tests.quantization.stacked import EVERY, STACKED, find_experts
from tests.verification.by_hand import (
    emulate_checkpoint,
    emulate_scheme,
    hold_weights,
    make_subject,
)

REFERENCE = find_emulated("reference")[1]
Tensors = dict[str, torch.Tensor]


def join_by_hand(stored: Tensors, found: Tensors, number: int, path: str) -> None:
    """Compare codes times scales in the order in which transformers multiplies experts."""
    modules = [n for n in stored if f"layers.{number}." in n and ".experts.0.down_proj.w" in n]
    base = modules[0].partition(".0.down_proj")[0]
    for expert in range(4):
        gate, up, down = (
            stored[f"{base}.{expert}.{name}.weight"].float()
            * stored[f"{base}.{expert}.{name}.weight_scale"]
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        gate_up = torch.cat([gate, up])
        is_turned = found[f"{path}.gate_up_proj"].shape[1] == gate_up.shape[1]
        for name, values in (("gate_up_proj", gate_up), ("down_proj", down)):
            own = values.T if is_turned else values
            assert torch.equal(found[f"{path}.{name}"][expert], own)


@pytest.mark.parametrize("name", EVERY)
def test_experts_in_memory_are_those_on_disk_and_those_of_the_scheme(
    name: str, tmp_path: Path
) -> None:
    """Every weight and every quantizer of inputs are the same, bit for bit."""
    if name.startswith("aria") and hasattr(modeling_aria, "AriaGroupedExpertsGemm"):
        pytest.skip("transformers 5.17 keeps aria's experts in modules of their own")
    folder = STACKED[name].save(STACKED[name].build(name), tmp_path / name)
    source = open_source(str(folder))
    model = load_model(source, dtype=torch.float32, device="cpu", device_map=None)
    with Checkpoint.open(folder) as own:
        subject = make_subject(model, own)
        for scheme in ("fp8-dynamic", "fp8-block"):
            written = run(folder, tmp_path / scheme, scheme)
            with Fp8Checkpoint.open(written.out, fuse=REFERENCE.fused_share_scales) as checkpoint:
                stored = emulate_checkpoint(subject, checkpoint, REFERENCE)
                found = hold_weights(subject, stored)
            planned = emulate_scheme(subject, SCHEMES[scheme], REFERENCE)
            expected = hold_weights(subject, planned)
            assert all(torch.equal(found[each], expected[each]) for each in found)
            assert stored.quantizers == planned.quantizers
            paths = find_experts(model)
            assert paths
            for path in paths if scheme == "fp8-dynamic" else ():
                number = int(path.split("layers.")[1].split(".")[0])
                join_by_hand(written.tensors(), found, number, path)
