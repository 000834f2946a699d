"""The fingerprint of KV scales as loaded: equal for equal numbers, whatever holds them."""

import hashlib
import struct
from pathlib import Path

import fp8calib
from fp8calib.engines.replay.verdicts import fingerprint_scales
from fp8calib.engines.status import Status
from fp8calib.model.geometry import Role
from tests.engines.check_handmade import PER_HEAD, save_folder, spell

PAIR = ("k_scale", "v_scale")


def test_what_is_not_loaded_has_none(tmp_path: Path) -> None:
    scales = spell(*PAIR, value=[[[0.25]], [[0.5]], [[0.5]]])
    folder = save_folder(tmp_path / "f", scales, quantization=PER_HEAD)
    report = fp8calib.check(folder, engine="vllm").engines["vllm"]  # it has 32 KV heads
    assert report.layers[0].k.status is Status.REFUSED
    assert report.fingerprint == ""


def test_it_is_the_hash_of_layer_rank_role_and_float32() -> None:
    scales = {(1, 0, Role.V): (0.5,), (1, 0, Role.K): (0.1, 0.2)}
    text = b"1 0 k 2\n" + struct.pack("<2f", 0.1, 0.2) + b"1 0 v 1\n" + struct.pack("<f", 0.5)
    assert fingerprint_scales(scales) == hashlib.sha256(text).hexdigest()[:16]
