"""The histograms of a page: what calibration saw, with the range of each scale."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from fp8calib.numerics.histogram import lower_edge
from fp8calib.verification.report import HistogramResult
from fp8calib.verification.verify import Verification


def list_histograms(asked: Verification) -> Iterator[HistogramResult]:
    """List what the first statistics saw at the sites that its candidate scales statically."""
    candidate = next((each for each in asked.candidates if each.name == asked.stats_of), None)
    if asked.stats is None or candidate is None:
        return
    layer_of = asked.geometry.index_modules()
    for site, quantizer in candidate.quantizers.items():
        seen = asked.stats.sites.get(site)
        if seen is None or seen.histogram is None or not isinstance(quantizer.scale, torch.Tensor):
            continue
        filled = seen.histogram[1:].nonzero().flatten() + 1
        if not len(filled):
            continue
        scale, fmt = float(quantizer.scale.max()), quantizer.fmt
        bins = range(int(filled[0]), int(filled[-1]) + 1)
        yield HistogramResult(
            site=str(site),
            layer=layer_of[site.module],
            lower_edges_log2=tuple(math.log2(lower_edge(index)) for index in bins),
            counts=tuple(seen.histogram[bins.start : bins.stop].tolist()),
            scale=scale,
            largest=scale * fmt.max,
            smallest=scale * fmt.smallest_subnormal / 2,
        )
