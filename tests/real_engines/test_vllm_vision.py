"""vLLM takes our file of scales for a vision tower, under our names, and we read what it saves."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from fp8calib.dialects.vision import (
    VisionScales,
    compute_vision_scales,
    read_vision_scales,
    write_vision_scales,
)
from fp8calib.engines.facts.release import VLLM_RELEASES, VLLM_RUN, Release
from fp8calib.engines.vllm.vision import name_vision_layers
from fp8calib.errors import ModelError
from fp8calib.stats.calibration_origin import CalibrationOrigin
from tests.architectures.test_vision_language import MODELS
from tests.real_engines.package import open_release
from tests.real_engines.vllm_job import ENVIRONMENT, PYTHON, TIMEOUT_S
from tests.real_engines.vllm_sources import take_vision_loader

WORKER = Path(__file__).with_name("vllm_vision.py")
FAMILIES = {"qwen2_5_vl": "qwen2_vl", "qwen3_vl": "qwen3_vl"}
"""Families with a tower in FP8, and the sizes in `MODELS` that they have."""
MARGIN = 1.5
"""`mm_encoder_fp8_scale_save_margin`."""


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny model with a vision tower."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    text, vision, *_ = MODELS[FAMILIES[request.param]]
    config = AutoConfig.for_model(
        request.param, text_config=text, vision_config=vision | {"depth": 2}
    )
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def name_layers(model: Path) -> list[str]:
    with safe_open(model / "model.safetensors", "pt") as file:
        found = [name.partition(".qkv.")[0] for name in file.keys() if ".qkv.weight" in name]  # noqa: SIM118
    (architecture,) = json.loads((model / "config.json").read_text())["architectures"]
    return sorted(name_vision_layers(found, architecture, VLLM_RUN).values())


def ask(model: Path, folder: Path, documents: Mapping[str, Any], tensors: Any) -> dict[str, Any]:
    """Let vLLM load the model with each file, and once without one."""
    files = {name: folder / f"{name}.json" for name in documents}
    for name, document in documents.items():
        files[name].write_text(json.dumps(document))
    save_file(tensors, folder / "tensors.safetensors")
    job = {"model": str(model), "files": [*map(str, files.values())]}
    job |= {"tensors": str(folder / "tensors.safetensors"), "saved": str(folder / "saved.json")}
    (folder / "job.json").write_text(json.dumps(job))
    command = [PYTHON, WORKER, folder / "job.json", folder / "result.json"]
    done = subprocess.run(
        command, env=os.environ | ENVIRONMENT, capture_output=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((folder / "result.json").read_text())
    return {name: found[str(path)] for name, path in files.items()} | {"saved": found["saved"]}


def test_every_layer_holds_our_scales_and_we_read_those_of_vllm(
    model: Path, tmp_path: Path
) -> None:
    names = name_layers(model)
    amaxes = {name: (3.0 + i, 0.7 + i, 11.0 + i) for i, name in enumerate(names)}
    scales = compute_vision_scales(amaxes)
    origin = CalibrationOrigin.of_model("a" * 64)
    write_vision_scales(tmp_path / "ours.json", VisionScales(layers=scales, origin=origin))
    ours = json.loads((tmp_path / "ours.json").read_text())
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{name}.{role}": torch.randn(1, 4, 2, 16, generator=generator)
        for name in names
        for role in "qkv"
    }
    tensors[f"{names[0]}.q"][0, 0, 0, 0] = -20.0
    lacking = {name: ours[name] for name in names[1:]}

    answers = ask(model, tmp_path, {"ours": ours, "lacking": lacking}, tensors)

    held = {name: vars_of(scale) for name, scale in scales.items()}
    assert len(names) == 2
    assert answers["ours"] == held
    assert f"scales not found for layer '{names[0]}'" in answers["lacking"]
    with pytest.raises(ModelError, match=f"no scales for {names[0]}"):
        read_vision_scales(tmp_path / "lacking.json", layers=names)
    saved = read_vision_scales(tmp_path / "saved.json", layers=names).layers
    for name in names:
        for role in "qkv":
            largest = tensors[f"{name}.{role}"].max().item()  # its magnitude may be larger
            assert getattr(saved[name], role) == pytest.approx(largest / 448 * MARGIN, rel=1e-6)


def vars_of(scale: Any) -> dict[str, float]:
    return {role: getattr(scale, role) for role in "qkv"}


@pytest.mark.parametrize("release", VLLM_RELEASES, ids=lambda each: each.version)
def test_every_release_reads_the_file(release: Release, tmp_path: Path) -> None:
    scales = compute_vision_scales({"visual.blocks.0.attn.attn": (3.0, 0.7, 11.0)})
    path = tmp_path / "vision.json"
    origin = CalibrationOrigin.of_model("a" * 64)
    write_vision_scales(path, VisionScales(layers=scales, origin=origin))

    read = take_vision_loader(open_release(release))(path.read_text())

    assert read == {name: vars_of(scale) for name, scale in scales.items()}
