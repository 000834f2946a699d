"""The dtype in which engines serve a model, for what they store in that dtype."""

from __future__ import annotations

import torch

from fp8calib.model.shapes import ModelGeometry


def find_served_dtype(
    geometry: ModelGeometry,
    *,
    bfloat16_types: tuple[str, ...] = (),
    half_instead_of: tuple[str, ...] = ("float16",),
) -> torch.dtype:
    """Find the 16-bit dtype a model is served in; fp32 checkpoints are served in bfloat16.

    Args:
        geometry: the model.
        bfloat16_types: types that are served in bfloat16 even if the checkpoint is in float16.
        half_instead_of: the dtypes of checkpoints that are served in float16.
    """
    is_half = geometry.checkpoint_dtype in half_instead_of
    is_half = is_half and geometry.model_type not in bfloat16_types
    return torch.float16 if is_half else torch.bfloat16
