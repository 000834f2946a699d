"""Global scales of an NVFP4 cache: those of an overlay, who reads them, and what they gain."""

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import fp8calib
from fp8calib.plugins.kv_types import kv_types
from tests import zoo
from tests.kit.checkpoints import load_folder
from tests.plugins.kv_types.by_hand import nvfp4, store_all
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


def read_scales(folder: Path) -> dict[str, float]:
    tensors = load_folder(folder).items()
    return {name: float(x) for name, x in tensors if name.endswith(("k_scale", "v_scale"))}


def test_engines_without_such_a_cache_are_named(exported: Path, tmp_path: Path) -> None:
    """Release 0.2 declared in the file that the scales are for an NVFP4 cache."""
    folder = Path(shutil.copytree(exported, tmp_path / "declared"))
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            metadata = {**file.metadata(), "fp8calib.kv_cache_dtype": "nvfp4"}
        tensors = load_file(path)
        if any(name.endswith("k_scale") for name in tensors):
            path.unlink()
            save_file(tensors, path, metadata)
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
    names = [f"model.layers.{i}.self_attn" for i in range(model.config.num_hidden_layers)]
    stores = {name: partial(store_all, partial(nvfp4, scale=x)) for name, x in factors.items()}
    changes = {
        index: (stores[f"{name}.k_scale"], stores[f"{name}.v_scale"])
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
