"""Drafters of speculative decoding that read the cache of the model they draft for."""

from __future__ import annotations

from collections.abc import Sequence

from fp8calib.engines.facts.release import Release
from fp8calib.engines.replay.verdicts import EngineReport
from fp8calib.engines.status import Status
from fp8calib.model.shapes import ModelGeometry

_READS = "drafter reads the KV cache of this model type"


def note_drafter(
    report: EngineReport, geometry: ModelGeometry, release: Release, *, given_by: Sequence[str] = ()
) -> EngineReport:
    """Note that a drafter of such a model reads scaled K and V with 1.0.

    Args:
        report: what the engine does with the model's own layers.
        geometry: of the model.
        release: of the engine.
        given_by: the parts of the engine that give the drafter the model's scales.
    """
    is_scaled = any(one.status is Status.USED and one.value != 1.0 for one in report.verdicts)
    if geometry.model_type not in release.list_values(_READS) or not is_scaled:
        return report
    but = f"; only {', '.join(given_by)} gives it the scales" if given_by else ""
    return report.add_problems(
        f"a Gemma 4 drafter (MTP) reads this cache with scale 1.0, so that fewer of its tokens are "
        f"accepted{but}"
    )
