"""KV scales that were added to quantized checkpoints, as vLLM on a CPU holds them.

The CPU build has no kernel for FP8 weights without AMX, so these go through vLLM's weight loader
alone. INT8 and INT4 of compressed-tensors run, and generate.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.program import succeed
from tests.cli.quantized_children import FORMS, calibrate_base, save_child, save_int
from tests.real_engines.vllm_job import VllmServer, load_in_vllm

LOADED = tuple(form for form in FORMS if form not in ("llm-compressor, blocks", "autofp8"))
"""Of these two, the tiny llama has projections whose blocks fusing would cut."""
ROUNDED = ("modelopt", "ModelOpt", "Quark")
"""vLLM rounds their scales to the model's dtype."""


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibrate_base(tmp_path_factory.mktemp("calibrated"))


def _graft(calibrated: Path, child: Path, out: Path) -> Path:
    command = ("export", calibrated / "stats.safetensors", "--format", "kv-overlay")
    succeed(*command, "--model", child, "--out", out)
    return out / "kv-overlay"


def _expect(calibrated: Path, dtype: torch.dtype) -> dict[tuple[int, str], float]:
    stats = load_file(calibrated / "stats.safetensors")
    return {
        (layer, role): float(
            (stats[f"model.layers.{layer}.self_attn.{role}/amax"].max() / 448).to(dtype)
        )
        for layer in range(2)
        for role in "kv"
    }


def test_the_weight_loader_holds_every_scale(calibrated: Path, tmp_path: Path) -> None:
    grafts = {
        form: _graft(calibrated, save_child(form, tmp_path / str(i)), tmp_path / f"out-{i}")
        for i, form in enumerate(LOADED)
    }
    for form, held in load_in_vllm(grafts).items():
        dtype = torch.bfloat16 if form.startswith(ROUNDED) else torch.float32
        found = {
            (layer, role): float(held[f"held.model.layers.{layer}.self_attn.attn.{role}"].max())
            for layer in range(2)
            for role in "kv"
        }
        assert found == pytest.approx(_expect(calibrated, dtype), rel=1e-6), form


@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, 32)])
def test_integers_run_with_the_scales(
    calibrated: Path, tmp_path: Path, vllm: VllmServer, bits: int, group: int | None
) -> None:
    child = save_int(tmp_path / "child", bits, group=group)
    folder = _graft(calibrated, child, tmp_path / "out")
    ids = [(5 * j) % 64 for j in range(12)]
    answer = vllm(folder, kv_cache_dtype="auto", dtype="bfloat16", logprobs=[ids])
    assert not answer.error
    expected = _expect(calibrated, torch.float32)
    held = {
        (layer, role): max(values)
        for layer, pair in answer.scales().items()
        for role, values in zip("kv", pair, strict=True)
    }
    assert held == pytest.approx(expected, rel=1e-6)
    assert answer.cache_bytes() == {1}
    (scores,) = answer.logprobs
    assert all(score <= 0 for score in scores)
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]
