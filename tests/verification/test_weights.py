"""Which weights belong together, and weights taken from an FP8 checkpoint that was made by hand."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8calib.engines.arithmetic import Numerics
from fp8calib.engines.registry import find_emulated
from fp8calib.formats.fp8.checkpoint import Fp8Checkpoint
from fp8calib.model.geometry import Site
from fp8calib.numerics.formats import E4M3FN, E4M3FNUZ, E5M2, Fp8Format
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.fake_quantize import Damage
from fp8calib.verification.emulation.weights import HeldWeight, changed_weights, find_clipped
from tests import zoo
from tests.formats.fp8_handmade import AUTOFP8_DYNAMIC, CT_BLOCK, CT_CHANNEL
from tests.kit.checkpoints import change_config
from tests.verification.by_hand import Subject, emulate_checkpoint, hold_weights, opened

REFERENCE = find_emulated("reference")[1]


LARGEST = 448.0


def per_tensor(weight: torch.Tensor) -> torch.Tensor:
    return weight.abs().max()


def per_channel(weight: torch.Tensor) -> torch.Tensor:
    return weight.abs().amax(1, keepdim=True)


def per_block(weight: torch.Tensor) -> torch.Tensor:
    strips = weight.abs().split(128, 0)
    return torch.tensor([[float(piece.max()) for piece in s.split(128, 1)] for s in strips])


FORMS = {
    "tensor": (per_tensor, AUTOFP8_DYNAMIC),
    "channel": (per_channel, CT_CHANNEL),
    "block": (per_block, CT_BLOCK),
}


def spread(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    if scale.dim() == 2 and scale.shape[1] > 1:
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return scale[: shape[0], : shape[1]].expand(shape) if scale.dim() == 2 else scale.expand(shape)


def is_quantized(name: str) -> bool:
    return name.endswith(("_proj.weight", "w1.weight", "w2.weight", "w3.weight"))


def write(subject: Subject, folder: Path, form: str, factor: float = 1 / 3) -> Path:
    """Quantize a saved model with scales that are `factor` times what they should be."""
    find_amax, config = FORMS[form]
    subject.model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in filter(is_quantized, list(tensors)):
        scale = find_amax(tensors[name]) / LARGEST * factor
        quotient = tensors[name] / spread(scale, tensors[name].shape)
        tensors[name] = quotient.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return change_config(folder, quantization_config=config)


def read(subject: Subject, folder: Path, numerics: Numerics = REFERENCE) -> Candidate:
    checkpoint = Fp8Checkpoint.open(folder, fuse=numerics.fused_share_scales)
    return emulate_checkpoint(subject, checkpoint, numerics)


def count_clipped(subject: Subject, candidate: Candidate) -> dict[str, int]:
    """Count what was clipped of each linear."""
    damage: dict[Site, torch.Tensor] = {}
    with changed_weights(subject.model, candidate.weights, subject.originals, damage, {}):
        return {site.module: int(Damage(*each.tolist()).clipped) for site, each in damage.items()}


def count_by_hand(subject: Subject, folder: Path) -> dict[str, int]:
    """Count the elements of each file tensor that lie beyond 448 times their scale."""
    stored = load_file(folder / "model.safetensors")
    subject.model.save_pretrained(folder / "plain")
    plain = load_file(folder / "plain" / "model.safetensors")
    return {
        name.removesuffix(".weight"): int(
            (weight.abs() > LARGEST * spread(stored[f"{name}_scale"].float(), weight.shape)).sum()
        )
        for name, weight in plain.items()
        if is_quantized(name)
    }


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("engine", ["reference", "vllm"])
def test_what_a_checkpoint_clipped_is_counted(
    wide: Subject, tmp_path: Path, form: str, engine: str
) -> None:
    folder = write(wide, tmp_path / "fp8", form)
    expected = count_by_hand(wide, folder)
    assert min(expected.values()) > 0
    assert count_clipped(wide, read(wide, folder, find_emulated(engine)[1])) == expected


def test_what_a_checkpoint_clipped_of_experts_is_counted(tmp_path: Path) -> None:
    with opened(zoo.build("mixtral"), tmp_path / "m") as subject:
        folder = write(subject, tmp_path / "fp8", "tensor")
        by_hand = count_by_hand(subject, folder)
        found = count_clipped(subject, read(subject, folder))
    for layer in range(2):
        experts = {
            name: count
            for name, count in by_hand.items()
            if f"layers.{layer}." in name and "experts" in name
        }
        ends = [sum(c for n, c in experts.items() if n.endswith(end)) for end in ("w1", "w3", "w2")]
        module = f"model.layers.{layer}.mlp.experts"
        assert found[f"{module}.down_proj"] == ends[2] > 0
        assert found[f"{module}.gate_proj"] == found[f"{module}.up_proj"] == ends[0] + ends[1]


def test_one_changed_expert_of_an_unquantized_stack_is_copied(tmp_path: Path) -> None:
    """The model holds the w1 and w3 of four experts in one parameter."""
    name = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    with opened(zoo.build("mixtral"), tmp_path / "m") as subject:
        folder = write(subject, tmp_path / "fp8", "tensor", 1.0)
        tensors = load_file(folder / "model.safetensors")
        subject.model.save_pretrained(tmp_path / "plain")
        plain = load_file(tmp_path / "plain" / "model.safetensors")
        tensors |= {each: plain[each] for each in tensors if "experts" in each and each in plain}
        tensors = {n: t for n, t in tensors.items() if not ("experts" in n and "_scale" in n)}
        tensors[name] = plain[name] * 2
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        checkpoint = Fp8Checkpoint.open(folder, fuse=REFERENCE.fused_share_scales)
        stored = emulate_checkpoint(subject, checkpoint, REFERENCE)
        before, found = hold_weights(subject, Candidate()), hold_weights(subject, stored)
    copied = [
        each for each in stored.weights if isinstance(each, HeldWeight) and each.scales is None
    ]
    stack = "model.layers.1.mlp.experts.gate_up_proj"
    assert [parameter.name for each in copied for parameter in each.parameters] == [stack]
    rows = len(plain[name])
    expected = before[stack].clone()
    expected[2, :rows] *= 2
    assert torch.equal(found[stack], expected)


@pytest.mark.parametrize("fmt", [E4M3FN, E4M3FNUZ, E5M2], ids=lambda fmt: fmt.name)
def test_only_the_largest_code_can_have_been_clipped(fmt: Fp8Format) -> None:
    """What was scaled before it was quantized (SmoothQuant) lies beyond, but at other codes."""
    below = max(value for code in range(128) if (value := fmt.value_of(code)) < fmt.max)
    exact = torch.tensor([fmt.max, fmt.max * 2, -fmt.max * 2, fmt.max * 2])
    found = torch.tensor([fmt.max, fmt.max, -fmt.max, below])
    clipped = find_clipped(exact, found, torch.full((4,), fmt.max), fmt)
    assert clipped is not None
    assert clipped.tolist() == [False, True, True, False]
    assert find_clipped(exact, found, torch.full((4,), fmt.max * 2), fmt) is None
