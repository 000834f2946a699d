"""Which weights belong together, and weights taken from an FP8 checkpoint that was made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fp8calib.engines.numerics import Numerics
from fp8calib.engines.registry import find_emulated
from fp8calib.formats.fp8.checkpoint import Fp8Checkpoint
from fp8calib.model.shapes import Site
from fp8calib.numerics.formats import E4M3FN, E4M3FNUZ, E5M2, Fp8Format
from fp8calib.numerics.schemes import find_scheme
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.damage import Damage
from fp8calib.verification.emulation.stored import find_clipped
from fp8calib.verification.emulation.weights import WeightChange, changed_weights
from tests import zoo
from tests.formats.fp8_handmade import AUTOFP8_DYNAMIC, CT_BLOCK, CT_CHANNEL
from tests.kit.checkpoints import change_config
from tests.verification.by_hand import (
    ROUTERS,
    Recipe,
    Subject,
    cast_blocks,
    cast_groups,
    emulate,
    emulate_checkpoint,
    make_batch,
    opened,
    plain_forward,
    plan_scheme,
    quantize_by_hand,
    tensor_scale,
)

BATCH = make_batch([5, 20, 13])
# --- an FP8 checkpoint -------------------------------------------------------------------------


def write_blocks(model: nn.Module, folder: Path) -> Path:
    """Write a model as DeepSeek does: codes, and a scale per block of 128 x 128."""
    model.save_pretrained(folder)  # type: ignore[operator]
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        weight = tensors[name]
        scales = [
            [tensor_scale(piece) for piece in strip.split(128, 1)] for strip in weight.split(128, 0)
        ]
        spread = torch.tensor(scales).repeat_interleave(128, 0).repeat_interleave(128, 1)
        spread = spread[: weight.shape[0], : weight.shape[1]]
        tensors[name] = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.tensor(scales)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    section = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    return change_config(folder, quantization_config={**section, "weight_block_size": [128, 128]})


def stored(subject: Subject, folder: Path, numerics: Numerics) -> Candidate:
    """Ask the product what an engine makes of a checkpoint."""
    checkpoint = Fp8Checkpoint.open(folder, fuse=numerics.fused_share_scales)
    return emulate_checkpoint(subject, checkpoint, numerics)


def test_a_checkpoint_of_blocks_is_what_quantizing_by_hand_gives(
    wide: Subject, tmp_path: Path
) -> None:
    folder = write_blocks(wide.model, tmp_path / "fp8")
    expected = quantize_by_hand(
        wide.model, Recipe(lambda weight, _: cast_blocks(weight), lambda _: cast_groups)
    )
    (found,) = emulate(wide, stored(wide, folder, find_emulated("reference")[1]), BATCH)
    assert torch.equal(found, plain_forward(expected, BATCH))
    assert not torch.equal(found, plain_forward(wide.model, BATCH))


# --- what a checkpoint clipped, and its scales ---------------------------------------------------


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


def write(subject: Subject, folder: Path, form: str, factor: float, dtype: torch.dtype) -> Path:
    """Quantize a saved model with scales that are `factor` times what they should be."""
    find_amax, config = FORMS[form]
    subject.model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in filter(is_quantized, list(tensors)):
        scale = (find_amax(tensors[name]) / LARGEST * factor).to(dtype)
        quotient = tensors[name] / spread(scale.float(), tensors[name].shape)
        tensors[name] = quotient.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return change_config(folder, quantization_config=config)


def read(subject: Subject, folder: Path, engine: str = "reference") -> tuple[WeightChange, ...]:
    numerics = find_emulated(engine)[1]
    checkpoint = Fp8Checkpoint.open(folder, fuse=numerics.fused_share_scales)
    return tuple(emulate_checkpoint(subject, checkpoint, numerics).weights)


def count_clipped(subject: Subject, weights: tuple[WeightChange, ...]) -> dict[str, int]:
    damage: dict[Site, torch.Tensor] = {}
    with changed_weights(subject.model, weights, subject.originals, damage, {}):
        pass
    return {site.module: int(Damage(*sums.tolist()).clipped) for site, sums in damage.items()}


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
    folder = write(wide, tmp_path / "fp8", form, 1 / 3, torch.float32)
    expected = count_by_hand(wide, folder)
    assert min(expected.values()) > 0
    assert count_clipped(wide, read(wide, folder, engine)) == expected


def test_what_a_checkpoint_clipped_of_experts_is_counted(tmp_path: Path) -> None:
    with opened(zoo.build("mixtral"), tmp_path / "m") as subject:
        folder = write(subject, tmp_path / "fp8", "tensor", 1 / 3, torch.float32)
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


@pytest.mark.parametrize("fmt", [E4M3FN, E4M3FNUZ, E5M2], ids=lambda fmt: fmt.name)
def test_only_the_largest_code_can_have_been_clipped(fmt: Fp8Format) -> None:
    """What was scaled before it was quantized (SmoothQuant) lies beyond, but at other codes."""
    below = max(value for code in range(128) if (value := fmt.value_of(code)) < fmt.max)
    exact = torch.tensor([fmt.max, fmt.max * 2, -fmt.max * 2, fmt.max * 2])
    found = torch.tensor([fmt.max, fmt.max, -fmt.max, below])
    clipped = find_clipped(exact, found, torch.full((4,), fmt.max), fmt)
    assert clipped is not None
    assert (clipped.abs() > fmt.max).tolist() == [False, True, True, False]
    assert find_clipped(exact, found, torch.full((4,), fmt.max * 2), fmt) is None


@pytest.mark.parametrize("family", sorted(zoo.ZOO))
def test_every_matrix_of_the_layers_is_quantized_or_a_router(family: str, tmp_path: Path) -> None:
    """A list made by hand of what stays: routers, and what is no projection."""
    with opened(zoo.build(family), tmp_path / "m") as subject:
        planned = plan_scheme(subject, find_scheme("w8a16")).weights
    parameters = [parameter for each in planned for parameter in each.parameters]
    listed = [parameter.name for parameter in parameters if parameter.sites]
    assert len(listed) == len(set(listed))
    layers = tuple(f"{layer.module}." for layer in subject.geometry.layers)
    left = {
        name.rpartition(".")[0].rpartition(".")[2]
        for name, parameter in subject.model.named_parameters()
        if name.startswith(layers) and parameter.ndim > 1 and name not in listed
    }
    assert left <= {*ROUTERS, "conv1d", "experts"}
    biases = {
        name
        for name, parameter in subject.model.named_parameters()
        if "experts" in name and parameter.ndim > 1 and name not in listed
    }
    assert all("bias" in n or "shared_expert_gate" in n for n in biases)
