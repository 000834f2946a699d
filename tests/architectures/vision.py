"""Tiny configs that tests of several models share: vision towers, positions with several axes."""

from typing import Any

VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "embed_dim": 32,
    "hidden_size": 32,
    "num_heads": 4,
    "patch_size": 8,
    "intermediate_size": 48,
    "out_hidden_size": 32,
    "mlp_ratio": 2,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [],
}
THREE_AXES = {
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
}
FOUR_AXES = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1, 1]}
}
CLIP = {**VISION, "model_type": "clip_vision_model", "projection_dim": 32}
SIGLIP = {**VISION, "model_type": "siglip_vision_model"}
PIXTRAL = {**VISION, "model_type": "pixtral", "head_dim": 8}
INTERN = {**VISION, "image_size": [16, 16], "patch_size": [8, 8]}
LLAMA4_VISION = {
    **VISION,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}
