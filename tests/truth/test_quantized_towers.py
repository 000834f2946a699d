"""FP8 towers in checkpoints of other tools: `verify` leaves them out, `check` reads them."""

import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForMultimodalLM

import fp8calib
from fp8calib.quantization import ignored
from tests.cli.program import run, succeed
from tests.doors import as_bytes, opened
from tests.kit.minutes import HAS_MINUTES, in_minutes
from tests.kit.multimodal import build_multimodal, encode, messages, parametrize, save_multimodal
from tests.truth import by_modality
from tests.truth.test_media import plan_of
from tests.verification.test_media import rows, streamed

_KINDS = ["gemma3", "qwen2_audio", *(["idefics3", "qwen2_vl"] if HAS_MINUTES else [])]
_OPTIONS = {"pack": False, "dtype": "float32", "seq_len": 512}


@pytest.fixture(autouse=True)
def _without_notes() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fp8calib.Fp8CalibWarning)
        yield


def quantize(name: str, scheme: str, folder: Path) -> Path:
    """Write a model, and a checkpoint of it whose towers are in FP8, as other tools may."""
    save_multimodal(name, folder / "model")
    out = folder / scheme
    parts = [each for each in ignored._PARTS if each[0] not in ignored._TREES]
    with patch.object(ignored, "_PARTS", parts):
        succeed("quantize", folder / "model", "--scheme", scheme, "--out", out)
    return out


def decode(checkpoint: Path, model: Path, out: Path) -> Path:
    """Write the model with the checkpoint's weights of the text decoder, decoded."""
    shutil.copytree(model, out)
    plain = load_file(model / "model.safetensors")
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        held = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    for key in plain:
        if held[key].dtype is torch.float8_e4m3fn and is_of_text(key):
            plain[key] = held[key].float() * held[f"{key}_scale"].float()
    save_file(plain, out / "model.safetensors", {"format": "pt"})
    return out


def is_of_text(key: str) -> bool:
    return not any(word in key for word in ("vis", "audio", "projector", "connector", "merger"))


def quantize_inputs(model: nn.Module, reference: nn.Module) -> None:
    """Quantize the inputs of all linears with changed weights, one scale for each row."""

    def see(_module: nn.Module, args: Any) -> Any:
        scale = args[0].abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
        codes = (args[0] / scale).to(torch.float8_e4m3fn)
        return (codes.float() * scale, *args[1:])

    plain = dict(reference.named_modules())
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and not torch.equal(module.weight, plain[path].weight):  # type: ignore[union-attr]
            module.register_forward_pre_hook(see)


def measure(name: str, model: Path, decoded: Path, *, has_inputs: bool) -> float:
    """Give the mean KL divergence of the tokens of text, by transformers alone."""
    _, processor = build_multimodal(name)
    reference, other = (
        AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (model, decoded)
    )
    if has_inputs:
        quantize_inputs(other, reference)
    found = []
    for row in messages(name):
        inputs = encode(processor, row)
        with torch.no_grad():
            p, q = (m(**inputs).logits[0].double().log_softmax(-1) for m in (reference, other))
        kinds = by_modality.run(model, row).modality
        kld = (p.exp() * (p - q)).sum(-1)
        found += [float(kld[at - 1]) for at in range(1, len(kinds)) if kinds[at] == "text"]
    return sum(found) / len(found)


@parametrize(_KINDS)
@pytest.mark.parametrize("scheme", ["fp8-dynamic", *in_minutes("w8a16")])
def test_towers_stay_those_of_the_model(name: str, scheme: str, tmp_path: Path) -> None:
    checkpoint, model = quantize(name, scheme, tmp_path), tmp_path / "model"
    report = fp8calib.verify(model, [checkpoint], rows(name, 1), **_OPTIONS)
    found = next(each for each in report.candidates if each.name == str(checkpoint))
    decoded = decode(checkpoint, model, tmp_path / "decoded")
    kld = measure(name, model, decoded, has_inputs=scheme == "fp8-dynamic")
    assert found.kld_mean == pytest.approx(kld, rel=2e-3)
    told = "not compared, as it is outside the text decoder"
    assert any(told in warning for warning in report.warnings)


@parametrize(_KINDS)
def test_streamed_figures_are_the_same(name: str, tmp_path: Path) -> None:
    checkpoint = quantize(name, "fp8-dynamic", tmp_path)
    found = []
    for streams in (False, True):
        with streamed(streams):
            report = fp8calib.verify(tmp_path / "model", [checkpoint], rows(name, 1), **_OPTIONS)
            found.append((report.candidates, report.layers))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["vision_tower", "multi_modal_projector"])
def test_a_wrong_scale_of_a_tower_is_found(name: str, tmp_path: Path) -> None:
    """By the other layers: there are no statistics of towers."""
    checkpoint = quantize("llava", "w8a16", tmp_path)
    stats = ("--stats", save_stats_of("llava", tmp_path))
    tensors = load_file(checkpoint / "model.safetensors")
    scale = next(key for key in sorted(tensors) if name in key and key.endswith(".weight_scale"))
    tensors[scale] *= 1e5
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    outcome = run("check", checkpoint, "--engine", "vllm", *stats, "--json")
    assert outcome.code == 8, outcome.out
    assert scale in outcome.out


def save_stats_of(name: str, folder: Path) -> Path:
    with opened(folder / "model") as subject:
        as_bytes(subject.calibrate(plan=plan_of(name, folder / "model")), folder)
    return folder / "as_bytes.safetensors"
