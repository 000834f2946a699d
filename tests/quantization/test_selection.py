"""What is taken for a linear, from names and shapes alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.errors import ModelError, UsageError
from fp8calib.quantization.select import Selection, find_selection
from fp8calib.quantization.sources.decoded import check_unquantized
from tests.quantization.by_hand import LAYER, Tensors, make_tensors, random, save

MATRIX = random(32, 48, seed=0)


def pick(folder: Path, tensors: Tensors, *ignore: str, **config: object) -> Selection:
    save(folder, tensors, **config)
    with Checkpoint.open(folder) as checkpoint:
        return find_selection(checkpoint, ignore=ignore).require()


def taken(selection: Selection) -> set[str]:
    return {matrix.module for matrix in selection.quantized}


def reasons(selection: Selection) -> dict[str, str]:
    return {item.module: item.why for item in selection.unquantized}


TAKEN = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.0.self_attn.kv_a_proj_with_mqa",
    "model.layers.0.mlp.gate_proj",
    "model.layers.0.mlp.experts.3.up_proj",
    "model.layers.0.block_sparse_moe.experts.0.w1",
    "model.layers.0.mlp.shared_expert.gate_proj",
    "model.layers.0.mlp.gate_up_proj",
    "model.layers.0.linear_attn.in_proj_qkvz",
    "model.layers.0.attention.output.dense",
    "transformer.h.0.mlp.dense_h_to_4h",
    "transformer.blocks.0.norm_attn_norm.attn.Wqkv",
    "backbone.layers.0.mixer.in_proj",
    "language_model.model.layers.0.mlp.down_proj",
    "model.language_model.layers.0.mlp.down_proj",
    "decoder.project_in",
)
LEFT = {
    "lm_head": "an output head",
    "embed_out": "an output head",
    "transformer.output_layer": "an output head",
    "output": "an output head",
    "model.layers.61.shared_head.head": "an output head",
    "model.embed_tokens": "an embedding",
    "model.embed_tokens_per_layer": "an embedding",
    "transformer.wte": "an embedding",
    "transformer.word_embeddings": "an embedding",
    "backbone.embeddings": "an embedding",
    "classification_head.dense": "an output head",
    "pooler.dense": "an output head",
    "model.layers.0.mlp.gate": "a router",
    "model.layers.0.block_sparse_moe.gate": "a router",
    "model.layers.0.feed_forward.router": "a router",
    "transformer.blocks.0.ffn.router.layer": "a router",
    "model.layers.0.mlp.shared_expert_gate": "a router",
    "model.layers.0.altup.modality_router": "a router",
    "model.layers.0.input_layernorm.proj": "a norm",
    "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj": "a vision or audio tower",
    "model.visual.blocks.0.attn.qkv": "a vision or audio tower",
    "visual.merger.mlp.0": "a vision or audio tower",
    "model.audio_tower.conformer.0.ffw": "a vision or audio tower",
    "sound_encoder.encoder.layers.0.fc1": "a vision or audio tower",
    "thinker.audio_tower.layers.0.fc1": "a vision or audio tower",
    "multi_modal_projector.linear_1": "a projector between modalities",
    "model.mm_projector.0": "a projector between modalities",
    "model.connector.modality_projection.proj": "a projector between modalities",
    "mlp1.1": "a projector between modalities",
    "language_projection": "a projector between modalities",
    "qformer.encoder.layer.0.attention.attention.query": "a projector between modalities",
    "patch_merger.merging_layer": "a projector between modalities",
    "model.perceiver_resampler.layers.0.mlp": "a projector between modalities",
    "custom_text_proj": "a projector between modalities",
    "model.layers.61.eh_proj": "a linear that engines keep unquantized",
    "model.layers.0.self_attn.indexer.wk": "a linear that engines keep unquantized",
    "mtp.fc": "a drafter (multi-token prediction), as other tools leave it",
    "mtp.layers.0.mlp.up_proj": "a drafter (multi-token prediction), as other tools leave it",
    **dict.fromkeys(
        (f"model.layers.0.linear_attn.in_proj_{name}" for name in ("a", "b", "ba")),
        "a projection to the gates of linear attention, as ModelOpt leaves it",
    ),
}


def test_linears_are_taken_and_the_rest_is_left_with_its_reason(tmp_path: Path) -> None:
    modules = [*TAKEN, *LEFT]
    found = pick(tmp_path, {f"{module}.weight": MATRIX.clone() for module in modules})
    assert taken(found) == set(TAKEN)
    assert reasons(found) == LEFT


def test_an_encoder_beside_a_language_model_is_a_tower(tmp_path: Path) -> None:
    """Granite Speech calls its audio tower so; vLLM makes a part of it without quantization."""
    modules = ("encoder.layers.0.attn.to_q", "language_model.model.layers.0.mlp.up_proj")
    found = pick(tmp_path, {f"{module}.weight": MATRIX.clone() for module in modules})
    assert reasons(found) == {modules[0]: "a vision or audio tower"}
    alone = pick(tmp_path, {f"{modules[0]}.weight": MATRIX.clone()})
    assert taken(alone) == {modules[0]}


def test_outside_the_layers_a_row_per_word_is_no_linear(tmp_path: Path) -> None:
    tensors = {
        "decoder.proj_out.weight": random(160, 8, seed=1),
        "model.layers.0.fc1.weight": random(160, 8, seed=2),
    }
    found = pick(tmp_path, tensors, vocab_size=None, text_config={"vocab_size": 160})
    assert taken(found) == {"model.layers.0.fc1"}
    assert reasons(found)["decoder.proj_out"].startswith("an embedding or an output head")


def test_only_float_matrices_count(tmp_path: Path) -> None:
    tensors = {
        f"{LAYER}.fc.weight": MATRIX,
        f"{LAYER}.fc.bias": MATRIX[0].clone(),
        f"{LAYER}.mask.weight": torch.zeros(4, 4, dtype=torch.int32),
        f"{LAYER}.mixer.conv1d.weight": torch.zeros(48, 1, 4),
        f"{LAYER}.mixer.A": torch.zeros(32, 32),
    }
    found = pick(tmp_path, tensors)
    assert taken(found) == {f"{LAYER}.fc"}
    assert reasons(found) == {
        f"{LAYER}.mask": "stored in I32",
        f"{LAYER}.mixer.conv1d": "not a 2-D *.weight",
        f"{LAYER}.mixer.A": "not a 2-D *.weight",
    }


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (f"{LAYER}.mlp.down_proj", {"mlp.down_proj"}),
        (f"{LAYER}.mlp.down_proj.weight", {"mlp.down_proj"}),
        (f"{LAYER}.mlp", {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}),
        ("*.o_proj", {"self_attn.o_proj"}),
        ("*.self_attn.[qk]_proj", {"self_attn.q_proj", "self_attn.k_proj"}),
        (r"re:.*\.(gate|up)_proj", {"mlp.gate_proj", "mlp.up_proj"}),
        (r"re:.*down_proj\.weight", {"mlp.down_proj"}),
        (r"re:model\.layers\.\d+\.mlp", {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}),
    ],
)
def test_patterns_leave_modules_and_all_that_is_in_them(
    tmp_path: Path, pattern: str, expected: set[str]
) -> None:
    everything = taken(pick(tmp_path / "all", make_tensors()))
    found = pick(tmp_path / "some", make_tensors(), pattern)
    gone = {name.removeprefix(f"{LAYER}.") for name in everything - taken(found)}
    assert gone == expected
    assert {reasons(found)[f"{LAYER}.{name}"] for name in expected} == {f"--ignore {pattern}"}


@pytest.mark.parametrize(
    "pattern", ["mlp", "model.layers.1", "*.w1", "re:.*gate", "re:layers", "", "down_proj"]
)
def test_a_pattern_that_names_nothing_is_an_error(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(UsageError, match="matches no module"):
        pick(tmp_path, make_tensors(), pattern)


def test_what_is_left_anyway_may_be_named(tmp_path: Path) -> None:
    """Scripts name lm_head for every model, tied or not."""
    tensors = make_tensors()
    assert reasons(pick(tmp_path / "a", tensors, "lm_head"))["lm_head"] == "--ignore lm_head"
    del tensors["lm_head.weight"]
    pick(tmp_path / "b", tensors, "lm_head", tie_word_embeddings=True)
    with pytest.raises(UsageError):
        pick(tmp_path / "c", tensors, "lm_head", tie_word_embeddings=False)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{LAYER}.mlp.experts.gate_up_proj", (4, 64, 32)),
        (f"{LAYER}.mlp.experts.down_proj", (2, 8, 4)),
        (f"{LAYER}.block_sparse_moe.input_linear.weight", (4, 64, 32)),
        ("transformer.blocks.0.ffn.experts.mlp.w1", (256, 32)),
    ],
)
def test_stacked_experts_are_refused_by_name(
    tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    tensors = {name: torch.zeros(shape), f"{LAYER}.fc.weight": MATRIX}
    with pytest.raises(ModelError) as raised:
        pick(tmp_path / "a", tensors)
    assert name in raised.value.message
    assert taken(pick(tmp_path / "b", tensors, name)) == {f"{LAYER}.fc"}


@pytest.mark.parametrize("model_type", ["gpt2", "imagegpt", "openai-gpt"])
def test_families_of_transposed_weights_are_refused_by_name(
    tmp_path: Path, model_type: str
) -> None:
    tensors = {"h.0.attn.c_attn.weight": MATRIX}
    for config in ({"model_type": model_type}, {"decoder": {"model_type": model_type}}):
        with pytest.raises(ModelError) as raised:
            pick(tmp_path, tensors, **config)
        assert model_type in raised.value.message
        assert "h.0.attn.c_attn.weight" in raised.value.message


@pytest.mark.parametrize(
    ("tensors", "config", "named"),
    [
        ({}, {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({}, {"text_config": {"quantization_config": {"quant_method": "awq"}}}, "awq"),
        ({f"{LAYER}.b.weight": MATRIX.to(torch.float8_e4m3fn)}, {}, "F8_E4M3"),
        ({f"{LAYER}.self_attn.k_scale": torch.ones(1)}, {}, f"{LAYER}.self_attn.k_scale"),
        ({f"{LAYER}.fc.weight_scale_inv": torch.ones(1, 1)}, {}, "weight_scale_inv"),
    ],
)
def test_what_is_quantized_already_is_refused_by_name(
    tmp_path: Path, tensors: Tensors, config: dict[str, object], named: str
) -> None:
    save(tmp_path, {f"{LAYER}.fc.weight": MATRIX, **tensors}, **config)
    with Checkpoint.open(tmp_path) as checkpoint, pytest.raises(ModelError) as raised:
        check_unquantized(checkpoint)
    assert "already quantized" in raised.value.message
    assert named in raised.value.message


def test_mixers_of_the_first_mamba_are_left_as_engines_leave_them(tmp_path: Path) -> None:
    """Those of the second have no x_proj, and are quantized."""
    tensors = {
        f"model.layers.{layer}.mamba.{name}.weight": random(16, 16, seed=0)
        for layer, names in enumerate((("x_proj", "dt_proj", "in_proj", "out_proj"), ("in_proj",)))
        for name in names
    }
    save(tmp_path, tensors, num_hidden_layers=2)
    with Checkpoint.open(tmp_path) as checkpoint:
        found = find_selection(checkpoint).require()
    assert [matrix.module for matrix in found.quantized] == ["model.layers.1.mamba.in_proj"]
    assert {item.module for item in found.unquantized} == {
        f"model.layers.0.mamba.{name}" for name in ("x_proj", "dt_proj", "in_proj", "out_proj")
    }
    assert all("Mamba" in item.why for item in found.unquantized)
