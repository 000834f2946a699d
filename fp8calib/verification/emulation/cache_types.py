"""The quantizers of a KV cache whose type finds its scales itself, and its size."""

from __future__ import annotations

from functools import partial

import torch

from fp8calib.fp8.formats import E4M3FN
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.geometry.sites import Role, Site
from fp8calib.kv_types.cache_types import CacheType, RoundTrip
from fp8calib.kv_types.sizes import list_stored
from fp8calib.scales.scale_table import ScaleTable
from fp8calib.verification.emulation.fake_quantize import Quantizer


def emulate_cache_type(
    cache_type: CacheType, geometry: ModelGeometry, table: ScaleTable | None = None
) -> dict[Site, Quantizer]:
    """Give the quantizers of K, V and, where the type changes it, q.

    Args:
        cache_type: how K and V are stored; it fits the model (`explain_misfit`).
        geometry: of the model.
        table: the global scales of a type that has some; None: 1.0.
    """
    found: dict[Site, RoundTrip] = {}
    for attention in list_stored(cache_type, geometry):
        if attention.producer is None:
            for role, store in ((Role.K, cache_type.key), (Role.V, cache_type.value)):
                site = attention.site(role)
                found[site] = store
                if cache_type.has_global_scales:
                    one = torch.tensor(1.0)
                    scale = one if table is None else table.scales[site].values.max()
                    found[site] = partial(store, scale=scale)
        if cache_type.query is not None:
            found[attention.site(Role.Q)] = cache_type.query
    return {
        site: Quantizer(fmt=E4M3FN, scale=cache_type.per, round_trip=store)
        for site, store in found.items()
    }
