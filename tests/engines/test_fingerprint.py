"""The fingerprint of KV scales as loaded: equal for equal numbers, whatever holds them."""

from __future__ import annotations

from pathlib import Path

import fp8calib
from fp8calib.engines.status import Status
from tests.engines.check_handmade import (
    PER_HEAD,
    save_folder,
    spell,
)

PAIR = ("k_scale", "v_scale")


def test_what_is_not_loaded_has_none(tmp_path: Path) -> None:
    scales = spell(*PAIR, value=[[[0.25]], [[0.5]], [[0.5]]])
    folder = save_folder(tmp_path / "f", scales, quantization=PER_HEAD)
    report = fp8calib.check(folder, engine="vllm").engines["vllm"]  # it has 32 KV heads
    assert report.layers[0].k.status is Status.REFUSED
    assert report.fingerprint == ""
