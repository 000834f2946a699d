"""Scales of the attention of a vision tower, from statistics, in vLLM's file."""

from __future__ import annotations

from pathlib import Path

from fp8calib.dialects.vision import VisionScales, compute_vision_scales, write_vision_scales
from fp8calib.engines.facts.release import VLLM_RELEASES
from fp8calib.engines.vllm.vision import list_vision_gpus, name_vision_layers
from fp8calib.errors import ExportError
from fp8calib.fp8.formats import Fp8Format
from fp8calib.geometry.sites import Role, Site
from fp8calib.stats.calibration_stats import CalibrationStats

VISION_NAME = "vision-scales.json"


def write_vision(stats: CalibrationStats, folder: Path, fmt: Fp8Format) -> str:
    """Write `VISION_NAME` for the newest release of vLLM; gives where that release uses it.

    Raises:
        ExportError: the statistics have no attention of a tower, or vLLM does not run it in FP8.
    """
    inside = {attention.module for _, attention in stats.geometry.attentions()}
    modules = [
        site.module for site in stats.sites if site.role is Role.Q and site.module not in inside
    ]
    if not stats.header.towers or not modules:
        raise ExportError(
            "--vision-scales: the statistics have no attention of a vision tower",
            hint="calibrate with --towers, on rows with images",
        )
    release = VLLM_RELEASES[-1]
    names = name_vision_layers(modules, stats.geometry.architecture, release)

    def find(module: str, role: Role) -> float:
        return float(stats.sites[Site(module, role)].amax.max())

    amaxes = {
        names[module]: (find(module, Role.Q), find(module, Role.K), find(module, Role.V))
        for module in modules
    }
    scales = compute_vision_scales(amaxes, fmt=fmt)
    write_vision_scales(folder / VISION_NAME, VisionScales(layers=scales, origin=stats.origin))
    return f"{VISION_NAME}: {release.title} uses it on " + "; ".join(list_vision_gpus(release))
