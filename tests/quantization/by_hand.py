"""Checkpoints made by hand, and their FP8 weights computed with numpy and ml_dtypes.

This module shares no code with the product.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.formats.fp8.registry import find_written
from fp8calib.numerics.schemes import find_scheme, round_block_scales
from fp8calib.quantization.matrices import Matrix
from fp8calib.quantization.plan import (
    NO_SCALES,
    CalibratedScales,
    QuantizePlan,
    make_plan,
    select_linears,
)
from fp8calib.quantization.settings import PlanSettings
from fp8calib.quantization.write import Written, write_checkpoint
from tests.kit.checkpoints import Tensors, change_config, change_tensors, load_folder

LAYER = "model.layers.0"


def random(rows: int, columns: int, *, seed: int, factor: float = 1.0) -> torch.Tensor:
    """Draw a bfloat16 weight."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) * factor).bfloat16()


def make_tensors() -> Tensors:
    """Make a layer whose sizes are not multiples of 128, with fused members of different amax."""
    return {
        "model.embed_tokens.weight": random(160, 200, seed=1),
        f"{LAYER}.input_layernorm.weight": torch.ones(200, dtype=torch.bfloat16),
        f"{LAYER}.self_attn.q_proj.weight": random(256, 200, seed=2),
        f"{LAYER}.self_attn.k_proj.weight": random(130, 200, seed=3, factor=8.0),
        f"{LAYER}.self_attn.v_proj.weight": random(130, 200, seed=4, factor=0.01),
        f"{LAYER}.self_attn.o_proj.weight": random(200, 256, seed=5),
        f"{LAYER}.mlp.gate_proj.weight": random(300, 200, seed=6),
        f"{LAYER}.mlp.up_proj.weight": random(300, 200, seed=7, factor=3.0),
        f"{LAYER}.mlp.down_proj.weight": random(200, 300, seed=8),
        "model.norm.weight": torch.ones(200, dtype=torch.bfloat16),
        "lm_head.weight": random(160, 200, seed=9),
    }


CONFIG: Mapping[str, object] = {
    "architectures": ["NobodyKnowsForCausalLM"],
    "model_type": "nobody-knows",
    "hidden_size": 200,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 160,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def save(folder: Path, tensors: Tensors, *, shards: int = 1, **config: object) -> Path:
    """Write a checkpoint; with several shards, tensors are assigned in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map: dict[str, str] = {}
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[number::shards])
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


class Silent:
    """A progress bar that counts."""

    def __init__(self) -> None:
        self.steps = 0

    def advance(self, steps: int) -> None:
        """Count."""
        self.steps += steps


@dataclass(frozen=True)
class Run:
    """The plan and the result of one run."""

    plan: QuantizePlan
    written: Written
    out: Path

    def tensors(self) -> Tensors:
        """Read all tensors that were written."""
        return load_folder(self.out)

    def config(self) -> dict[str, Any]:
        """Read the quantization config that was written."""
        found: dict[str, Any] = json.loads((self.out / "config.json").read_text())
        return found["quantization_config"]  # type: ignore[no-any-return]


def run(
    source: Path,
    out: Path,
    scheme: str,
    form: str = "compressed-tensors",
    *,
    scales: CalibratedScales = NO_SCALES,
    resume: bool = False,
    force: bool = False,
    power_of_two: bool = False,
    progress: Silent | None = None,
    layer_schemes: Mapping[str, str] = MappingProxyType({}),
    **settings: Any,
) -> Run:
    found = find_scheme(scheme)
    found = round_block_scales(found) if power_of_two else found
    others = {pattern: find_scheme(name) for pattern, name in layer_schemes.items()}
    asked = PlanSettings(
        scheme=found, by_pattern=others, dialect=find_written(form, found), **settings
    )
    with Checkpoint.open(source) as checkpoint:
        selection = select_linears(checkpoint, asked)
        plan = make_plan(checkpoint, asked, selection, scales=scales)
        written = write_checkpoint(
            checkpoint,
            plan,
            out,
            device=torch.device("cpu"),
            advance=(progress or Silent()).advance,
            resume=resume,
            force=force,
        )
    return Run(plan, written, out)


@contextmanager
def separate_scales() -> Iterator[None]:
    """Give projections that engines fuse a scale each, as other tools do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Matrix, "fused_group", property(lambda matrix: matrix.module))
        yield


def to_numpy(weight: torch.Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Convert a weight to fp32, which represents every source dtype exactly."""
    return weight.to(torch.float32).numpy()


def encode(values: np.ndarray[Any, Any], scale: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Divide in fp32, saturate, and round with ml_dtypes: uint8 codes."""
    scaled = np.clip(values / scale.astype(np.float32), np.float32(-448), np.float32(448))
    return scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def block_amax(weight: np.ndarray[Any, Any], *block: int | None) -> np.ndarray[Any, Any]:
    """Find the largest magnitude of each block [rows, columns]; None is all of them."""
    found = np.abs(weight)
    for axis, size in enumerate(block):
        starts = range(0, weight.shape[axis], size or weight.shape[axis])
        found = np.maximum.reduceat(found, starts, axis)
    return found


def spread(
    scale: np.ndarray[Any, Any], weight: np.ndarray[Any, Any], *block: int | None
) -> np.ndarray[Any, Any]:
    """Give each value of a weight the scale of its block."""
    for axis, size in enumerate(block):
        scale = scale.repeat(size or weight.shape[axis], axis)
    return scale[: weight.shape[0], : weight.shape[1]]


def scale_for(amax: np.ndarray[Any, Any] | float) -> np.ndarray[Any, Any]:
    """Divide a magnitude by 448 in fp32, never below the smallest normal number."""
    return np.maximum(np.float32(amax) / np.float32(448), np.float32(2.0**-126))


def codes_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the codes of an e4m3fn tensor: uint8."""
    assert tensor.dtype is torch.float8_e4m3fn
    return tensor.view(torch.uint8).numpy()


def quantize_head(folder: Path) -> Path:
    """Quantize the output layer of an MXFP8 checkpoint too, as other tools can."""

    def quantize_weight(tensors: Tensors) -> Tensors:
        weight = tensors["lm_head.weight"].float()
        blocks = weight.reshape(len(weight), -1, 32)
        exponents = (blocks.abs().amax(2) / 448).log2().ceil()
        codes = (blocks / exponents.exp2().unsqueeze(2)).to(torch.float8_e4m3fn)
        scale = (exponents + 127).to(torch.uint8)
        return {**tensors, "lm_head.weight": codes.flatten(1), "lm_head.weight_scale": scale}

    def change(config: dict[str, Any]) -> None:
        section = config["quantization_config"]
        section["ignore"] = []
        for group in section.get("config_groups", {}).values():
            group["targets"].append("re:.*lm_head")

    change_tensors(folder, quantize_weight)
    (folder / "hf_quant_config.json").unlink(missing_ok=True)
    return change_config(folder, change)
