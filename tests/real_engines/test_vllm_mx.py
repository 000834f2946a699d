"""MXFP8 in vLLM for CPUs, with its emulation kernel, which its build looks for on GPUs alone."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8calib.formats.fp8.checkpoint import Fp8Checkpoint
from tests import zoo
from tests.cli.program import run as run_program
from tests.engines.test_check_mx import DAMAGED, change
from tests.engines.test_check_weights import ask
from tests.formats.foreign import FOLDER
from tests.quantization.by_hand import LAYER, quantize_head, run
from tests.real_engines.vllm_job import VllmServer, load_or_refuse

SEQUENCES = [[(3 * i + j * j) % 60 + 3 for j in range(24)] for i in range(4)]


def save_decoded(quantized: Path, out: Path, source: Path) -> Path:
    """Write the model that the codes and exponents stand for; bfloat16 holds it exactly."""
    shutil.copytree(source, out)
    tensors = load_file(out / "model.safetensors")
    with Fp8Checkpoint.open(quantized, fuse=False) as found:
        for name in found.quantized:
            exact = found.read(name)
            tensors[name] = exact.bfloat16()
            assert torch.equal(tensors[name].float(), exact)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


SIZES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "linears": ("llama", {}),
    "output layer": ("llama", {"tie_word_embeddings": False}),
    "experts": ("mixtral", {"hidden_size": 64, "head_dim": 32}),
}


@pytest.mark.parametrize("form", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("what", SIZES)
def test_log_probabilities_are_those_of_the_decoded_model(
    what: str, form: str, vllm: VllmServer, tmp_path: Path
) -> None:
    """The kernel leaves inputs in 16 bits, which `check` says of GPUs before Blackwell.

    vLLM's emulation decodes experts; the product is the CPU's, in place of Triton's.
    """
    family, changes = SIZES[what]
    model, sizes = tmp_path / "model", {"hidden_size": 128, "intermediate_size": 96, **changes}
    zoo.save(family, model, dtype=torch.bfloat16, **sizes)
    quantized = run(model, tmp_path / "mxfp8", "mxfp8", form).out
    if what == "output layer":
        quantized = quantize_head(quantized)
        assert run_program("check", quantized, "--engine", "vllm==0.32").code == 0
    decoded = save_decoded(quantized, tmp_path / "decoded", model)
    found, expected, original = score(vllm, quantized, decoded, model)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert float((expected - original).abs().max()) > 1e-3


def score(vllm: VllmServer, *folders: Path) -> list[torch.Tensor]:
    """Give the log-probabilities of each checkpoint."""
    answers = [vllm(path, kv_cache_dtype="auto", logprobs=SEQUENCES) for path in folders]
    assert not any(answer.error for answer in answers)
    return [torch.tensor(answer.logprobs) for answer in answers]


@pytest.mark.parametrize("form", ["compressed-tensors", "modelopt"])
def test_damaged_exponents_are_never_ok(form: str, tmp_path: Path) -> None:
    """Those that vLLM loads are other bytes, or memory that nothing has set: here 255."""
    whole = run(FOLDER / "llama", tmp_path / "whole", "mxfp8", form).out
    folders = {name: change(whole, tmp_path / name, each[0]) for name, each in DAMAGED.items()}
    loaded = {}
    for name, found in load_or_refuse(folders).items():
        assert not ask(folders[name], "vllm==0.32").ok
        if not isinstance(found, str):
            loaded[name] = found[f"loaded.{LAYER}.mlp.down_proj.weight_scale"].unique().tolist()
    assert loaded == {
        "missing": [255],
        "NaN": [255],
        "float": [120],
        "e8m0": [0],  # 2^-7 as an integer
        "blocks of 16": [120],  # the first half of them
    }


def test_models_other_than_those_it_names_are_refused_in_the_dialect_of_releases(
    vllm: VllmServer, tmp_path: Path
) -> None:
    quantized = run(FOLDER / "llama", tmp_path / "mxfp8", "mxfp8", "mxfp8").out
    answer = vllm(quantized, kv_cache_dtype="auto")
    assert "weight_scale_inv" in answer.error
    report = run_program("check", quantized, "--engine", "vllm==0.32", "--json")
    found = json.loads(report.out)["engines"]["vllm==0.32"]
    assert found["weights"]["status"] == "refused"
    assert "weight_scale_inv" in found["weights"]["why"]
