"""What each engine does to tensors when it serves in FP8, as data.

A profile says where an engine differs from the plain rule (divide in fp32, saturate, round to
nearest even; every scale of the file is used, and nothing is quantized that has none). `sources`
names, for every field that is not the plain rule, the file it was read from. What depends on the
GPU is taken from Hopper, with the backends the engine picks there by itself.

Paths are those of the installed package, or of the engine's repository for kernels that no wheel
carries: of these the repository holds no tags here, so they are the newest version at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fp8calib.fp8.formats import E4M3FN, Rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """How one engine quantizes; the defaults are the plain rule."""

    name: str
    kv_rounding: Rounding = Rounding.NEAREST_EVEN
    """How the KV cache write rounds."""
    kv_by_reciprocal: bool = False
    """K and V are multiplied by 1 / scale (fp32) rather than divided."""
    kv_in_model_dtype: bool = False
    """K and V are divided in the model's dtype, the scale rounded to it first and the quotient
    after; what is read back is multiplied by the scale as it was in the file."""
    kv_unsaturated: frozenset[str] = frozenset()
    """Formats whose cache write does not saturate: what rounds to more than the largest value
    becomes infinity where the format has one, else NaN."""
    kv_saturates_unscaled: bool = True
    """K and V saturate with a scale of exactly 1.0 too; where not, they become NaN."""
    kv_scales_e5m2: bool = True
    """An e5m2 cache uses scales; where not, they are refused or taken for 1.0."""
    kv_per_head: bool = True
    """Per-head scales are honoured; where not, the engine refuses them."""
    kv_heads_share_largest: bool = False
    """Per-head scales are read, and the largest of a layer serves all its heads."""
    kv_joint_scale: bool = False
    """One scale serves k and v of a layer: the larger of the two."""
    kv_joint_in_model_dtype: bool = False
    """A scale that the file holds for k and v together is rounded to the model's dtype."""
    kv_scales_latents: bool = True
    """The cache of latent attention (MLA) uses scales; where not, they are taken for 1.0."""
    quantizes_query: bool = False
    """q is quantized statically when the KV cache is FP8, with `q_scale` or 1.0."""
    query_by_reciprocal: bool = False
    """q is multiplied by 1 / scale (fp32) rather than divided."""
    query_unscaled: bool = False
    """q is quantized with 1.0 whatever the file says."""
    static_inputs_ignored: bool = False
    """Static input scales are dropped: such inputs are quantized per token."""
    input_by_reciprocal: bool = False
    """Static activations are multiplied by 1 / scale (fp32) rather than divided."""
    token_by_reciprocal: bool = False
    """Activations quantized per token are multiplied by 1 / scale (fp32) rather than divided."""
    smallest_dynamic_scale: float = 0.0
    """Lower bound of a per-token scale."""
    smallest_group_scale: float = 0.0
    """Lower bound of the scale of 128 channels of a token."""
    group_scales_power_of_two: bool = False
    """Scales of 128 channels are rounded up to powers of two, and so are those of 128 x 128
    weights, which are quantized again."""
    fused_share_scales: bool = False
    """Projections fused at load (q/k/v, gate/up) take the largest of their static input scales, and
    per-tensor weights are quantized again with the largest of theirs."""
    weights_through_float16: bool = False
    """Per-tensor weights, fused or not, are dequantized to fp16 at load and quantized again with
    their (largest) scale: what fp16 flushes to zero is lost."""
    kv_skip_flag: str = ""
    """The option that leaves the KV cache of some layers unquantized, their indices after it."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Field -> file (and function) it was read from."""


SMALLEST_TOKEN_SCALE = 1 / (E4M3FN.max * 512)
"""The lower bound of a per-token scale in the kernels of vLLM and in those TGI takes from it."""
SMALLEST_GROUP_SCALE = 1e-10 / E4M3FN.max
"""The lower bound of a group's scale in vLLM and SGLang: 1e-10 bounds the amax."""
