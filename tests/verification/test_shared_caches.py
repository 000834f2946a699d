"""Layers and drafters that read a KV cache which others write."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.gemma3n import modeling_gemma3n

import fp8calib
from fp8calib.engines.arithmetic import Numerics
from fp8calib.errors import UsageError
from fp8calib.formats.read import read_scales
from fp8calib.verification.candidates import build_kv_candidate
from tests import zoo
from tests.architectures.families import FAMILIES, build
from tests.kit.checkpoints import change_json, change_tensors
from tests.verification.by_hand import (
    BATCHES,
    HandCache,
    cast,
    emulate,
    opened,
    plain_forward,
    text_config,
)

TEXT = [torch.arange(3, 67) + shift for shift in (0, 30)]
PRODUCERS = {2: 0, 3: 1}
"""Of the tiny Gemma 3n: which layer's cache the last two read."""
OWN = Numerics(name="own", kv_shared_own_scale=True)


def write_overlay(model: Any, out: Path) -> Path:
    """Calibrate a model, and write an overlay with scales of all layers."""
    model.save_pretrained(out / "model")
    fp8calib.calibrate(
        out / "model", TEXT, seq_len=64, dtype="float32", out=out / "out", formats=["kv-overlay"]
    )
    return out / "out" / "kv-overlay"


@pytest.fixture(scope="module")
def overlay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write an overlay of Gemma 3n."""
    return write_overlay(zoo.build("gemma3n_text"), tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="module")
def bare(overlay: Path) -> Path:
    """Take the scales of the shared layers out of it."""
    folder = Path(shutil.copytree(overlay, overlay.parent / "bare"))
    (path,) = (p for p in folder.glob("*.safetensors") if any("k_scale" in n for n in load_file(p)))
    gone = {name: None for name in load_file(path) if find_layer(name) in PRODUCERS}
    assert len(gone) == 4
    change_tensors(folder, gone, path.name)
    change_json(
        folder / "model.safetensors.index.json",
        lambda index: [index["weight_map"].pop(name) for name in gone],
    )
    return folder


def test_some_of_the_layers_that_share_a_cache_cannot_stay_in_16_bits(overlay: Path) -> None:
    model = overlay.parents[1] / "model"
    with pytest.raises(UsageError, match=r"^layer 2: of the same KV cache"):
        fp8calib.verify(model, overlay, TEXT, kv_cache_dtype_skip_layers=[0])
    with pytest.raises(UsageError, match=r"^layer 1: of the same KV cache"):
        fp8calib.verify(model, overlay, TEXT, kv_cache_dtype_skip_layers=[3])
    asked = {"seq_len": 64, "dtype": "float32"}
    left = fp8calib.verify(model, overlay, TEXT, kv_cache_dtype_skip_layers=[0, 2], **asked)
    (first, *_) = left.candidates
    sites = {row.layer for row in left.layers if row.candidate == first.name}
    assert sites == {1, 3}


def find_layer(name: str) -> int:
    return int(name.split(".layers.")[1].split(".", maxsplit=1)[0]) if ".layers." in name else -1


@pytest.mark.parametrize("engine", ["vllm", "vllm==0.28", "sglang"])
def test_a_layer_without_scales_of_its_own_misreads_the_cache(
    overlay: Path, bare: Path, engine: str
) -> None:
    assert fp8calib.check(overlay, engine=engine).ok
    layers = fp8calib.check(bare, engine=engine).engines[engine].layers
    assert [layer.ok for layer in layers] == [True, True, False, False]
    tensors = {
        name: x for path in bare.glob("*.safetensors") for name, x in load_file(path).items()
    }
    for layer in layers[2:]:
        producer = PRODUCERS[layer.layer]
        for role, verdict in (("k", layer.k), ("v", layer.v)):
            (name,) = (n for n in tensors if f".{producer}." in n and n.endswith(f"{role}_scale"))
            assert verdict.status == "misread"
            written = f"layer {producer} writes with {float(tensors[name]):.4g}"
            assert verdict.why == f"it reads with 1 the cache that {written}"


Attention = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def test_hidden_states_are_those_of_a_layer_that_multiplies_by_one(
    bare: Path, tmp_path: Path
) -> None:
    """Codes are divided by the scale of the layer that writes, and multiplied by nothing."""
    model = zoo.build("gemma3n_text")
    model.set_attn_implementation("eager")
    with opened(model, tmp_path) as subject:
        table = read_scales(bare, subject.geometry)
        candidate = build_kv_candidate("bare", table, OWN, origin="by hand")
        (note,) = candidate.notes
        assert "layers 2, 3 read the cache of other layers" in note
        found = emulate(subject, candidate, *BATCHES)
        plain = build_kv_candidate("bare", table, Numerics(name="plain"), origin="by hand")
        assert not plain.reads
        as_written = emulate(subject, plain, *BATCHES)

        attentions = [attention for _, attention in subject.geometry.attentions()]
        scales = [
            tuple(float(table.scales[attention.site(role)].values) for role in "kv")
            for attention in attentions
        ]
        original: Attention = modeling_gemma3n.eager_attention_forward

        def attend(
            module: Any, query: Any, key: Any, value: Any, *more: Any, **options: Any
        ) -> Any:
            if (producer := PRODUCERS.get(module.layer_idx)) is not None:
                key, value = key / scales[producer][0], value / scales[producer][1]
            return original(module, query, key, value, *more, **options)

        changes = {
            index: tuple(partial(cast, scale=scale) for scale in scales[index]) for index in (0, 1)
        }
        with patch.object(modeling_gemma3n, "eager_attention_forward", attend):
            for batch, hidden, other in zip(BATCHES, found, as_written, strict=True):
                cache = HandCache(text_config(model), changes)
                wanted = plain_forward(model, batch, cache)
                for row, length in enumerate(batch.lengths):
                    assert torch.allclose(hidden[row, :length], wanted[row, :length], atol=1e-4)
                    assert (other - wanted)[row, :length].abs().max() > 0.01


def test_a_drafter_that_reads_with_one_is_named(tmp_path: Path) -> None:
    overlay = write_overlay(build("gemma4_text", FAMILIES["gemma4_text"]), tmp_path)
    fewer = "fewer tokens are accepted"
    ends = {"vllm": "only Model Runner V2 gives it the scales", "vllm==0.30": fewer}
    for engine, end in {**ends, "sglang": fewer}.items():
        report = fp8calib.check(overlay, engine=engine).engines[engine]
        (problem,) = (each for each in report.problems if "drafter" in each)
        assert problem.startswith("a Gemma 4 drafter (MTP) reads this cache with 1.0")
        assert problem.endswith(end)
