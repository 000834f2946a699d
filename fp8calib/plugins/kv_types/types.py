"""The types of a KV cache beside FP8 with a scale for a tensor or a head, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from fp8calib.formats.table import ScaleTable
from fp8calib.model.geometry import Attention, ModelGeometry, Role, Site
from fp8calib.numerics.formats import E4M3FN
from fp8calib.numerics.schemes import Granularity
from fp8calib.plugins.kv_types import round_trips
from fp8calib.verification.emulation.fake_quantize import Quantizer

Store = Callable[..., torch.Tensor]
"""A round trip; of a type with global scales that of the layer is its argument `scale`, of one with
a scale for a sequence `is_prompt` says where its prompt is."""
Size = tuple[float, int]
"""The bits of a value, blocks' scales included, and the bytes that a vector has besides."""


@dataclass(frozen=True, slots=True)
class CacheType:
    """How an engine stores K and V."""

    name: str
    """The value of `--kv-cache-dtype`."""
    key: Store
    key_size: Size
    value: Store | None = None
    """None: that of K, with its size."""
    value_size: Size = (0, 0)
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
        """Say why it cannot store the cache of a model; empty if it can."""
        return next(self._list_misfits(geometry), "")

    def _list_misfits(self, geometry: ModelGeometry) -> Iterator[str]:
        model_type = geometry.model_type
        if self.latent_types and model_type not in self.latent_types:
            yield f"it stores the latents of {', '.join(self.latent_types)} alone"
        if geometry.has_latent_attention and not self.latent_types:
            yield "the model caches latents, which it does not store"
        if self.is_packed and model_type == "falcon_h1":
            # Without a layer of attention alone get_boundary_skip_layers of vLLM 0.32.0
            # quantization/turboquant/config.py stops (NotImplementedError), run.
            yield f"the engine does not start with it and {model_type}"
        if not self.list_stored(geometry):
            yield "it leaves all layers in 16 bits"
        for _, attention in geometry.attentions():
            sizes = (attention.k_head_dim, attention.v_head_dim)
            for size in sizes[:1] if self.latent_types else sizes:
                if size % self.multiple:
                    yield f"its heads have {size} values, no multiple of {self.multiple}"
                if self.is_packed and size & (size - 1):
                    yield f"its heads have {size} values, no power of two"

    def list_stored(self, geometry: ModelGeometry) -> list[Attention]:
        """List the attention layers whose K and V it stores: not the ends that it leaves."""
        attentions = [attention for _, attention in geometry.attentions()]
        is_hybrid = len(attentions) < len(geometry.layers)
        ends = min(2, len(attentions) // 2) if self.is_packed and not is_hybrid else 0
        return attentions[ends : len(attentions) - ends]

    def count_bytes(self, geometry: ModelGeometry) -> float:
        """Count the bytes of a token in all layers and on all ranks."""
        stored = self.list_stored(geometry)
        total = 0.0
        for _, attention in geometry.attentions():
            if attention not in stored:
                total += 2 * attention.kv_elements_per_token
            elif attention.producer is None:
                sizes = (self.key_size, self.value_size if self.value else self.key_size)
                lengths = (attention.k_head_dim, attention.v_head_dim)
                for (bits, more), length in zip(sizes, lengths, strict=True):
                    total += attention.num_kv_heads * (bits * length / 8 + more)
        return total

    def quantize(
        self, geometry: ModelGeometry, table: ScaleTable | None = None
    ) -> dict[Site, Quantizer]:
        """Give the quantizers of K, V and, where it changes, q; global scales are the table's."""
        stores: dict[Site, Store] = {}
        for attention in self.list_stored(geometry):
            if attention.producer is None:
                stores[attention.site(Role.K)] = self.key
                stores[attention.site(Role.V)] = self.value or self.key
            if self.query is not None:
                stores[attention.site(Role.Q)] = self.query
        for site in stores if self.has_global_scales else ():
            scale = table.scales[site].values.max() if table else torch.tensor(1.0)
            stores[site] = partial(stores[site], scale=scale)
        per = Granularity.TENSOR if self.is_of_sequence else Granularity.TOKEN
        return {
            site: Quantizer(fmt=E4M3FN, scale=per, round_trip=store)
            for site, store in stores.items()
        }


def _make_turboquant(name: str, key: Store, key_size: Size, value_bits: int) -> CacheType:
    value = partial(round_trips.uniform_value, bits=value_bits)
    made = CacheType(f"turboquant_{name}", key, key_size, value, (value_bits, 4), multiple=8)
    return replace(made, is_packed=True)


_GAUSSIAN_3, _GAUSSIAN_4 = (partial(round_trips.gaussian_key, bits=bits) for bits in (3, 4))
_NVFP4 = CacheType("nvfp4", round_trips.nvfp4, (4.5, 0), multiple=16, has_global_scales=True)
CACHE_TYPES = {
    cache_type.name: cache_type
    for cache_type in (
        CacheType("fp8_per_token_head", round_trips.e4m3_vectors, (8, 4)),
        CacheType("int8_per_token_head", round_trips.int8_vectors, (8, 4)),
        CacheType("int4_per_token_head", round_trips.int4_vectors, (4, 4), multiple=2),
        _NVFP4,
        replace(_NVFP4, name="nvfp4_4over6", key=round_trips.nvfp4_four_over_six),
        _make_turboquant("k8v4", round_trips.e4m3_unscaled, (8, 0), 4),
        _make_turboquant("4bit_nc", _GAUSSIAN_4, (4, 2), 4),
        _make_turboquant("k3v4_nc", _GAUSSIAN_3, (3, 2), 4),
        _make_turboquant("3bit_nc", _GAUSSIAN_3, (3, 2), 3),
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
