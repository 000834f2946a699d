"""The fingerprint of KV scales as loaded: equal for equal numbers, whatever holds them."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import fp8calib
from fp8calib.engines.check import check_folder
from fp8calib.engines.replay.fingerprint import add_fingerprints, fingerprint_scales
from fp8calib.engines.replay.folder import open_folder
from fp8calib.engines.replay.verdicts import EngineReport
from fp8calib.engines.status import Status
from fp8calib.model.shapes import Role
from tests.engines.check_handmade import (
    MODELOPT,
    PER_HEAD,
    PER_TENSOR,
    plain_geometry,
    save_folder,
    spell,
)

PAIR = ("k_scale", "v_scale")


def test_it_is_the_hash_of_layer_rank_role_and_float32() -> None:
    scales = {(1, 0, Role.V): (0.5,), (1, 0, Role.K): (0.1, 0.2)}
    text = b"1 0 k 2\n" + struct.pack("<2f", 0.1, 0.2) + b"1 0 v 1\n" + struct.pack("<f", 0.5)
    assert fingerprint_scales(scales) == hashlib.sha256(text).hexdigest()[:16]


def test_equal_heads_are_as_one_number() -> None:
    one, heads = ({(0, 0, Role.K): numbers} for numbers in ((0.25,), (0.25, 0.25)))
    assert fingerprint_scales(one) == fingerprint_scales(heads)


def check_on(tp: int, folder: Path, engine: str = "vllm") -> EngineReport:
    report = check_folder(open_folder(folder), plain_geometry(), [engine], tp)
    return add_fingerprints(report, tp).engines[engine]


def test_dialects_and_engines_with_the_same_numbers_have_the_same(tmp_path: Path) -> None:
    compressed = save_folder(tmp_path / "a", spell(*PAIR, layers=32), quantization=PER_TENSOR)
    names = spell("k_proj.k_scale", "v_proj.v_scale", layers=32)
    modelopt = save_folder(tmp_path / "b", names, quantization=MODELOPT)
    whole = [fp8calib.check(each, engine="vllm").to_json() for each in (compressed, modelopt)]
    first, second = (each["engines"]["vllm"]["fingerprint"] for each in whole)
    assert first == second != ""
    short = save_folder(tmp_path / "c", spell(*PAIR), quantization=PER_TENSOR)
    first, second = (check_on(1, short, each).fingerprint for each in ("vllm", "sglang"))
    assert first == second != ""


def test_other_numbers_ranks_and_heads_have_another(tmp_path: Path) -> None:
    heads = spell(*PAIR, value=[[[0.25]], [[0.5]]])
    folders = {
        "0.25": save_folder(tmp_path / "a", spell(*PAIR, value=0.25), quantization=PER_TENSOR),
        "0.5": save_folder(tmp_path / "b", spell(*PAIR, value=0.5), quantization=PER_TENSOR),
        "heads": save_folder(tmp_path / "c", heads, quantization=PER_HEAD),
        "none": save_folder(tmp_path / "d", {}),
    }
    found = [check_on(tp, folder).fingerprint for folder in folders.values() for tp in (1, 2)]
    assert len(set(found)) == len(found)
    assert "" not in found


def test_what_is_not_loaded_has_none(tmp_path: Path) -> None:
    scales = spell(*PAIR, value=[[[0.25]], [[0.5]], [[0.5]]])
    folder = save_folder(tmp_path / "f", scales, quantization=PER_HEAD)
    report = fp8calib.check(folder, engine="vllm").engines["vllm"]  # it has 32 KV heads
    assert report.layers[0].k.status is Status.REFUSED
    assert report.fingerprint == ""
