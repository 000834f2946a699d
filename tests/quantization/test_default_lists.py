"""What other tools leave unquantized by default, pattern by pattern, and what we do with it.

Read from nvidia-modelopt 0.47.0, auto-round 0.16.1, llmcompressor 0.14.0.1 and compressed-tensors
0.20.0; the FP8 examples of llm-compressor, whose own default is empty, at commit ab1ba3ef.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.quantization.select import find_selection
from tests.quantization.by_hand import random, save

MODELOPT = "ModelOpt modelopt_recipes/configs/ptq/units/default_disabled_quantizers.yaml"
MAMBA_MOE = "ModelOpt modelopt_recipes/configs/ptq/units/mamba_moe_disabled_quantizers.yaml"
MODEL_FREE = "AutoRound auto_round/utils/model_free_utils.py"
COMMON = "AutoRound auto_round/utils/common.py"
SPECIAL = "AutoRound auto_round/special_model_handler.py"
MISSING = "AutoRound auto_round/utils/missing_tensors.py"
MTP = "compressed-tensors compressed_tensors/utils/mtp.py"
MATCH = "compressed-tensors compressed_tensors/utils/match.py"
EXAMPLES = "llm-compressor examples/quantization_w8a8_fp8, examples/model_free_ptq"
LAYER = "model.layers.0"


@dataclass(frozen=True)
class Pattern:
    """A pattern of another tool's list, and modules that it matches."""

    source: str
    pattern: str
    left: tuple[str, ...] = ()
    """Modules that we leave, too."""
    quantized: tuple[str, ...] = ()
    """Modules that we quantize."""
    why: str = ""
    """Why we quantize them."""


TABLE = (
    Pattern(MODELOPT, "*block_sparse_moe.gate*", (f"{LAYER}.block_sparse_moe.gate",)),
    Pattern(MODELOPT, "*linear_attn.in_proj_a*", (f"{LAYER}.linear_attn.in_proj_a",)),
    Pattern(
        MODELOPT,
        "*linear_attn.in_proj_b*",
        (f"{LAYER}.linear_attn.in_proj_b", f"{LAYER}.linear_attn.in_proj_ba"),
    ),
    Pattern(MODELOPT, "*lm_head*", ("lm_head", "language_model.lm_head")),
    Pattern(MODELOPT, "*mlp.gate.*", (f"{LAYER}.mlp.gate",)),
    Pattern(MODELOPT, "*mlp.shared_expert_gate.*", (f"{LAYER}.mlp.shared_expert_gate",)),
    Pattern(MODELOPT, "*output_layer*", ("transformer.output_layer",)),
    Pattern(
        MODELOPT,
        "*proj_out.*",
        ("proj_out",),
        (f"{LAYER}.ff.proj_out",),
        "Whisper's is its head, which has a row per word; in layers it is a plain projection",
    ),
    Pattern(
        MODELOPT,
        "*router*",
        (f"{LAYER}.feed_forward.router", f"{LAYER}.altup.modality_router", f"{LAYER}.router.proj"),
    ),
    Pattern(MODELOPT, "mtp.*", ("mtp.fc", "mtp.layers.0.self_attn.q_proj")),
    Pattern(
        MODELOPT,
        "output.*",
        ("output",),
        (f"{LAYER}.attention.output.dense",),
        "in layers it is the output projection of attention",
    ),
    Pattern(MODELOPT, "*embed_vision*", ("model.embed_vision.embedding_projection",)),
    Pattern(MODELOPT, "*vision_tower*", ("model.vision_tower.blocks.0.mlp.fc1",)),
    Pattern(MODELOPT, "*visual*", ("model.visual.blocks.0.attn.qkv",)),
    Pattern(MODELOPT, "*vision_model*", ("vision_model.patch_embedding.linear",)),
    Pattern(MODELOPT, "*multi_modal_projector*", ("multi_modal_projector.linear_1",)),
    Pattern(
        MAMBA_MOE,
        "*fc1_latent_proj*, *fc2_latent_proj*",
        ("backbone.layers.1.mixer.fc1_latent_proj", "backbone.layers.1.mixer.fc2_latent_proj"),
    ),
    Pattern(
        MAMBA_MOE,
        "*q_proj*, *k_proj*, *v_proj*, *o_proj*",
        quantized=("backbone.layers.2.mixer.q_proj", "backbone.layers.2.mixer.o_proj"),
        why="only ModelOpt's presets for Mamba with experts leave attention, not its FP8 default",
    ),
    Pattern(MODEL_FREE, "shared_expert_gate.", ("model.layers.3.mlp.shared_expert_gate",)),
    Pattern(MODEL_FREE, ".gate.", ("model.layers.3.mlp.gate",)),
    Pattern(MODEL_FREE, "embed", ("model.embed_tokens", "model.altup_unembed_projections.0")),
    Pattern(
        MODEL_FREE,
        "conv",
        quantized=(f"{LAYER}.conv.in_proj",),
        why="LFM2's are linears around a convolution; vLLM 0.32.0 quantizes them "
        "(layers/mamba/short_conv.py)",
    ),
    Pattern(MODEL_FREE, "lm_head, head, embed_out", ("head", "embed_out", "shared_head.head")),
    Pattern(COMMON, "vision, visual, image, img", ("model.image_newline", "img_processor.fc")),
    Pattern(COMMON, "audio, speech", ("model.audio_model.fc", "speech_encoder.fc")),
    Pattern(COMMON, "wav, waveform", ("wav_encoder.fc", "waveform.fc")),
    Pattern(
        COMMON,
        "thinker",
        quantized=("thinker.model.layers.0.mlp.up_proj",),
        why="it is the text model",
    ),
    Pattern(
        COMMON,
        "talker, token2wav, code2wav, code_predictor, vqmodel",
        (
            "talker.model.layers.0.mlp.up_proj",
            "token2wav.dit.fc",
            "code2wav.fc",
            "talker.code_predictor.fc",
            "vqmodel.encoder.fc",
        ),
    ),
    Pattern(COMMON, "vision_language_adapter", ("vision_language_adapter.w_in",)),
    Pattern(COMMON, "patch_merger", ("patch_merger.merging_layer",)),
    Pattern(COMMON, "model.connector", ("model.connector.modality_projection.proj",)),
    Pattern(SPECIAL, "Longcat: classifier", (f"{LAYER}.mlp.router.classifier",)),
    Pattern(
        SPECIAL,
        "Glm4MoeLite, glm_moe_dsa, glm5_next: layers.0.mlp",
        quantized=(f"{LAYER}.mlp.down_proj",),
        why="vLLM loads dense FP8 MLPs; the file names a vLLM issue of its INT4 form",
    ),
    Pattern(
        SPECIAL,
        "glm_moe_dsa, glm5_next: weights_proj, indexer",
        (f"{LAYER}.self_attn.indexer.weights_proj", f"{LAYER}.self_attn.indexer.wk"),
        (f"{LAYER}.self_attn.indexer.wq_b",),
        "the file's reason is tuning; vLLM 0.32.0 quantizes wq_b alone (models/deepseek_v2.py)",
    ),
    Pattern(
        SPECIAL,
        "glm5_next: self_attn",
        quantized=(f"{LAYER}.self_attn.o_proj",),
        why="the file gives no reason; the FP8 defaults of the other tools quantize attention",
    ),
    Pattern(
        SPECIAL,
        "step3p5: g_proj",
        quantized=(f"{LAYER}.self_attn.g_proj",),
        why="96 rows do not fit INT4's groups of 64; FP8 scales a row, and vLLM 0.32.0 takes it "
        "(models/step3p5.py)",
    ),
    Pattern(SPECIAL, "step3p5: moe.gate", (f"{LAYER}.moe.gate",)),
    Pattern(
        SPECIAL,
        "step3p5: eh_proj, shared_head, layers.45",
        (
            *("model.layers.45.eh_proj", "model.layers.45.shared_head.output"),
            "model.layers.45.mlp.up_proj",
        ),
    ),
    Pattern(SPECIAL, "kimi_k25: vision_tower, mm_projector", ("mm_projector.proj.0",)),
    Pattern(SPECIAL, "Qwen4: hyper_connection", (f"{LAYER}.hyper_connection.fc",)),
    Pattern(
        SPECIAL,
        "Qwen4: shared_expert",
        quantized=(f"{LAYER}.mlp.shared_expert.up_proj",),
        why="the file gives no reason; it is a plain MLP, which the other tools quantize",
    ),
    Pattern(SPECIAL, "bagel: moe_gen", (f"{LAYER}.mlp_moe_gen.up_proj",)),
    Pattern(MISSING, "mtp.fc.", ("mtp.fc.0",)),
    Pattern(MTP, "mtp", ("mtp.layers.0.mlp.down_proj",)),
    Pattern(MATCH, "names that end in norm", (f"{LAYER}.self_attn.q_norm",)),
    Pattern(EXAMPLES, "Nemotron: re:.*_latent_proj.*", ("model.fc1_latent_proj",)),
    Pattern(EXAMPLES, "Nemotron: re:.*mixer.gate\\..*", ("backbone.layers.1.mixer.gate",)),
    Pattern(EXAMPLES, "Nemotron: backbone\\.embeddings", ("backbone.embeddings",)),
    Pattern(EXAMPLES, "Nemotron: re:mtp.layers.*", ("mtp.layers.1.mixer.up_proj",)),
    Pattern(
        EXAMPLES,
        "Qwen3-Next: re:.*linear_attn.*",
        (f"{LAYER}.linear_attn.in_proj_ba",),
        (f"{LAYER}.linear_attn.in_proj_qkvz", f"{LAYER}.linear_attn.out_proj"),
        "docs/quantize.md says what leaving them costs; ModelOpt's default quantizes them",
    ),
    Pattern(
        EXAMPLES,
        "Kimi K2: re:.*kv_a_proj_with_mqa$, re:.*q_a_proj$",
        quantized=(f"{LAYER}.self_attn.q_a_proj", f"{LAYER}.self_attn.kv_a_proj_with_mqa"),
        why="DeepSeek's own FP8 checkpoints hold them in FP8, and engines load them",
    ),
    Pattern(
        EXAMPLES,
        "Llama 4: re:.*self_attn",
        quantized=(f"{LAYER}.self_attn.k_proj",),
        why="a choice of one example; the FP8 defaults quantize attention",
    ),
    Pattern(EXAMPLES, "Granite 4: re:.*block_sparse_moe.router", (f"{LAYER}.moe.router.layer",)),
    Pattern(EXAMPLES, "Gemma 4: re:.*vision_embedder.*", ("model.vision_embedder.fc",)),
)


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    modules = {module for row in TABLE for module in (*row.left, *row.quantized)}
    weight = random(32, 48, seed=0)
    tensors = {f"{module}.weight": weight.clone() for module in sorted(modules)}
    tensors["proj_out.weight"] = random(160, 48, seed=1)  # a row per word
    tensors |= {
        f"{LAYER}.{module}.weight": torch.zeros(48, 1, 4)
        for module in ("linear_attn.conv1d", "self_attention.conv1d", "mixer.conv1d")
    }
    folder = save(tmp_path_factory.mktemp("lists") / "m", tensors, num_hidden_layers=45)
    with Checkpoint.open(folder) as checkpoint:
        return {matrix.module for matrix in find_selection(checkpoint).require().quantized}


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.pattern)
def test_every_pattern_of_other_tools_is_left_or_has_a_reason(
    row: Pattern, taken: set[str]
) -> None:
    assert taken.isdisjoint(row.left)
    assert taken.issuperset(row.quantized)
    assert bool(row.quantized) == bool(row.why)
    assert row.left or row.quantized


def test_convolutions_of_linear_attention_are_left(taken: set[str]) -> None:
    """ModelOpt's `*linear_attn.conv1d*`, `*self_attention.conv1d*` and `*mixer.conv1d*`."""
    assert not [module for module in taken if "conv1d" in module]


def test_the_table_is_the_list_of_what_is_quantized(taken: set[str]) -> None:
    assert taken == {module for row in TABLE for module in row.quantized}
