"""Hostile and broken folders: a verdict or one clear error, whatever lies in them."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fp8calib.engines.registry import list_defaults
from fp8calib.engines.replay.folder import open_folder
from fp8calib.errors import ModelError
from tests.checkpoint.handmade import describe, pack
from tests.engines.check_handmade import (
    INDEX,
    PER_TENSOR,
    SCALES,
    WEIGHTS,
    ask,
    both,
    plain_geometry,
    save_folder,
    spell,
    statuses,
)

PAIR = ("k_scale", "v_scale")
BY_INDEX = ("vllm", "sglang", "transformers")
K = "model.layers.0.self_attn.k_scale"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Give a folder that vLLM, SGLang and transformers are content with."""
    return save_folder(tmp_path / "f", spell(*PAIR), quantization=PER_TENSOR)


@pytest.mark.parametrize("engine", BY_INDEX)
@pytest.mark.parametrize(
    "target",
    ["gone.safetensors", "../f2/a.safetensors", "/etc/passwd", "a\0b.safetensors", "", "."],
)
def test_an_index_that_names_what_is_not_beside_it_is_refused(
    folder: Path, engine: str, target: str
) -> None:
    weight_map = {"a": WEIGHTS, "b": SCALES, "c": target}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    report = ask(engine, folder)

    assert statuses(report) == both("refused")
    assert engine == "transformers" or "files that are missing" in report.layers[0].k.why


BAD_INDEXES = {
    "empty": "",
    "list": "[]",
    "object": "{}",
    "number": '{"weight_map": 7}',
    "numbers": '{"weight_map": {"a": 7}}',
    "deep": "[" * 100_000,
    "bom": "\ufeff{}",
}


@pytest.mark.parametrize("engine", BY_INDEX)
@pytest.mark.parametrize("text", BAD_INDEXES.values(), ids=BAD_INDEXES)
def test_an_index_that_is_none_is_refused(folder: Path, engine: str, text: str) -> None:
    (folder / INDEX).write_text(text)

    assert statuses(ask(engine, folder)) == both("refused")


HEADERS = {
    "empty": b"",
    "truncated": b"\x00\x01",
    "giant": struct.pack("<Q", 1 << 62) + b"{}",
    "lying": struct.pack("<Q", 1000) + b"{}",
    "no json": pack(b"{nothing"),
    "overlap": pack({K: describe("F32", [1], 0, 4), "b": describe("F32", [1], 2, 6)}, bytes(6)),
    "beyond": pack({K: describe("F32", [1], 0, 4)}, b""),
    "huge": pack({K: describe("F32", [1 << 62, 1 << 62], 0, 4)}, bytes(4)),
    "dtype": pack({K: describe("F99", [1], 0, 4)}, bytes(4)),
    "negative": pack({K: describe("F32", [-1], 0, 4)}, bytes(4)),
    "pointer": b"version https://git-lfs.github.com/spec/v1\n",
}


@pytest.mark.parametrize("engine", list_defaults())
@pytest.mark.parametrize("raw", HEADERS.values(), ids=HEADERS)
def test_a_damaged_file_that_is_opened_is_refused(folder: Path, engine: str, raw: bytes) -> None:
    (folder / SCALES).write_bytes(raw)

    report = ask(engine, folder)

    assert statuses(report) == both("refused")
    assert len(report.layers[0].k.why) < 1000


def test_a_huge_tensor_with_the_name_of_a_scale_is_not_read(folder: Path) -> None:
    save_file({K: torch.zeros(1 << 20)}, folder / SCALES)

    report = ask("vllm", folder)

    assert statuses(report) == both("refused")
    assert "[1048576]" in report.layers[0].k.why


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"{", b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf{}", b"[" * 100_000]
)
def test_a_config_that_cannot_be_read_is_one_error(folder: Path, raw: bytes) -> None:
    (folder / "config.json").write_bytes(raw)

    with pytest.raises(ModelError, match=r"config\.json"):
        open_folder(folder)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_scales_of_draft_layers_change_no_verdict(tmp_path: Path, engine: str) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR, layers=3), quantization=PER_TENSOR)
    report = ask(engine, folder, plain_geometry(num_draft_layers=1))
    assert statuses(report) == [("used", "used")] * 2
    assert any(
        "scales of draft layers (2, such as model.layers.2." in text for text in report.problems
    )
