"""MXFP8 in vLLM for CPUs, with its emulation kernel, which its build looks for on GPUs alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

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
from tests.real_engines.vllm_job import VllmServer, load_in_vllm, load_or_refuse

SEQUENCES = [[(3 * i + j * j) % 60 + 3 for j in range(24)] for i in range(4)]


def save_decoded(quantized: Path, out: Path, source: Path = FOLDER / "llama") -> Path:
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


@pytest.mark.parametrize("form", ["compressed-tensors", "modelopt"])
def test_log_probabilities_are_those_of_the_decoded_model(
    form: str, vllm: VllmServer, tmp_path: Path
) -> None:
    """The kernel leaves inputs in 16 bits, which `check` says of GPUs before Blackwell."""
    quantized = run(FOLDER / "llama", tmp_path / "mxfp8", "mxfp8", form).out
    decoded = save_decoded(quantized, tmp_path / "decoded")
    found, expected, original = score(vllm, quantized, decoded, FOLDER / "llama")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert float((expected - original).abs().max()) > 1e-3


def score(vllm: VllmServer, *folders: Path) -> list[torch.Tensor]:
    """Give the log-probabilities of each checkpoint."""
    answers = [vllm(path, kv_cache_dtype="auto", logprobs=SEQUENCES) for path in folders]
    assert not any(answer.error for answer in answers)
    return [torch.tensor(answer.logprobs) for answer in answers]


@pytest.mark.parametrize("form", ["compressed-tensors", "modelopt"])
def test_the_output_layer_too(form: str, vllm: VllmServer, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 96, "tie_word_embeddings": False}
    zoo.save("llama", tmp_path / "model", dtype=torch.bfloat16, **sizes)
    whole = run(tmp_path / "model", tmp_path / "mxfp8", "mxfp8", form).out
    quantized = quantize_head(whole)
    decoded = save_decoded(quantized, tmp_path / "decoded", tmp_path / "model")
    assert run_program("check", quantized, "--engine", "vllm==0.32").code == 0
    found, expected = score(vllm, quantized, decoded)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", ["compressed-tensors", "modelopt"])
def test_experts_give_the_log_probabilities_of_the_decoded_model(
    form: str, vllm: VllmServer, tmp_path: Path
) -> None:
    """VLLM's emulation decodes them; the product is the CPU's, in place of Triton's."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    zoo.save("mixtral", tmp_path / "model", dtype=torch.bfloat16, **sizes)
    quantized = run(tmp_path / "model", tmp_path / "mxfp8", "mxfp8", form).out
    decoded = save_decoded(quantized, tmp_path / "decoded", tmp_path / "model")
    found, expected, original = score(vllm, quantized, decoded, tmp_path / "model")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert float((expected - original).abs().max()) > 1e-3


@pytest.mark.parametrize("form", ["compressed-tensors", "modelopt"])
def test_experts_are_loaded(form: str, tmp_path: Path) -> None:
    """Byte by byte, in the stacks that the kernels take."""
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    zoo.save("mixtral", tmp_path / "model", dtype=torch.bfloat16, **sizes)
    quantized = run(tmp_path / "model", tmp_path / "mxfp8", "mxfp8", form).out
    held = load_in_vllm({form: quantized})[form]
    stored = load_file(quantized / "model.safetensors")
    for leaf in ("weight", "weight_scale"):
        names = [f"{LAYER}.block_sparse_moe.experts.{i}.{{}}.{leaf}" for i in range(4)]
        gate_up = [torch.cat([stored[n.format("w1")], stored[n.format("w3")]]) for n in names]
        down = [stored[name.format("w2")] for name in names]
        for part, expected in (("w13", gate_up), ("w2", down)):
            (name,) = (
                n
                for n in held
                if n.startswith(f"loaded.{LAYER}.") and f"{part}_{leaf}" == n.rpartition(".")[2]
            )
            assert torch.equal(
                held[name].view(torch.uint8), torch.stack(expected).view(torch.uint8)
            )


STACKED = {
    "_scale": "",
    "_weight_scale": "no parameter 'w2_weight_weight_scale'",  # as ModelOpt 0.47 names Llama 4's
    "_scale_inv": "no parameter 'w2_weight_scale_inv'",
}
"""What follows the name of a tensor of all experts in that of its exponents -> vLLM's error."""
EXPERTS = "model.layers.0.mlp.experts"


def stack_experts(source: Path, out: Path, ending: str) -> Path:
    """Store the experts of every layer in two tensors, and their exponents in two."""
    shutil.copytree(source, out)
    tensors = load_file(out / "model.safetensors")
    parts: dict[str, list[torch.Tensor]] = {}
    for name in [each for each in tensors if ".experts." in each]:
        path, number, projection, leaf = name.rsplit(".", 3)
        if projection == "up_proj":
            continue
        tensor = tensors.pop(name)
        if projection == "gate_proj":
            up = tensors.pop(f"{path}.{number}.up_proj.{leaf}")
            tensor, projection = torch.cat([tensor, up]), "gate_up_proj"
        parts.setdefault(f"{path}.{projection}{'' if leaf == 'weight' else ending}", []).append(
            tensor
        )
    stacks = {name: torch.stack(each) for name, each in parts.items()}
    save_file(tensors | stacks, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.parametrize("form", ["compressed-tensors", "modelopt"])
def test_only_vllm_can_tell_of_experts_in_one_tensor(form: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 96}
    zoo.save("qwen3_moe", tmp_path / "model", dtype=torch.bfloat16, **sizes)
    whole = run(tmp_path / "model", tmp_path / "mxfp8", "mxfp8", form).out
    folders = {each: stack_experts(whole, tmp_path / f"stacked{each}", each) for each in STACKED}
    for ending, found in load_or_refuse(folders).items():
        assert "where one tensor holds many experts" in " ".join(
            ask(folders[ending], "vllm==0.32").unknown
        )
        if STACKED[ending]:
            assert isinstance(found, str)
            assert STACKED[ending] in found
            continue
        assert not isinstance(found, str)
        stored = load_file(folders[ending] / "model.safetensors")
        for projection, part in (("gate_up_proj", "w13"), ("down_proj", "w2")):
            for leaf, end in (("weight", ""), ("weight_scale", ending)):
                held = found[f"loaded.{EXPERTS}.routed_experts.{part}_{leaf}"]
                expected = stored[f"{EXPERTS}.{projection}{end}"]
                assert torch.equal(held.view(torch.uint8), expected.view(torch.uint8))


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
