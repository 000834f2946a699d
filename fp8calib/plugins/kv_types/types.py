"""The types of a KV cache beside FP8 with a scale for a tensor or a head, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from fp8calib.geometry.model_geometry import Attention, ModelGeometry
from fp8calib.geometry.sites import Role, Site
from fp8calib.numerics.formats import E4M3FN
from fp8calib.numerics.schemes import Granularity
from fp8calib.plugins.kv_types import round_trips
from fp8calib.scales.scale_table import ScaleTable
from fp8calib.verification.emulation.fake_quantize import Quantizer

Store = Callable[..., torch.Tensor]
"""A round trip; of a type with global scales that of the layer is its argument `scale`, of one with
a scale for a sequence `is_prompt` says where its prompt is."""


@dataclass(frozen=True, slots=True)
class CacheType:
    """How an engine stores K and V."""

    name: str
    """The value of `--kv-cache-dtype`."""
    key: Store
    key_size: tuple[float, int]
    """The bits of a value, blocks' scales included, and the bytes that a vector has besides."""
    value: Store | None = None
    """None: that of K, with its size."""
    value_size: tuple[float, int] = (0, 0)
    query: Store | None = None
    """What happens to q; None: nothing."""
    multiple: int = 1
    """Head sizes are multiples of it; of latents, that of the part without positions is."""
    latent_types: tuple[str, ...] = ()
    """The model types whose latents it stores; empty for a type that stores heads."""
    is_packed: bool = False
    """vLLM's packed types: head sizes are powers of two, and the first and last two layers stay in
    16 bits where all layers are attention (0.32.0 engine/arg_utils.py, `uses_packed_kv_backend`).
    A prompt in one chunk is computed in 16 bits (v1/attention/backends/turboquant_attn.py,
    ultraquant_attn.py, `_prefill_attention`)."""
    has_global_scales: bool = False
    """k_scale and v_scale divide the scales of blocks."""
    is_of_sequence: bool = False
    """All values of a sequence share a scale, that of its prompt, which is computed in 16 bits."""

    def explain_misfit(self, geometry: ModelGeometry) -> str:
        """Say why it cannot store the cache of a model; empty where it can."""
        why = ""
        if self.latent_types and geometry.model_type not in self.latent_types:
            why = f"it stores the latents of {', '.join(self.latent_types)} alone"
        elif geometry.has_latent_attention and not self.latent_types:
            why = "the model caches latents, which it does not store"
        elif self.is_packed and geometry.model_type == "falcon_h1":
            # Without a layer of attention alone get_boundary_skip_layers of vLLM 0.32.0
            # quantization/turboquant/config.py stops (NotImplementedError), run.
            why = f"the engine does not start with it and {geometry.model_type}"
        elif not geometry.kv_elements_per_token:
            why = "the model has no KV cache"
        elif not self.list_stored(geometry):
            why = "it leaves all layers in 16 bits"
        for _, attention in () if why else geometry.attentions():
            sizes = (attention.k_head_dim, attention.v_head_dim)
            for size in sizes[:1] if self.latent_types else sizes:
                if size % self.multiple:
                    why = f"its heads have {size} values, no multiple of {self.multiple}"
                elif self.is_packed and size & (size - 1):
                    why = f"its heads have {size} values, no power of two"
        return why

    def list_stored(self, geometry: ModelGeometry) -> list[Attention]:
        """List the attention layers whose K and V it stores: not the ends that it leaves."""
        attentions = [attention for _, attention in geometry.attentions()]
        is_hybrid = len(attentions) < len(geometry.layers)
        ends = min(2, len(attentions) // 2) if self.is_packed and not is_hybrid else 0
        return attentions[ends : len(attentions) - ends]

    def count_bytes(self, geometry: ModelGeometry) -> float:
        """Count the bytes of a token in all layers and on all ranks."""
        stored = self.list_stored(geometry)
        value_size = self.key_size if self.value is None else self.value_size
        total = 0.0
        for _, attention in geometry.attentions():
            if attention not in stored:
                total += 2 * attention.kv_elements_per_token
            elif attention.producer is None:
                one = _count_vector(self.key_size, attention.k_head_dim)
                one += _count_vector(value_size, attention.v_head_dim)
                total += attention.num_kv_heads * one
        return total

    def quantize(
        self, geometry: ModelGeometry, table: ScaleTable | None = None
    ) -> dict[Site, Quantizer]:
        """Give the quantizers of K, V and, where it changes, q; global scales are the table's."""
        found: dict[Site, Store] = {}
        for attention in self.list_stored(geometry):
            if attention.producer is None:
                for role, store in ((Role.K, self.key), (Role.V, self.value or self.key)):
                    site = attention.site(role)
                    found[site] = store
                    if self.has_global_scales:
                        scale = table.scales[site].values.max() if table else torch.tensor(1.0)
                        found[site] = partial(store, scale=scale)
            if self.query is not None:
                found[attention.site(Role.Q)] = self.query
        per = Granularity.TENSOR if self.is_of_sequence else Granularity.TOKEN
        return {
            site: Quantizer(fmt=E4M3FN, scale=per, round_trip=store)
            for site, store in found.items()
        }


def _count_vector(size: tuple[float, int], length: int) -> float:
    bits, more = size
    return bits * length / 8 + more


def _make_turboquant(name: str, key_bits: int, value_bits: int) -> CacheType:
    is_e4m3 = key_bits == 8
    gaussian = partial(round_trips.gaussian_key, bits=key_bits)
    return CacheType(
        f"turboquant_{name}",
        round_trips.e4m3_unscaled if is_e4m3 else gaussian,
        (key_bits, 0 if is_e4m3 else 2),
        partial(round_trips.uniform_value, bits=value_bits),
        (value_bits, 4),
        multiple=8,
        is_packed=True,
    )


_NVFP4 = CacheType("nvfp4", round_trips.nvfp4, (4.5, 0), multiple=16, has_global_scales=True)
CACHE_TYPES = {
    cache_type.name: cache_type
    for cache_type in (
        CacheType("fp8_per_token_head", round_trips.e4m3_vectors, (8, 4)),
        CacheType("int8_per_token_head", round_trips.int8_vectors, (8, 4)),
        CacheType("int4_per_token_head", round_trips.int4_vectors, (4, 4), multiple=2),
        _NVFP4,
        replace(_NVFP4, name="nvfp4_4over6", key=round_trips.nvfp4_four_over_six),
        _make_turboquant("k8v4", 8, 4),
        _make_turboquant("4bit_nc", 4, 4),
        _make_turboquant("k3v4_nc", 3, 4),
        _make_turboquant("3bit_nc", 3, 3),
        CacheType(
            "ultraquant_4bit",
            round_trips.ultraquant_key,
            (4.25, 0),
            round_trips.ultraquant,
            (4.25, 0),
            query=round_trips.ultraquant_query,
            multiple=32,
            is_packed=True,
        ),
        CacheType("mxfp8", round_trips.mxfp8, (8.25, 0), query=round_trips.mxfp8, multiple=32),
        CacheType("fp4_mx_block16", round_trips.mx_block16, (4.5, 0), multiple=16),
        CacheType(
            "fp8_ds_mla",
            round_trips.latent_tiles,
            (8.25, 0),
            round_trips.rotary,
            (16, 0),
            multiple=128,
            latent_types=("deepseek_v32", "glm_moe_dsa"),
        ),
        CacheType("fp8_quantized_cache", round_trips.first_update, (8, 0), is_of_sequence=True),
    )
}
