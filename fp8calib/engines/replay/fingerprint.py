"""A fingerprint of KV scales as an engine holds them: a stored cache can be keyed by it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from fp8calib.engines.replay.verdicts import EngineReport
from fp8calib.model.shapes import Role

_DIGITS = 16
Place = tuple[int, int, Role]
"""A layer, a rank, and K or V."""


def fingerprint_scales(scales: Mapping[Place, Sequence[float]]) -> str:
    """Hash layer, rank, role and numbers: hexadecimal digits.

    Heads with the same number are as one number for all of them. Numbers are those of float32.
    """
    digest = hashlib.sha256()
    for (layer, rank, role), numbers in sorted(scales.items()):
        found = numbers[:1] if len(set(numbers)) == 1 else numbers
        digest.update(f"{layer} {rank} {role} {len(found)}\n".encode())
        with np.errstate(over="ignore"):
            digest.update(np.array(found, dtype=np.float64).astype("<f4").tobytes())
    return digest.hexdigest()[:_DIGITS]


def add_fingerprint(report: EngineReport, tp: int) -> EngineReport:
    """Add the fingerprint of what an engine holds on `tp` ranks, where all of it is known."""
    found: dict[Place, Sequence[float]] = {}
    for (layer, role), verdict in report.slots.items():
        held = report.held.get((layer, role))
        value = () if verdict.value is None else (verdict.value,)  # not known where it is empty
        for rank in range(tp):
            found[layer, rank, role] = value if held is None else held.of_rank(rank, tp)
    is_known = bool(found) and all(found.values())
    return report.model_copy(update={"fingerprint": fingerprint_scales(found) if is_known else ""})
