"""What is no linear of a decoder layer: its weights count, and what is not emulated is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fp8calib.numerics.schemes import find_scheme
from tests import zoo
from tests.cli.conftest import write_rows
from tests.cli.program import fail, succeed
from tests.kit.checkpoints import change_config, change_tensors
from tests.verification.by_hand import opened, plan_scheme

ROWS = [[(i * j) % 120 + 3 for j in range(1, 17)] for i in range(1, 7)]


def dequantize(folder: Path) -> dict[str, torch.Tensor]:
    """Multiply codes by scales, with nothing but safetensors and torch."""
    tensors = load_file(folder / "model.safetensors")
    return {
        name: value.float() * tensors[f"{name}_scale"].float()
        if value.dtype is torch.float8_e4m3fn
        else value
        for name, value in tensors.items()
        if not name.endswith("_scale")
    }


def add_fp8(folder: Path, name: str) -> None:
    """Quantize one more weight of a checkpoint, which its config says is left out."""

    def quantize(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        scale = tensors[name].float().abs().amax(1, keepdim=True) / 448
        codes = (tensors[name].float() / scale).to(torch.float8_e4m3fn)
        return {**tensors, name: codes, f"{name}_scale": scale}

    def widen(config: dict[str, Any]) -> None:
        section = config["quantization_config"]
        section["ignore"] = []
        for group in section["config_groups"].values():
            group["targets"] = ["Linear", "Embedding"]

    change_tensors(folder, quantize)
    change_config(folder, widen)


def lose(folder: Path, name: str) -> None:
    change_tensors(folder, {name: None})


def double(folder: Path, name: str) -> None:
    change_tensors(folder, lambda tensors: {**tensors, name: tensors[name] * 2})


def double_end(folder: Path, name: str) -> None:
    """Change the last value only."""

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors[name].view(-1)[-1] *= 2
        return tensors

    change_tensors(folder, change)


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("damage", "name", "says"),
    [
        # engines would run with what memory held, also if no scheme quantizes the tensor
        *(
            (lose, name, f"there is no weight for {name}")
            for name in ("model.norm.weight", "model.layers.1.input_layernorm.weight", EMBEDDING)
        ),
        *(
            (add_fp8, name, f"{name} is an embedding or the output head")
            for name in (HEAD, EMBEDDING)
        ),
        # nothing would come of a changed head: every candidate is scored by the model's own
        *(
            (damage, name, f"its {name} is not that of the model")
            for name in (HEAD, EMBEDDING)
            for damage in (double, double_end)
        ),
    ],
)
def test_a_checkpoint_with_another_embedding_or_head_or_without_a_tensor_is_refused(
    damage: Callable[[Path, str], None], name: str, says: str, tmp_path: Path
) -> None:
    zoo.save("llama", tmp_path / "m", tie_word_embeddings=False)
    succeed("quantize", tmp_path / "m", "--scheme", "w8a16", "--out", tmp_path / "q")
    damage(tmp_path / "q", name)
    data = write_rows(tmp_path / "rows.jsonl", [{"input_ids": ROWS[0]}])
    assert says in fail(4, "verify", tmp_path / "m", "--scales", tmp_path / "q", "--data", data)


def test_what_quantize_refuses_is_told(tmp_path: Path) -> None:
    """Its scheme is emulated all the same: on-line quantization of an engine may do that."""
    with opened(zoo.build("dbrx"), tmp_path) as subject:
        planned = plan_scheme(subject, find_scheme("fp8-dynamic"))
    refused, missed = planned.notes
    assert refused.startswith(f"`quantize` does not write this model: {tmp_path}: ")
    assert "experts.mlp.v1 [192, 32] holds several matrices" in refused
    assert missed == (
        "not quantized here, though an engine may: transformer.blocks.0.ffn.experts.mlp and 1 more"
    )
