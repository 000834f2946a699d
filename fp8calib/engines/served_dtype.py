"""The dtype that an engine serves a model in."""

from __future__ import annotations

from fp8calib.model.geometry import ModelGeometry


def find_served_dtype(
    geometry: ModelGeometry,
    *,
    bfloat16_types: tuple[str, ...] = (),
    half_instead_of: tuple[str, ...] = ("float16",),
) -> str:
    """Name the 16-bit dtype a model is served in; fp32 checkpoints are served in bfloat16.

    `bfloat16_types` are served in bfloat16 even if the checkpoint is in float16; `half_instead_of`
    are the dtypes of checkpoints that are served in float16.
    """
    is_half = geometry.checkpoint_dtype in half_instead_of
    return "float16" if is_half and geometry.model_type not in bfloat16_types else "bfloat16"
