"""Calibration on images inside vLLM against our own run of the same model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.idefics3 import modeling_idefics3

from fp8calib.calibration.calibration_stats import CalibrationStats, load_stats
from fp8calib.cli import main_inner
from fp8calib.model.shapes import Role
from tests.kit.multimodal import draw_image, save_multimodal
from tests.real_engines.exports import read_scales
from tests.real_engines.vllm_job import Calibrator, VllmServer

SERVED = ("idefics3", "llava", "llava_next", "lighton_ocr", "aya_vision", "aria")
"""Kinds that vLLM 0.32 for CPU runs; their processors need no torchvision."""
REFUSED = {
    "chameleon": "vLLM runs this model on text alone, and there are rows with image",
    "deepseek_vl": "vLLM cannot start with this model: AttributeError: 'DeepseekVLProcessor'",
}
WIDTH = {"hidden_size": 128, "head_dim": 32}
"""vLLM's CPU kernels want heads of a multiple of 32 elements."""
SEQ_LEN = 150
OPTIONS = ("--seq-len", SEQ_LEN, "--no-pack", "--dtype", "float32")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write rows with an image, text alone, two images of other sizes, and a text that is cut."""
    folder = tmp_path_factory.mktemp("rows")
    for seed, size in enumerate([(32, 32), (48, 24), (20, 64)]):
        draw_image(seed, size).save(folder / f"{seed}.png")

    def ask(*parts: int | str) -> str:
        content = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image", "image": f"{part}.png"}
            for part in parts
        ]
        return json.dumps({"messages": [{"role": "user", "content": content}]})

    lines = [
        ask(0, "What is this?"),
        ask("What do you know about llamas?"),
        ask(1, "Compare ", 2, "with it."),
        ask("Or about alpacas?"),
        ask(2, "long " * 40),
    ]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return folder / "rows.jsonl"


def save(name: str, folder: Path) -> Path:
    save_multimodal(name, folder, **WIDTH)
    # transformers 5 saves towers of CLIP and SigLIP by other names than published checkpoints have
    path = folder / "model.safetensors"
    renamed = {
        tensor.replace("vision_tower.", "vision_tower.vision_model.")
        if name in ("llava", "llava_next", "aya_vision")
        else tensor: value
        for tensor, value in load_file(path).items()
    }
    save_file(renamed, path, {"format": "pt"})
    return folder


def calibrate_here(model: Path, rows: Path, out: Path) -> CalibrationStats:
    arguments = ["calibrate", model, "--data", rows, "--out", out, *OPTIONS]
    assert main_inner(list(map(str, arguments))) == 0
    return load_stats(out)


@pytest.mark.parametrize("name", [*SERVED, *REFUSED])
def test_every_site_and_modality_is_what_transformers_computes(
    calibrate: Calibrator,
    rows: Path,
    tmp_path: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = save(name, tmp_path / "model")
    # vLLM's encoder of Aria attends to padding too (`apply_encoder_attention_mask`)
    if name == "aria":
        monkeypatch.setattr(modeling_idefics3, "create_bidirectional_mask", lambda **_: None)
    own = calibrate_here(model, rows, tmp_path / "own")

    code, printed = calibrate(
        model, tmp_path / "engine", "--data", rows, *OPTIONS, has_torchvision=name != "idefics3"
    )

    if name in REFUSED:
        assert code != 0
        assert REFUSED[name] in printed
        return
    assert code == 0, printed
    found = load_stats(tmp_path / "engine")
    assert found.header.data_fingerprint == own.header.data_fingerprint
    named = {skipped.site for skipped in found.header.skipped}
    missing = own.sites.keys() - found.sites.keys()
    assert all("experts" in site.module and str(site) in named for site in missing)
    for site in own.sites.keys() & found.sites.keys():
        if site.role is Role.WEIGHT:
            continue
        ours, theirs = own.sites[site], found.sites[site]
        assert theirs.count == ours.count, site
        torch.testing.assert_close(theirs.amax, ours.amax, rtol=1e-5, atol=1e-7, msg=str(site))


def test_vllm_holds_the_scales_of_the_overlay(
    calibrate: Calibrator, vllm: VllmServer, rows: Path, tmp_path: Path
) -> None:
    model = save("idefics3", tmp_path / "model")
    code, printed = calibrate(model, tmp_path / "engine", "--data", rows, *OPTIONS)
    assert code == 0, printed
    overlay = tmp_path / "engine" / "kv-overlay"

    # its processor wants a tokenizer
    answer = vllm(overlay, kv_cache_dtype="auto", skip_tokenizer_init=False)

    assert answer.error == ""
    assert len(answer.layers) == 2
    assert answer.scales() == read_scales(overlay)
    assert answer.cache_bytes() == {1}


@pytest.mark.parametrize(
    ("size", "refusal"),
    [
        (16, "of sample 0, and transformers' "),
        (96, "vLLM refuses a row of samples 0 to 0: "),
    ],
)
def test_other_tokens_of_the_engines_processor_are_an_error(
    calibrate: Calibrator, rows: Path, tmp_path: Path, size: int, refusal: str
) -> None:
    """The engine cuts the image into fewer tiles than we do, or into more than fit."""
    model = save("idefics3", tmp_path / "model")
    option = f"mm_processor_kwargs={{size: {{longest_edge: {size}}}}}"

    code, printed = calibrate(
        *(model, tmp_path / "engine", "--data", rows, "--samples", 1),
        *(*OPTIONS, "--engine-option", option),
    )

    assert code != 0
    assert refusal in printed


def test_a_missing_torchvision_is_named(calibrate: Calibrator, rows: Path, tmp_path: Path) -> None:
    model = save("llava", tmp_path / "model")

    code, printed = calibrate(model, tmp_path / "engine", "--data", rows, *OPTIONS)

    assert code != 0
    assert "vLLM cannot start with this model" in printed
    assert "torchvision, which most models that take media need in vLLM, is missing" in printed
