"""What is no linear of a decoder layer: its weights count, and what is not emulated is told."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.model.load import build_skeleton, open_source
from fp8calib.numerics.schemes import SCHEMES
from tests import zoo
from tests.architectures import families, test_vision_language
from tests.cli.conftest import write_rows
from tests.cli.program import fail, succeed
from tests.kit.checkpoints import change_config, change_tensors
from tests.verification.by_hand import PLAIN, emulate_scheme, make_subject, opened

ROWS = [[(i * j) % 120 + 3 for j in range(1, 17)] for i in range(1, 7)]


def verify_w8a16(
    model: Path, quantized: Path, folder: Path
) -> tuple[list[str], Mapping[str, torch.Tensor]]:
    """Verify an FP8 checkpoint: the warnings, and every token's log-probability."""
    data = write_rows(folder / "rows.jsonl", [{"input_ids": row} for row in ROWS])
    outcome = succeed(
        *("verify", model, "--scales", quantized, "--engine", "reference", "--data", data),
        *("--seq-len", 16, "--dtype", "float32", "--dump", folder / "dump", "--force", "--json"),
    )
    return outcome.json["warnings"], load_file(folder / "dump")


def dequantize(folder: Path) -> dict[str, torch.Tensor]:
    """Multiply codes by scales, with nothing but safetensors and torch."""
    tensors = load_file(folder / "model.safetensors")
    return {
        name: value.float() * tensors[f"{name}_scale"].float()
        if value.dtype is torch.float8_e4m3fn
        else value
        for name, value in tensors.items()
        if not name.endswith("_scale")
    }


def test_weights_outside_the_layers_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """gemma3n mixes its streams by linears of the decoder itself, which tools quantize."""
    zoo.save("gemma3n_text", tmp_path / "m")
    succeed("quantize", tmp_path / "m", "--scheme", "w8a16", "--out", tmp_path / "q")
    warnings, found = verify_w8a16(tmp_path / "m", tmp_path / "q", tmp_path)
    assert [text for text in warnings if "altup" in text] == [
        f"{tmp_path / 'q'}: model.altup_projections.0.weight and 3 more: only the weights are "
        "quantized here, not the inputs: not a linear of a decoder layer"
    ]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32).eval()
    model.load_state_dict(dequantize(tmp_path / "q"), strict=False)
    with torch.no_grad():
        logprobs = model(torch.tensor(ROWS)).logits.log_softmax(-1)
    expected = logprobs[:, :-1].gather(2, torch.tensor(ROWS)[:, 1:, None]).flatten()
    assert torch.allclose(found[str(tmp_path / "q")], expected, atol=1e-5)
    assert float((found["reference"] - expected).abs().max()) > 1e-3


def add_fp8(folder: Path, name: str) -> None:
    """Quantize one more weight of a checkpoint, which its config says is left out."""

    def quantize(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        scale = tensors[name].float().abs().amax(1, keepdim=True) / 448
        codes = (tensors[name].float() / scale).to(torch.float8_e4m3fn)
        return {**tensors, name: codes, f"{name}_scale": scale}

    def widen(config: dict[str, Any]) -> None:
        section = config["quantization_config"]
        section["ignore"] = []
        for group in section["config_groups"].values():
            group["targets"] = ["Linear", "Embedding"]

    change_tensors(folder, quantize)
    change_config(folder, widen)


def lose(folder: Path, name: str) -> None:
    change_tensors(folder, {name: None})


def double_end(folder: Path, name: str) -> None:
    """Change the last value only."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[-1] *= 2

    change_tensors(folder, change)


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("damage", "name", "says"),
    [
        # engines would run with what memory held, also if no scheme quantizes the tensor
        (lose, NORM, f"there is no weight for {NORM}"),
        (lose, EMBEDDING, f"there is no weight for {EMBEDDING}"),
        (add_fp8, HEAD, f"{HEAD} is an embedding or the output head"),
        (add_fp8, EMBEDDING, f"{EMBEDDING} is an embedding or the output head"),
        # nothing would come of a changed head: every candidate is scored by the model's own
        (double_end, HEAD, f"its {HEAD} is not that of the model"),
        (double_end, EMBEDDING, f"its {EMBEDDING} is not that of the model"),
    ],
)
def test_a_checkpoint_with_another_embedding_or_head_or_without_a_tensor_is_refused(
    damage: Callable[[Path, str], None], name: str, says: str, tmp_path: Path
) -> None:
    zoo.save("llama", tmp_path / "m", tie_word_embeddings=False)
    succeed("quantize", tmp_path / "m", "--scheme", "w8a16", "--out", tmp_path / "q")
    damage(tmp_path / "q", name)
    data = write_rows(tmp_path / "rows.jsonl", [{"input_ids": ROWS[0]}])
    assert says in fail(4, "verify", tmp_path / "m", "--scales", tmp_path / "q", "--data", data)


def test_what_is_outside_the_text_decoder_is_left_out_and_told(tmp_path: Path) -> None:
    """A projector in FP8 does not keep the text decoder from being verified."""
    config = test_vision_language.make_config("llava")
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "m")
    succeed("quantize", tmp_path / "m", "--scheme", "w8a16", "--out", tmp_path / "q")
    _, before = verify_w8a16(tmp_path / "m", tmp_path / "q", tmp_path)
    add_fp8(tmp_path / "q", "multi_modal_projector.linear_1.weight")
    warnings, after = verify_w8a16(tmp_path / "m", tmp_path / "q", tmp_path)
    assert [text for text in warnings if "not compared" in text] == [
        f"{tmp_path / 'q'}: not compared, as it is outside the text decoder: "
        "model.multi_modal_projector.linear_1.weight"
    ]
    assert torch.equal(before[str(tmp_path / "q")], after[str(tmp_path / "q")])


WEIGHTS_ONLY = (
    "only the weights are quantized here, not the inputs: not a linear of a decoder layer"
)


@pytest.mark.parametrize(
    ("family", "missed"),
    [
        ("llama", []),
        ("phimoe", []),
        ("gemma4_text", ["model.per_layer_model_projection.weight"]),
        ("llama4_text", ["model.layers.0.feed_forward.experts.down_proj and 3 more"]),
    ],
)
def test_what_no_scheme_reaches_is_told_and_routers_are_left(
    family: str, missed: list[str], tmp_path: Path
) -> None:
    """Experts that are no linears, and linears of the decoder itself; routers nobody quantizes."""
    families.save(family, {**families.FAMILIES, "llama": {}}[family], tmp_path)
    source = open_source(str(tmp_path))
    with Checkpoint.open(tmp_path) as checkpoint:
        subject = make_subject(build_skeleton(source), checkpoint)
    blocks = emulate_scheme(subject, SCHEMES["fp8-block"], PLAIN)
    assert list(blocks.notes) == [f"{name}: {WEIGHTS_ONLY}" for name in missed]
    assert not emulate_scheme(subject, SCHEMES["w8a16"], PLAIN).notes


def test_what_quantize_refuses_is_told(tmp_path: Path) -> None:
    """Its scheme is emulated all the same: on-line quantization of an engine may do that."""
    with opened(zoo.build("dbrx"), tmp_path) as subject:
        planned = emulate_scheme(subject, SCHEMES["fp8-dynamic"], PLAIN)
    refused, missed = planned.notes
    assert refused.startswith(f"`quantize` does not write this model: {tmp_path}: ")
    assert "experts.mlp.v1 [192, 32] holds several matrices" in refused
    assert missed == (
        "not quantized here, though an engine may: transformer.blocks.0.ffn.experts.mlp and 1 more"
    )
