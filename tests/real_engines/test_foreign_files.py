"""What `check` says of files that tools really wrote is what vLLM does on a CPU."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from fp8calib.engines.check import check_folder
from fp8calib.engines.replay.folder import open_folder
from fp8calib.engines.status import Status
from fp8calib.model.geometry_from_config import read_geometry
from fp8calib.plugins import vllm
from tests.engines.test_check_weights import ask
from tests.formats.foreign import FOLDER, KV_SCALES
from tests.kit.multimodal import save_multimodal
from tests.real_engines.vllm_job import PYTHON, VllmServer

# FP8 weights do not run on a CPU: of these the KV cache alone is quantized.
CASES = {
    "llmcompressor-kv": Status.USED,
    "llmcompressor-kv-head": Status.USED,
    "llmcompressor-attention-head": Status.USED,
    "modelopt-kv": Status.REFUSED,
}


def _save(folder: Path, name: str) -> Path:
    """Write what a tool wrote, with the weights that were left out of it."""
    folder.mkdir(parents=True)
    weights = load_file(FOLDER / KV_SCALES[name][0] / "model.safetensors")
    tensors = weights | load_file(FOLDER / name / "model.safetensors")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for file in ("config.json", "hf_quant_config.json"):
        if (FOLDER / name / file).is_file():
            (folder / file).write_text((FOLDER / name / file).read_text())
    return folder


@pytest.mark.parametrize("name", CASES)
def test_vllm_holds_what_check_says_of_a_tools_file(
    tmp_path: Path, vllm: VllmServer, name: str
) -> None:
    folder = _save(tmp_path / "case" / "model", name)
    config = json.loads((folder / "config.json").read_text())
    geometry = read_geometry(folder, config)
    report = check_folder(open_folder(folder), geometry, ["vllm==0.32"], 1)["vllm==0.32"]
    assert {layer.k.status for layer in report.layers} == {CASES[name]}

    answer = vllm(folder, kv_cache_dtype="fp8", dtype="bfloat16")

    assert bool(answer.error) is (CASES[name] is Status.REFUSED), answer.error
    if not answer.error:
        held = {index: (max(k), max(v)) for index, (k, v) in answer.scales().items()}
        assert held == {layer.layer: (layer.k.value, layer.v.value) for layer in report.layers}


@pytest.mark.parametrize(
    ("name", "is_loaded"), [("paligemma", False), ("aya_vision", True), ("glmasr", True)]
)
def test_names_of_towers_that_vllm_does_not_know_are_not_called_fine(
    name: str, is_loaded: bool, tmp_path: Path
) -> None:
    """By transformers 5.23 they begin with `vision_tower.encoder`.

    Those of vLLM 0.32 begin with `vision_tower.vision_model`. The processor of aya_vision is made
    with a tokenizer, which vLLM's loader has to have then.
    """
    save_multimodal(name, tmp_path / "model")

    answer = vllm.check(tmp_path / "model", python=PYTHON)
    report = ask(tmp_path / "model", "vllm==0.32")

    assert answer.ok == is_loaded
    assert bool(report.unknown) != is_loaded
    assert ("has no place under this name" in str(report.unknown)) != is_loaded
