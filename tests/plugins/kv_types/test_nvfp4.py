"""Global scales of an NVFP4 cache: those of an overlay, who reads them, and what they gain."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import DynamicCache, PreTrainedModel

import fp8calib
from fp8calib.plugins.kv_types import kv_types
from tests import zoo
from tests.plugins.kv_types.by_hand import nvfp4
from tests.verification.by_hand import HandCache, text_config

TEXT = [torch.arange(3, 67) + shift for shift in (0, 30)]
FACTOR = 6
"""What SGLang multiplies global scales by on B200."""


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Build a model whose K and V are so small that blocks' scales at 1.0 are subnormal."""
    model = zoo.build("llama", head_dim=32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.mul_(2.0**-8)
            layer.self_attn.q_proj.weight.mul_(2.0**9)
            layer.self_attn.v_proj.weight.mul_(2.0**-8)
            layer.self_attn.o_proj.weight.mul_(2.0**9)
    return model


@pytest.fixture(scope="module")
def exported(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calibrate: the folder of the overlay."""
    out = tmp_path_factory.mktemp("exported")
    model.save_pretrained(out / "model")
    fp8calib.calibrate(out / "model", TEXT, seq_len=64, dtype="float32", out=out / "measured")
    return out / "measured" / "kv-overlay"


def declare(folder: Path, target: Path, *, factor: float = 1.0) -> Path:
    """Declare the scales of an overlay to be for an NVFP4 cache, as release 0.2 did."""
    shutil.copytree(folder, target)
    for path in target.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if any(name.endswith("k_scale") for name in tensors):
            scaled = {
                name: x * factor if name.endswith(("k_scale", "v_scale")) else x
                for name, x in tensors.items()
            }
            path.unlink()
            save_file(scaled, path, {**metadata, "fp8calib.kv_cache_dtype": "nvfp4"})
    return target


def read_scales(folder: Path) -> dict[str, float]:
    """Read the scales by safetensors alone, by the path of the module and k or v."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if name.endswith(("k_scale", "v_scale"))]  # noqa: SIM118
            found |= {name: float(file.get_tensor(name)) for name in names}
    return found


def find_keys_and_values(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Run the text, and take K and V out of transformers' cache."""
    found: dict[str, list[torch.Tensor]] = {}
    for ids in TEXT:
        cache = DynamicCache(config=text_config(model))
        with torch.no_grad():
            model(ids[None], past_key_values=cache)
        for index, layer in enumerate(cache.layers):
            for role, each in (("k", layer.keys), ("v", layer.values)):
                name = f"model.layers.{index}.self_attn.{role}_scale"
                found.setdefault(name, []).append(each)
    return {name: torch.cat(each) for name, each in found.items()}


def find_largest_product(x: np.ndarray, scale: float) -> float:
    """Give the largest product of a code and the scale of its block, as TRT-LLM's kernel has it."""
    largest = 0.0
    for block in x.reshape(-1, 16):
        wanted = np.clip(np.abs(block).max() / np.float32(6 * scale), 0, 448)
        of_block = np.float32(wanted.astype(ml_dtypes.float8_e4m3fn))
        codes = (block / (of_block * np.float32(scale) or 1.0)).astype(ml_dtypes.float4_e2m1fn)
        largest = max(largest, float(np.abs(codes.astype(np.float32)).max() * of_block))
    return largest


def test_scales_are_the_amax_by_448_and_no_product_overflows(
    exported: Path, model: PreTrainedModel
) -> None:
    scales = read_scales(exported)
    tensors = find_keys_and_values(model)
    assert scales.keys() == tensors.keys()
    for name, x in tensors.items():
        assert scales[name] == pytest.approx(float(x.abs().max()) / 448, rel=1e-6)
        products = {
            factor: find_largest_product(x.numpy(), scales[name] * factor) for factor in (1, 1 / 6)
        }
        assert products[1] <= 448 * (1 + 2**-4)  # E4M3 rounds the scale of a block by so much
        assert products[1 / 6] > 448 * 5


def test_engines_without_such_a_cache_are_named(exported: Path, tmp_path: Path) -> None:
    folder = declare(exported, tmp_path / "declared")
    report = fp8calib.check(folder, engine=["vllm", "vllm==0.32", "sglang"])
    assert report.ok
    for key, words in {"vllm": "used as they are", "sglang": "multiplied by 6 on sm_100"}.items():
        assert any(words in each for each in report.engines[key].problems)
    for key in ("vllm-cpu", "transformers"):
        engine = fp8calib.check(folder, engine=key).engines[key]
        assert not engine.ok
        assert all("this engine has no such KV cache" in each.k.why for each in engine.layers)


def score_by_hand(model: PreTrainedModel, factors: Mapping[str, float]) -> float:
    """Give the mean divergence with global scales, by a cache that stores each vector alone."""

    def store(x: torch.Tensor, *, scale: float) -> torch.Tensor:
        rows = [nvfp4(row.numpy(), scale) for row in x.reshape(-1, x.shape[-1])]
        return torch.from_numpy(np.stack(rows)).reshape(x.shape)

    names = [f"model.layers.{i}.self_attn" for i in range(model.config.num_hidden_layers)]
    changes = {
        index: tuple(partial(store, scale=factors[f"{name}.{role}_scale"]) for role in "kv")
        for index, name in enumerate(names)
    }
    klds = []
    for ids in TEXT:
        with torch.no_grad():
            plain = model(ids[None]).logits.double().log_softmax(-1)
            cache: Any = HandCache(text_config(model), changes)
            changed = model(ids[None], past_key_values=cache).logits.double().log_softmax(-1)
        klds.append((plain.exp() * (plain - changed)).sum(-1)[0, :-1])
    return float(torch.cat(klds).mean())


@pytest.mark.parametrize(("engine", "factor"), [("reference", 1), ("vllm", 1), ("sglang", FACTOR)])
def test_the_table_shows_what_they_gain(
    exported: Path, model: PreTrainedModel, engine: str, factor: float
) -> None:
    asked = {"seq_len": 64, "engine": engine, "kv_cache_dtype": ["nvfp4"]}
    found = {row.name: row.kld_mean for row in kv_types(model, exported, TEXT, **asked).types}
    scales = {name: scale * factor for name, scale in read_scales(exported).items()}
    with_scales = found[f"nvfp4 with {exported}"]
    assert with_scales == pytest.approx(score_by_hand(model, scales), rel=1e-3)
    unscaled = score_by_hand(model, dict.fromkeys(scales, 1.0))
    assert found["nvfp4"] == pytest.approx(unscaled, rel=1e-3)
    assert with_scales < found["nvfp4"] / 2
