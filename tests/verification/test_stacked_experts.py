"""Checkpoints that `quantize` wrote of stacked experts, in the place of a model's own weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers.models.aria import modeling_aria

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.engines.registry import find_emulated
from fp8calib.formats.fp8.checkpoint import Fp8Checkpoint
from fp8calib.model.load import load_model, open_source
from fp8calib.numerics.schemes import SCHEMES
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.weights import WeightChange, changed_weights
from tests.quantization.by_hand import read, run
from tests.quantization.stacked import STACKED, find_experts
from tests.verification.by_hand import Subject, emulate_checkpoint, emulate_scheme, make_subject

REFERENCE = find_emulated("reference")[1]


@dataclass
class Opened(Subject):
    """A model as `verify` opens it."""

    folder: Path

    def emulate_stored(self, folder: Path) -> Candidate:
        """Open an FP8 checkpoint of it."""
        checkpoint = Fp8Checkpoint.open(folder, fuse=REFERENCE.fused_share_scales)
        return emulate_checkpoint(self, checkpoint, REFERENCE, is_changed=self._is_changed)

    def _is_changed(self, name: str) -> bool:
        with Checkpoint.open(self.folder) as own:
            return name not in own

    def apply(self, changes: tuple[WeightChange, ...]) -> dict[str, torch.Tensor]:
        """Give all parameters while the changes are in the model."""
        with changed_weights(self.model, changes, self.originals, {}, {}):
            return {name: p.detach().clone() for name, p in self.model.named_parameters()}


@pytest.fixture(scope="module", params=sorted(STACKED))
def opened(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Opened]:
    """Write a tiny model of every family, and open it as `verify` does."""
    if request.param.startswith("aria") and hasattr(modeling_aria, "AriaGroupedExpertsGemm"):
        pytest.skip("transformers 5.17 keeps aria's experts in modules of their own")
    family = STACKED[request.param]
    folder = tmp_path_factory.mktemp(request.param) / request.param
    family.save(family.build(request.param), folder)
    source = open_source(str(folder))
    model = load_model(source, dtype=torch.float32, device="cpu", device_map=None)
    with Checkpoint.open(folder) as checkpoint:
        subject = make_subject(model, checkpoint)
        yield Opened(model, subject.geometry, subject.originals, subject.selection, folder)


@pytest.fixture(scope="module")
def dynamic(opened: Opened, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write its checkpoint in fp8-dynamic."""
    return run(opened.folder, tmp_path_factory.mktemp("dynamic") / "fp8", "fp8-dynamic").out


@pytest.mark.parametrize("scheme", ["fp8-dynamic", "fp8-block"])
def test_the_checkpoint_is_what_the_scheme_emulates(
    opened: Opened, dynamic: Path, tmp_path: Path, scheme: str
) -> None:
    """Every weight in memory and every quantizer of inputs are the same, bit for bit."""
    is_block = scheme == "fp8-block"
    folder = run(opened.folder, tmp_path / "fp8", scheme).out if is_block else dynamic
    stored = opened.emulate_stored(folder)
    planned = emulate_scheme(opened, SCHEMES[scheme], REFERENCE)
    found, expected = opened.apply(stored.weights), opened.apply(planned.weights)
    experts = [name for name in found if ".experts." in name and found[name].dim() == 3]
    assert len(experts) >= 2
    for name in found:
        assert torch.equal(found[name], expected[name]), name
    assert stored.quantizers == planned.quantizers


def test_every_expert_in_memory_is_the_one_on_disk(opened: Opened, dynamic: Path) -> None:
    """Codes times scales, joined by hand in the order in which transformers multiplies them."""
    stored = read(dynamic)
    found = opened.apply(opened.emulate_stored(dynamic).weights)
    paths = find_experts(opened.model)
    numbers = {int(path.split("layers.")[1].split(".")[0]): path for path in paths}
    assert numbers
    for number, path in numbers.items():
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
