"""What each engine does to tensors when it serves in FP8, as data.

A profile says where an engine differs from the plain rule (divide by the scale, saturate, round to
nearest even): rounding, dtype of the division, smallest scales, what fused weights share, whether
the query is quantized. `sources` names, for every field that is not the plain rule, the file it was
read from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fp8calib.errors import UsageError
from fp8calib.fp8_cast import Rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProfile:
    """How one engine quantizes; the defaults are the plain rule."""

    name: str
    version: str
    kv_rounding: Rounding = Rounding.NEAREST_EVEN
    """How the KV cache write rounds."""
    kv_in_model_dtype: bool = False
    """K and V are divided in the model's dtype, the quotient rounded to it, before the cast."""
    kv_per_head: bool = True
    """Per-head scales are honoured; where not, the engine refuses them."""
    kv_joint_scale: bool = False
    """One scale serves k and v of a layer: the larger of the two."""
    quantizes_query: bool = False
    """q is quantized statically when the KV cache is FP8, with `q_scale` or 1.0."""
    input_by_reciprocal: bool = False
    """Static activations are multiplied by 1 / scale (fp32) rather than divided."""
    smallest_dynamic_scale: float = 0.0
    """Lower bound of a per-token scale."""
    fused_inputs_share_scale: bool = False
    """Projections fused at load (q/k/v, gate/up) take the largest of their input scales."""
    fused_weights_share_scale: bool = False
    """Per-tensor weights fused at load are quantized again with the largest of their scales."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Field -> file (and function) it was read from."""


_VLLM = "vLLM 0.32.0"

PROFILES: Mapping[str, EngineProfile] = {
    profile.name: profile
    for profile in (
        EngineProfile(name="reference", version="the plain rule"),
        EngineProfile(
            name="vllm",
            version=_VLLM,
            quantizes_query=True,
            input_by_reciprocal=True,
            smallest_dynamic_scale=1 / (448 * 512),
            fused_inputs_share_scale=True,
            fused_weights_share_scale=True,
        ),
        EngineProfile(
            name="vllm-cpu",
            version=_VLLM,
            kv_rounding=Rounding.TOWARD_ZERO,
            input_by_reciprocal=True,
            smallest_dynamic_scale=1 / (448 * 512),
            fused_inputs_share_scale=True,
            fused_weights_share_scale=True,
        ),
        EngineProfile(
            name="sglang",
            version="SGLang 0.5.23",
            kv_in_model_dtype=True,
            kv_per_head=False,
            fused_inputs_share_scale=True,
            fused_weights_share_scale=True,
        ),
        EngineProfile(
            name="tgi",
            version="TGI db931fc",
            kv_per_head=False,
            fused_inputs_share_scale=True,
            fused_weights_share_scale=True,
        ),
    )
}


def find_profile(name: str) -> EngineProfile:
    """Give the profile called `name`.

    Raises:
        UsageError: there is none; the message lists them.
    """
    if name not in PROFILES:
        raise UsageError(
            f"--engine {name}: unknown engine", hint=f"known engines: {', '.join(PROFILES)}"
        )
    return PROFILES[name]
