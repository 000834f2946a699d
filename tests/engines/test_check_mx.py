"""What `check` says of MXFP8, whole and damaged, in its three dialects."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fp8calib.engines.status import Status
from tests import zoo
from tests.engines.test_check_weights import ask
from tests.formats.foreign import FOLDER
from tests.kit.checkpoints import change_config, change_json, change_tensors
from tests.kit.minutes import takes_minutes
from tests.quantization.by_hand import LAYER, run

FORMS = ("compressed-tensors", "modelopt", "mxfp8")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("mx")
    return {form: run(FOLDER / "llama", folder / form, "mxfp8", form).out for form in FORMS}


@pytest.mark.parametrize(
    ("engine", "form", "why"),
    [
        *(("vllm==0.26", form, "") for form in ("compressed-tensors", "modelopt")),
        # in another class than llama's it finds the scales
        *(("sglang", form, "") for form in ("modelopt", "mxfp8")),
        ("sglang==0.5.18", "modelopt", ""),
        ("sglang==0.5.17", "modelopt", "takes it for FP8 with a scale per tensor"),
        ("sglang==0.5.16", "mxfp8", ""),
        ("sglang==0.5.16", "compressed-tensors", "NotImplementedError"),
    ],
)
def test_releases(engine: str, form: str, why: str, tmp_path: Path) -> None:
    """SGLang 0.5.17 found FP8 in the name of the algorithm."""
    zoo.save("qwen2", tmp_path / "model", hidden_size=64, intermediate_size=96)
    report = ask(run(tmp_path / "model", tmp_path / "out", "mxfp8", form).out, engine)
    assert not report.unknown
    narrow = "scales the largest input of a block to less than 2"
    assert (narrow in " ".join(report.problems)) is (engine == "vllm==0.26")
    if not why:
        assert report.weights is None
        return
    assert report.weights is not None
    assert report.weights.status is Status.REFUSED
    assert why in report.weights.why
    newer = {"sglang==0.5.17": "serve it with SGLang 0.5.18"}
    assert newer.get(engine, "write it as mxfp8") in report.weights.fix


@pytest.mark.parametrize(
    "name", ["llmcompressor-mxfp8", "llmcompressor-mxfp8-a16", "modelopt-mxfp8"]
)
def test_foreign_files_load_in_vllm(name: str) -> None:
    report = ask(FOLDER / name, "vllm")
    assert (report.weights, report.unknown) == (None, ())
    notes = " ".join(report.problems)
    assert ("although the config leaves them in 16 bits" in notes) is name.endswith("a16")
    assert ("on other GPUs inputs stay in 16 bits" in notes) is not name.endswith("a16")


def change(source: Path, out: Path, scale: torch.Tensor | None, dtype: str = "bfloat16") -> Path:
    """Copy a checkpoint with another scale of one linear."""
    tensors = load_file(source / "model.safetensors")
    name = next(each for each in tensors if each.startswith(f"{LAYER}.mlp.down_proj.weight_s"))
    change_config(Path(shutil.copytree(source, out)), dtype=dtype)
    return change_tensors(out, {name: scale})


def test_vllm_loads_mxfp8_by_the_names_that_its_linears_have(
    written: dict[str, Path], tmp_path: Path
) -> None:
    """VLLM 0.32 stops at weight_scale_inv, and loads weight_scale (run)."""
    out = Path(shutil.copytree(written["mxfp8"], tmp_path / "out"))
    assert "rename weight_scale_inv" in ask(out, "vllm").load_fault

    change_tensors(out, lambda held: {name.removesuffix("_inv"): t for name, t in held.items()})
    change_config(out, dtype="bfloat16")
    assert ask(out, "vllm").ok


BYTES = torch.full((32, 5), 120, dtype=torch.uint8)
DAMAGED = {
    "missing": (None, Status.MISREAD, "is missing: the engine uses uninitialised memory"),
    "NaN": (torch.full_like(BYTES, 255), Status.BAD, "holds NaN"),
    "transposed": (BYTES.T.contiguous(), Status.UNKNOWN, r"has shape [5, 32]"),
    "float": (BYTES.float(), Status.UNKNOWN, "is F32, and the config means U8"),
    "e8m0": (
        BYTES.view(torch.float8_e8m0fnu),
        Status.UNKNOWN,
        "is F8_E8M0, and the config means U8",
    ),
    "blocks of 16": (BYTES.repeat(1, 2), Status.UNKNOWN, r"has shape [32, 10]"),
    "swizzled": (BYTES.new_full((128, 8), 120), Status.UNKNOWN, r"has shape [128, 8]"),
    "swizzled flat": (BYTES.new_full((1024,), 120), Status.UNKNOWN, r"has shape [1024]"),
}


POWERS = (BYTES.float() - 127).exp2()


@pytest.mark.parametrize(
    ("form", "scale", "fault"),
    [
        ("mxfp8", BYTES.bfloat16(), "is BF16: transformers takes its values for scales"),
        ("mxfp8", BYTES.to(torch.int8), "is I8: transformers takes its values for scales"),
        ("mxfp8", BYTES.view(torch.float8_e8m0fnu), ""),
        ("mxfp8", POWERS, ""),
        ("compressed-tensors", BYTES.bfloat16(), ""),
        ("compressed-tensors", POWERS, "is F32: transformers takes its values for exponents"),
        (
            "compressed-tensors",
            BYTES.view(torch.float8_e8m0fnu),
            "is F8_E8M0: transformers takes its values for exponents",
        ),
        pytest.param(
            *("mxfp8", BYTES.new_full((32, 5), 64).int(), "is I32: transformers takes its"),
            marks=takes_minutes,
        ),
    ],
)
def test_transformers_reads_exponents_as_bytes_or_their_powers(
    form: str, scale: torch.Tensor, fault: str, written: dict[str, Path], tmp_path: Path
) -> None:
    """Transformers itself holds the meant weight exactly where `check` finds no fault."""
    name = f"{LAYER}.mlp.down_proj.weight"
    damaged = change(written[form], tmp_path / "out", scale)
    found = ask(damaged, "transformers").weights
    assert (found is None) is not bool(fault)
    assert found is None or fault in found.why
    codes = load_file(damaged / "model.safetensors")[name].float()
    meant = (codes * POWERS.repeat_interleave(32, 1)).bfloat16()
    model = AutoModelForCausalLM.from_pretrained(damaged, dtype=torch.bfloat16)
    model(torch.tensor([[1]]))  # which decompresses compressed-tensors' weights
    assert torch.equal(model.state_dict()[name], meant) is not bool(fault)


def test_tied_head_that_the_config_quantizes_is_unknown(tmp_path: Path) -> None:
    """With starcoder2 its input_scale stays what vLLM 0.32 makes scales with."""
    zoo.save("starcoder2", tmp_path / "m", tie_word_embeddings=True, hidden_size=128)
    folder = run(tmp_path / "m", tmp_path / "out", "fp8-dynamic", "modelopt").out
    assert ask(folder, "vllm").unknown == ()

    def quantize_all(config: dict[str, Any]) -> None:
        config["quantization_config"]["ignore"] = []

    change_config(folder, quantize_all)
    for each in folder.glob("hf_quant_config.json"):
        change_json(each, lambda config: config["quantization"].update(exclude_modules=[]))
    doubts = ask(folder, "vllm").unknown
    assert any("the output layer, which is tied" in doubt for doubt in doubts)


@pytest.mark.parametrize("blocks", [1, 2, 10])
def test_transformers_spreads_exponents_of_other_blocks(
    blocks: int, written: dict[str, Path], tmp_path: Path
) -> None:
    scale = torch.arange(110, 110 + blocks, dtype=torch.uint8).repeat(32, 1)
    out = change(written["mxfp8"], tmp_path / "out", scale)
    report = ask(out, "transformers")
    said = "" if report.weights is None else report.weights.why
    # blocks of 16 are parts of those that the format has
    assert said == "" if blocks == 10 else f"spreads {blocks} scales evenly over 160" in said
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    name = f"{LAYER}.mlp.down_proj.weight"
    codes = load_file(out / "model.safetensors")[name].float()
    spread = (scale.float() - 127).exp2().repeat_interleave(160 // blocks, 1)
    assert torch.equal(model.state_dict()[name].float(), (codes * spread).bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_multiplies_decoded_weights_by_inputs_in_bfloat16_alone(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """BioGPT does not run on the meta device, so its linears do."""
    model = zoo.build("biogpt", hidden_size=64, intermediate_size=96).to(dtype)
    model.save_pretrained(tmp_path / "model")
    out = run(tmp_path / "model", tmp_path / "out", "mxfp8-a16").out
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    report = ask(out, "transformers")
    if dtype is torch.bfloat16:
        assert loaded(torch.tensor([[3, 4, 5]])).logits.isfinite().all()
        assert report.weights is None
        return
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        loaded(torch.tensor([[3, 4, 5]]))
    assert report.weights is not None
    assert "addmm of torch.bfloat16 and torch.float32" in report.weights.why
