"""The kinds of `multimodal`: what the config and the processor of each model type need."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import transformers
from transformers import PreTrainedTokenizerFast, ProcessorMixin
from transformers.utils import is_torchvision_available

from tests.architectures.families import FAMILIES, ROUTED, SIZES, SLIDING
from tests.architectures.vision import (
    CLIP,
    INTERN,
    LLAMA4_VISION,
    PIXTRAL,
    QWEN_VISION,
    SIGLIP,
    THREE_AXES,
    VISION,
)

HAS_TORCHVISION = is_torchvision_available()


@dataclass(frozen=True)
class Kind:
    """One model type with its processor.

    `config` are the arguments of its config. `ids` are entries of the config, by their dotted path,
    that hold the id of a token, or several. `named` are the tokens that its tokenizer has as
    attributes, and `tokens` further special ones. `placeholders` are what the chat template writes
    for a medium.
    """

    config: dict[str, Any]
    processor: Callable[[PreTrainedTokenizerFast], ProcessorMixin]
    placeholders: dict[str, str]
    ids: dict[str, str | tuple[str, ...]]
    named: dict[str, str] = field(default_factory=dict)
    tokens: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    """Packages that its processor or its model cannot do without, but this project can."""
    needs_media: bool = False
    """Whether the processor refuses a row without media."""
    takes_several: bool = True
    """Whether a row can have several media of one modality."""
    starts: bool = True
    """Whether the chat template writes the token that starts a row."""


def _process(
    name: str, *, parts: dict[str, tuple[str, dict[str, Any]]], **settings: Any
) -> Callable[[PreTrainedTokenizerFast], ProcessorMixin]:
    """Make the processor `name` of these parts, each a class and its settings.

    With torchvision, transformers loads the class without `Pil`, whose pixels differ a little.
    """
    backend = "Pil" if HAS_TORCHVISION else ""

    def make(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
        built = {
            key: getattr(transformers, part.removesuffix(backend))(**own)
            for key, (part, own) in parts.items()
        }
        processor = getattr(transformers, name)(**built, tokenizer=tokenizer, **settings)
        processor.chat_template = tokenizer.chat_template
        return processor

    return make


def _see(
    name: str, image: str, size: dict[str, Any], video: str | None = None, **settings: Any
) -> Callable[[PreTrainedTokenizerFast], ProcessorMixin]:
    """Make a processor of text and images, with the part for video if it wants one."""
    parts = {"image_processor": (image, size)}
    if video is not None:
        own = {"draw_on_frames": False} if video.startswith("Ernie") else {}
        parts["video_processor"] = (video, {**_VIDEO, **size, **own})
    return _process(name, parts=parts, **settings)


_VIDEO = {"do_sample_frames": False}
_TEXT: dict[str, Any] = {**SIZES, "vocab_size": 320, "max_position_embeddings": 512}
_LLAMA = {**_TEXT, "model_type": "llama"}
_QWEN2 = {**_TEXT, "model_type": "qwen2"}
_LAYERS = {"num_hidden_layers": 2}
_SQUARE = {"height": 16, "width": 16}
_CROP = {"size": {"shortest_edge": 16}, "crop_size": _SQUARE}
_TILES = [[16, 16], [16, 32], [32, 16]]
_IMAGE = {"image_token": "<image>"}
_CLIPPED = {
    "patch_size": 8,
    "num_additional_image_tokens": 1,
    "vision_feature_select_strategy": "default",
}


def _make_llava(text: dict[str, Any], **changes: Any) -> Kind:
    return Kind(
        config={"text_config": text, "vision_config": {**CLIP, **_LAYERS}, **changes},
        ids={"image_token_index": "<image>"},
        named=_IMAGE,
        placeholders={"image": "<image>\n"},
        processor=_see("LlavaProcessor", "CLIPImageProcessorPil", _CROP, **_CLIPPED),
    )


_PATCHES = {"patch_size": 8, "merge_size": 2, "size": {"shortest_edge": 256, "longest_edge": 4096}}
_QWEN_TOKENS = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
_QWEN_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


def _make_qwen(
    processor: str,
    text: dict[str, Any],
    vision: dict[str, Any],
    video: str = "Qwen2VLVideoProcessor",
) -> Kind:
    return Kind(
        config={
            "text_config": {**_TEXT, **text},
            "vision_config": {**QWEN_VISION, **vision},
        },
        ids=_QWEN_IDS,
        named=_QWEN_TOKENS,
        tokens=("<|vision_start|>", "<|vision_end|>"),
        placeholders={
            "image": "<|vision_start|><|image_pad|><|vision_end|>",
        },
        starts=False,
        needs=("torchvision",),
        processor=_see(processor, "Qwen2VLImageProcessorPil", _PATCHES, video),
    )


_GLM_IDS = {
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}


def _make_glm(processor: str, part: str, text: dict[str, Any], **changes: Any) -> Kind:
    return Kind(
        config={
            "text_config": {**_TEXT, **THREE_AXES, **text},
            "vision_config": {**QWEN_VISION, "image_size": 32},
            **changes,
        },
        ids=_GLM_IDS,
        named={"image_token": "<|image|>", "video_token": "<|video|>"},
        tokens=tuple(_GLM_IDS.values())[2:],
        placeholders={
            "image": "<|begin_of_image|><|image|><|end_of_image|>",
        },
        needs=("torchvision",),
        processor=_see(processor, f"{part}ImageProcessorPil", _PATCHES, f"{part}VideoProcessor"),
    )


_IDEFICS_TOKENS = (
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)),
)
_DEEPSEEK = {
    "config": {
        "text_config": _LLAMA,
        "vision_config": SIGLIP,
    },
    "ids": {"image_token_id": "<image_placeholder>"},
    "named": {"image_token": "<image_placeholder>"},
    "placeholders": {"image": "<image_placeholder>"},
}
_OVIS = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
_CODES = tuple(f"IMGIMG{letter}Z" for letter in "ABCDEFGH")

_SAM = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "output_channels": 8,
    "image_size": 64,
    "patch_size": 8,
    "mlp_dim": 48,
    "global_attn_indexes": [0],
}
_WHISPER = ("WhisperFeatureExtractor", {"feature_size": 16, "chunk_length": 2})
_HEAR = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_mel_bins": 16,
}
_WHISPERED = {
    "d_model": 32,
    "encoder_ffn_dim": 48,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "num_mel_bins": 16,
    "max_source_positions": 100,
}
_OMNI = {
    "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>",
    "audio_token": "<|AUDIO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
_OMNI_IDS = {
    "image_token_index": "<|IMAGE|>",
    "video_token_index": "<|VIDEO|>",
    "audio_token_index": "<|AUDIO|>",
    "audio_start_token_id": "<|audio_bos|>",
    "audio_end_token_id": "<|audio_eos|>",
    "vision_start_token_id": "<|vision_bos|>",
    "vision_end_token_id": "<|vision_eos|>",
}
_OMNI_MEDIA = {
    "image": "<|vision_bos|><|IMAGE|><|vision_eos|>",
    "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
}
_OMNI_PARTS = {
    "image_processor": ("Qwen2VLImageProcessorPil", _PATCHES),
    "video_processor": ("Qwen2VLVideoProcessor", {**_VIDEO, **_PATCHES}),
    "feature_extractor": _WHISPER,
}
_GEMMA4_IDS = {
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
    "audio_token_id": "<|audio|>",
    "boi_token_id": "<|image>",
    "eoi_token_id": "<image|>",
    "boa_token_id": "<|audio>",
    "eoa_token_index": "<audio|>",
}
_GEMMA4 = {
    "image_token": "<|image|>",
    "audio_token": "<|audio|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}
_GEMMA4_MEDIA = {"image": "<|image|>", "audio": "<|audio|>"}

MULTIMODAL: dict[str, Kind] = {
    "llava": _make_llava(_LLAMA, vision_feature_layer=-1, image_seq_length=4),
    "vipllava": _make_llava(_LLAMA, vision_feature_layers=[-1, -2], image_seq_length=4),
    "llava_next": Kind(
        config={
            "text_config": {**_TEXT, "model_type": "mistral"},
            "vision_config": {**CLIP, **_LAYERS},
            "image_grid_pinpoints": _TILES,
        },
        ids={"image_token_index": "<image>"},
        named=_IMAGE,
        placeholders={"image": "<image>\n"},
        processor=_see(
            "LlavaNextProcessor",
            "LlavaNextImageProcessorPil",
            {**_CROP, "image_grid_pinpoints": _TILES},
            **_CLIPPED,
        ),
    ),
    "llava_onevision": Kind(
        config={
            "text_config": _QWEN2,
            "vision_config": {**SIGLIP, "vision_use_head": False},
            "image_grid_pinpoints": _TILES,
        },
        ids={"image_token_index": "<image>", "video_token_index": "<video>"},
        named={**_IMAGE, "video_token": "<video>"},
        placeholders={"image": "<image>"},
        needs=("torchvision",),
        processor=_see(
            "LlavaOnevisionProcessor",
            "LlavaOnevisionImageProcessorPil",
            {"size": _SQUARE, "image_grid_pinpoints": _TILES},
            "LlavaOnevisionVideoProcessor",
            num_image_tokens=4,
            vision_feature_select_strategy="full",
        ),
    ),
    "aria": Kind(
        config={
            "text_config": {**_TEXT, "moe_num_experts": 4, "moe_topk": 2},
            "vision_config": {
                **VISION,
                "model_type": "idefics3_vision",
                "hidden_size": 8,
                "num_attention_heads": 1,
                "image_size": 980,
                "patch_size": 98,
            },
            "projector_patch_to_query_dict": {100: 6},
        },
        ids={"image_token_index": "<image>"},
        named=_IMAGE,
        placeholders={"image": "<fim_prefix><image><fim_suffix>"},
        tokens=("<fim_prefix>", "<fim_suffix>"),
        processor=_see("AriaProcessor", "AriaImageProcessorPil", {}, size_conversion={980: 6}),
    ),
    "aya_vision": Kind(
        config={
            "text_config": {**_TEXT, "model_type": "cohere2", **SLIDING},
            "vision_config": {**SIGLIP, "vision_use_head": False, "image_size": 32},
        },
        ids={"image_token_index": "<|IMG_PATCH|>"},
        tokens=(
            "<image>",
            "<|START_OF_IMG|>",
            "<|END_OF_IMG|>",
            "<|IMG_PATCH|>",
            "<|IMG_LINE_BREAK|>",
            "TILE",
            "TILE_GLOBAL",
        ),
        placeholders={"image": "<image>"},
        processor=_see(
            "AyaVisionProcessor",
            "GotOcr2ImageProcessorPil",
            {"size": {"height": 32, "width": 32}, "crop_to_patches": True, "max_patches": 2},
            patch_size=8,
            img_size=32,
            downsample_factor=2,
        ),
    ),
    "cohere2_vision": Kind(
        config={
            "text_config": {**_TEXT, "model_type": "cohere2", **SLIDING},
            "vision_config": {**SIGLIP, "vision_use_head": False, "image_size": 32},
            "alignment_intermediate_size": 64,
        },
        ids={"image_token_id": "<|IMG_PATCH|>"},
        named={
            "image_token": "<|IMG_PATCH|>",
            "boi_token": "<|START_OF_IMG|>",
            "eoi_token": "<|END_OF_IMG|>",
            "img_line_break_token": "<|IMG_LINE_BREAK|>",
        },
        placeholders={"image": "<|IMG_PATCH|>"},
        needs=("torchvision",),
        processor=_see(
            "Cohere2VisionProcessor",
            "Cohere2VisionImageProcessor",
            {"size": {"height": 32, "width": 32}, "max_patches": 2, "patch_size": 2},
        ),
    ),
    "chameleon": Kind(
        config={
            **_TEXT,
            "vq_config": {
                "embed_dim": 8,
                "num_embeddings": len(_CODES),
                "latent_channels": 8,
                "resolution": 16,
                "base_channels": 32,
                "channel_multiplier": [1, 1, 1, 1],
                "num_res_blocks": 1,
            },
        },
        ids={
            "vocabulary_map.<image>": "<image>",
            **{f"vocabulary_map.{code}": code for code in _CODES},
        },
        named={**_IMAGE, "sep_token": "<reserved08706>"},
        tokens=("<racm3:break>", "<eoss>", *_CODES),
        placeholders={"image": "<image>"},
        processor=_see(
            "ChameleonProcessor", "ChameleonImageProcessorPil", _CROP, image_seq_length=4
        ),
    ),
    "deepseek_vl": Kind(
        **_DEEPSEEK,
        processor=_see(
            "DeepseekVLProcessor",
            "DeepseekVLImageProcessorPil",
            {"size": _SQUARE},
            num_image_tokens=4,
        ),
    ),
    "gemma3": Kind(
        config={
            "text_config": {**_TEXT, "head_dim": 16, **SLIDING},
            "vision_config": SIGLIP,
            "mm_tokens_per_image": 4,
        },
        ids={
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
        named={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
        placeholders={"image": "<start_of_image>"},
        processor=_see(
            "Gemma3Processor", "Gemma3ImageProcessorPil", {"size": _SQUARE}, image_seq_length=4
        ),
    ),
    "gemma4": Kind(
        config={
            "text_config": {
                **_TEXT,
                **FAMILIES["gemma4_text"],
                "vocab_size_per_layer_input": 320,
                "use_bidirectional_attention": "vision",
            },
            "vision_config": {
                **VISION,
                "num_key_value_heads": 4,
                "head_dim": 8,
                "position_embedding_size": 64,
                "pooling_kernel_size": 3,
            },
            "audio_config": {
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "subsampling_conv_channels": [16, 8],
                "output_proj_dims": 32,
            },
        },
        ids=_GEMMA4_IDS,
        named=_GEMMA4,
        tokens=("<|video|>",),
        placeholders=_GEMMA4_MEDIA,
        needs=("torchvision",),
        processor=_process(
            "Gemma4Processor",
            parts={
                "image_processor": (
                    "Gemma4ImageProcessorPil",
                    {"patch_size": 8, "max_soft_tokens": 70},
                ),
                "video_processor": ("Gemma4VideoProcessor", {**_VIDEO, "patch_size": 8}),
                "feature_extractor": ("Gemma4AudioFeatureExtractor", {"feature_size": 16}),
            },
        ),
    ),
    "glm4v": _make_glm("Glm4vProcessor", "Glm4v", {}),
    "glm4v_moe": _make_glm("Glm4vProcessor", "Glm4v", {**ROUTED, "head_dim": 16}),
    "glm46v": _make_glm(
        "Glm46VProcessor",
        "Glm46V",
        {"model_type": "glm4v_text"},
    ),
    "granite4_vision": Kind(
        config={
            "text_config": _TEXT,
            "vision_config": {
                **SIGLIP,
                **_LAYERS,
                "image_size": 32,
                "hidden_size": 64,
            },
            "qformer_config": {
                "num_hidden_layers": 1,
                "intermediate_size": 48,
                "vocab_size": 1,
            },
            "image_grid_pinpoints": [[32, 32], [32, 64], [64, 32]],
            "downsample_rate": "1/2",
            "deepstack_layer_map": [[-2, 0]],
            "vision_feature_select_strategy": "full",
            "spatial_target_layers": [1],
        },
        ids={"image_token_index": "<image>"},
        named=_IMAGE,
        placeholders={"image": "<image>"},
        processor=_see(
            "Granite4VisionProcessor",
            "LlavaNextImageProcessorPil",
            {
                "size": {"shortest_edge": 32},
                "crop_size": {"height": 32, "width": 32},
                "image_grid_pinpoints": [[32, 32], [32, 64], [64, 32]],
            },
            patch_size=8,
            downsample_rate="1/2",
            vision_feature_select_strategy="full",
        ),
    ),
    "idefics2": Kind(
        config={
            "text_config": {**_TEXT, "model_type": "mistral"},
            "vision_config": {**VISION, "image_size": 32},
            "perceiver_config": {
                "hidden_size": 32,
                "resampler_n_latents": 3,
                "resampler_depth": 1,
                "resampler_n_heads": 4,
                "resampler_head_dim": 8,
                "num_key_value_heads": 2,
            },
        },
        ids={"image_token_id": "<image>"},
        named={**_IMAGE, "image_boundary_token": "<fake_token_around_image>"},
        tokens=("<end_of_utterance>",),
        placeholders={"image": "<image>"},
        processor=_see(
            "Idefics2Processor",
            "Idefics2ImageProcessorPil",
            {"size": {"shortest_edge": 24, "longest_edge": 32}, "do_image_splitting": False},
            image_seq_len=3,
        ),
    ),
    "idefics3": Kind(
        config={
            "text_config": _LLAMA,
            "vision_config": {**VISION, "image_size": 32},
            "scale_factor": 2,
            "pad_token_id": 0,
        },
        ids={"image_token_id": "<image>"},
        tokens=_IDEFICS_TOKENS,
        placeholders={"image": "<image>"},
        processor=_see(
            "Idefics3Processor",
            "Idefics3ImageProcessorPil",
            {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
            image_seq_len=4,
        ),
    ),
    "internvl": Kind(
        config={
            "text_config": _QWEN2,
            "vision_config": {**INTERN, "image_size": [32, 32]},
            "image_seq_length": 4,
        },
        ids={"image_token_id": "<IMG_CONTEXT>"},
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        placeholders={"image": "<IMG_CONTEXT>\n"},
        needs=("torchvision",),
        processor=_see(
            "InternVLProcessor",
            "GotOcr2ImageProcessorPil",
            {"size": {"height": 32, "width": 32}, "crop_to_patches": True, "max_patches": 2},
            "InternVLVideoProcessor",
            image_seq_length=4,
        ),
    ),
    "lighton_ocr": Kind(
        config={
            "text_config": {**_TEXT, "model_type": "qwen3", "head_dim": 8},
            "vision_config": {**PIXTRAL, "image_size": 64},
        },
        ids={"image_token_id": "<|image_pad|>"},
        named={
            "image_token": "<|image_pad|>",
            "image_break_token": "<|vision_pad|>",
            "image_end_token": "<|vision_end|>",
        },
        placeholders={"image": "<|image_pad|>"},
        processor=_see(
            "LightOnOcrProcessor",
            "PixtralImageProcessorPil",
            {"size": {"longest_edge": 48}, "patch_size": {"height": 16, "width": 16}},
            patch_size=8,
            spatial_merge_size=2,
        ),
    ),
    "llama4": Kind(
        config={
            "text_config": {**_TEXT, **FAMILIES["llama4_text"]},
            "vision_config": {**LLAMA4_VISION, "intermediate_size": 128},
        },
        ids={
            "image_token_index": "<|patch|>",
            "boi_token_index": "<|image_start|>",
            "eoi_token_index": "<|image_end|>",
        },
        tokens=(
            "<|image|>",
            "<|image_start|>",
            "<|image_end|>",
            "<|patch|>",
            "<|tile_x_separator|>",
            "<|tile_y_separator|>",
        ),
        placeholders={"image": "<|image|>"},
        needs=("torchvision",),
        processor=_see(
            "Llama4Processor",
            "Llama4ImageProcessor",
            {"size": _SQUARE, "max_patches": 4},
            patch_size=8,
        ),
    ),
    "mistral3": Kind(
        config={
            "text_config": {**_TEXT, "model_type": "mistral", "head_dim": 8},
            "vision_config": {**PIXTRAL, "image_size": 64},
        },
        ids={"image_token_index": "[IMG]"},
        tokens=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        placeholders={"image": "[IMG]"},
        needs=("torchvision",),
        processor=_see(
            "PixtralProcessor",
            "PixtralImageProcessorPil",
            {"size": {"longest_edge": 48}, "patch_size": {"height": 8, "width": 8}},
            patch_size=8,
            spatial_merge_size=2,
        ),
    ),
    "ovis2": Kind(
        config={
            "text_config": _QWEN2,
            "vision_config": {**VISION, "vocab_size": 24, "hidden_stride": 2, "image_size": 32},
            "hidden_size": 32,
            "vocab_size": 320,
        },
        ids={"image_token_id": "<IMG_ATOM>", "visual_indicator_token_ids": _OVIS},
        named=_IMAGE,
        tokens=("<IMG_ATOM>", *_OVIS),
        placeholders={"image": "<image>"},
        processor=_see(
            "Ovis2Processor",
            "Ovis2ImageProcessorPil",
            {"size": {"height": 32, "width": 32}, "crop_to_patches": True, "max_patches": 2},
            image_seq_length=4,
        ),
    ),
    "paddleocr_vl": Kind(
        config={
            "text_config": {**_TEXT, "head_dim": 8, **THREE_AXES},
            "vision_config": {**VISION, "image_size": 32},
        },
        ids={
            "image_token_id": "<|IMAGE_PLACEHOLDER|>",
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|IMAGE_START|>",
            "vision_end_token_id": "<|IMAGE_END|>",
        },
        named={"image_token": "<|IMAGE_PLACEHOLDER|>"},
        tokens=("<|video_pad|>", "<|IMAGE_START|>", "<|IMAGE_END|>"),
        placeholders={"image": "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"},
        processor=_see("PaddleOCRVLProcessor", "PaddleOCRVLImageProcessorPil", _PATCHES),
    ),
    "paligemma": Kind(
        config={
            "text_config": {**_TEXT, "model_type": "gemma", "head_dim": 8},
            "vision_config": {**SIGLIP, "projection_dim": 32},
            "projection_dim": 32,
            "hidden_size": 32,
        },
        ids={"image_token_index": "<image>"},
        named=_IMAGE,
        placeholders={"image": "<image>"},
        starts=False,
        needs_media=True,
        processor=_see(
            "PaliGemmaProcessor",
            "SiglipImageProcessorPil",
            {"size": _SQUARE, "image_seq_length": 4},
        ),
    ),
    "qwen2_vl": _make_qwen("Qwen2VLProcessor", THREE_AXES, {}),
    "qwen2_5_vl": _make_qwen(
        "Qwen2_5_VLProcessor", THREE_AXES, {"window_size": 32, "fullatt_block_indexes": [0]}
    ),
    "qwen3_vl": _make_qwen(
        "Qwen3VLProcessor",
        {**THREE_AXES, "head_dim": 8},
        {"depth": 2, "deepstack_visual_indexes": [0, 1]},
        "Qwen3VLVideoProcessor",
    ),
    "qwen3_vl_moe": _make_qwen(
        "Qwen3VLProcessor",
        {
            **THREE_AXES,
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
        {"depth": 2, "deepstack_visual_indexes": [0]},
        "Qwen3VLVideoProcessor",
    ),
    "qwen3_5": _make_qwen(
        "Qwen3VLProcessor", FAMILIES["qwen3_5_text"], {}, "Qwen3VLVideoProcessor"
    ),
    "qwen3_5_moe": _make_qwen(
        "Qwen3VLProcessor", FAMILIES["qwen3_5_moe_text"], {}, "Qwen3VLVideoProcessor"
    ),
    "deepseek_vl_hybrid": Kind(
        config={**_DEEPSEEK["config"], "high_res_vision_config": _SAM},
        ids=_DEEPSEEK["ids"],
        named=_DEEPSEEK["named"],
        placeholders=_DEEPSEEK["placeholders"],
        processor=_see(
            "DeepseekVLHybridProcessor",
            "DeepseekVLHybridImageProcessorPil",
            {"size": _SQUARE, "high_res_size": {"height": 64, "width": 64}},
            num_image_tokens=4,
        ),
    ),
    "glmasr": Kind(
        config={
            "text_config": _LLAMA,
            "audio_config": {**_HEAR, "intermediate_size": 128},
        },
        ids={"audio_token_id": "<|pad|>"},
        tokens=("<|pad|>", "<|begin_of_audio|>", "<|end_of_audio|>"),
        placeholders={"audio": "<|begin_of_audio|><|pad|><|end_of_audio|>"},
        takes_several=False,
        processor=_process("GlmAsrProcessor", parts={"feature_extractor": _WHISPER}),
    ),
    "janus": Kind(
        config={
            "text_config": _LLAMA,
            "vision_config": {**VISION, "projection_dim": 32, "num_image_tokens": 4},
            "vq_config": {
                "embed_dim": 8,
                "num_embeddings": 8,
                "latent_channels": 8,
                "base_channels": 32,
                "channel_multiplier": [1, 1],
                "num_res_blocks": 1,
                "projection_dim": 32,
                "image_token_embed_dim": 32,
            },
        },
        ids={"image_token_id": "<image_placeholder>"},
        named={
            "image_token": "<image_placeholder>",
            "boi_token": "<begin_of_image>",
            "eoi_token": "<end_of_image>",
        },
        placeholders={"image": "<image_placeholder>"},
        processor=_see(
            "JanusProcessor", "JanusImageProcessorPil", {"size": _SQUARE}, num_image_tokens=4
        ),
    ),
    "moss_transcribe_diarize": Kind(
        config={
            "text_config": {**_TEXT, "model_type": "qwen3", "head_dim": 8},
            "audio_config": {**_HEAR, "max_source_positions": 50},
            "audio_chunk_size": 16000,
        },
        ids={"audio_token_id": "<|audio_pad|>"},
        tokens=("<|audio_pad|>", "<|audio_start|>", "<|audio_end|>"),
        placeholders={"audio": "<|audio_start|><|audio_pad|><|audio_end|>"},
        processor=_process(
            "MossTranscribeDiarizeProcessor",
            parts={
                "feature_extractor": (
                    "MossTranscribeDiarizeFeatureExtractor",
                    {"feature_size": 16, "chunk_length": 1},
                )
            },
        ),
    ),
    "qianfan_ocr": Kind(
        config={
            "text_config": {**_TEXT, "model_type": "qwen3", "head_dim": 8},
            "vision_config": {**INTERN, "image_size": [32, 32]},
            "image_seq_length": 4,
        },
        ids={"image_token_id": "<IMG_CONTEXT>"},
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
        },
        tokens=("<image>",),
        placeholders={"image": "<image>\n"},
        processor=_see(
            "QianfanOCRProcessor",
            "GotOcr2ImageProcessorPil",
            {"size": {"height": 32, "width": 32}, "crop_to_patches": True, "max_patches": 2},
            image_seq_length=4,
        ),
    ),
    "qwen2_audio": Kind(
        config={"text_config": _QWEN2, "audio_config": _WHISPERED},
        ids={"audio_token_index": "<|AUDIO|>"},
        tokens=("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
        placeholders={"audio": "<|audio_bos|><|AUDIO|><|audio_eos|>\n"},
        processor=_process("Qwen2AudioProcessor", parts={"feature_extractor": _WHISPER}),
    ),
    "qwen2_5_omni_thinker": Kind(
        config={
            "text_config": {**_TEXT, **THREE_AXES},
            "vision_config": {**QWEN_VISION, "window_size": 32, "fullatt_block_indexes": [0]},
            "audio_config": {**_WHISPERED, "output_dim": 32, "n_window": 50},
        },
        ids=_OMNI_IDS,
        named=_OMNI,
        placeholders=_OMNI_MEDIA,
        starts=False,
        needs=("torchvision",),
        processor=_process("Qwen2_5OmniProcessor", parts=_OMNI_PARTS),
    ),
    "qwen3_asr": Kind(
        config={
            "text_config": {**_TEXT, "model_type": "qwen3", "head_dim": 8},
            "audio_config": {**_WHISPERED, "output_dim": 32, "downsample_hidden_size": 8},
        },
        ids={"audio_token_id": "<|audio_pad|>"},
        named={
            "audio_token": "<|audio_pad|>",
            "audio_bos_token": "<|audio_start|>",
            "audio_eos_token": "<|audio_end|>",
        },
        placeholders={"audio": "<|audio_start|><|audio_pad|><|audio_end|>"},
        takes_several=False,
        processor=_process(
            "Qwen3ASRProcessor",
            parts={"feature_extractor": ("Qwen3ASRFeatureExtractor", {"feature_size": 16})},
        ),
    ),
    "qwen3_omni_moe_thinker": Kind(
        config={
            "text_config": {
                **_TEXT,
                **THREE_AXES,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 24,
            },
            "vision_config": {**QWEN_VISION, "depth": 2, "deepstack_visual_indexes": [0]},
            "audio_config": {**_WHISPERED, "output_dim": 32, "downsample_hidden_size": 8},
        },
        ids={key.replace("_index", "_id"): token for key, token in _OMNI_IDS.items()},
        named=_OMNI,
        placeholders=_OMNI_MEDIA,
        starts=False,
        needs=("torchvision",),
        processor=_process("Qwen3OmniMoeProcessor", parts=_OMNI_PARTS),
    ),
    "video_llama_3": Kind(
        config={"text_config": _QWEN2, "vision_config": VISION},
        ids={"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"},
        named=_QWEN_TOKENS,
        placeholders={"image": "<|image_pad|>"},
        needs=("torchvision",),
        processor=_see(
            "VideoLlama3Processor",
            "VideoLlama3ImageProcessorPil",
            {**_PATCHES, "merge_size": 1},
            "VideoLlama3VideoProcessor",
        ),
    ),
    "glm_ocr": _make_glm("Glm46VProcessor", "Glm46V", {"head_dim": 8}),
    "granite_docling": Kind(
        config={
            "text_config": _TEXT,
            "vision_config": {
                **VISION,
                **_LAYERS,
                "image_size": 32,
                "out_hidden_size": 32,
                "scale_factor": 2,
                "deepstack_visual_indexes": [0],
                "use_fine_route": False,
            },
            "pad_token_id": 0,
        },
        ids={"image_token_id": "<image>"},
        named=_IMAGE,
        tokens=_IDEFICS_TOKENS,
        placeholders={"image": "<image>"},
        processor=_see(
            "GraniteDoclingProcessor",
            "GraniteDoclingImageProcessorPil",
            {"size": {"height": 32, "width": 32}, "max_patches": 2},
            image_seq_len=4,
        ),
    ),
}
