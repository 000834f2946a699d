"""Hostile and broken folders: a verdict or one clear error, whatever lies in them."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fp8calib.commands.check import CheckResult
from fp8calib.engines.check import check_folder
from fp8calib.engines.registry import DEFAULT_ENGINES
from fp8calib.engines.replay.folder import open_folder
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
from tests.kit.minutes import HAS_MINUTES

PAIR = ("k_scale", "v_scale")
BY_INDEX = ("vllm", "sglang", "transformers")
K = "model.layers.0.self_attn.k_scale"


_BOUNDED = settings(
    max_examples=250 if HAS_MINUTES else 30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


_METHODS = ("compressed-tensors", "fp8", "modelopt", "quark", "awq")


_LEAF = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["float", "static", "re:.*", "dense", "compressed", "0", "rank0", "llama"])
    | st.text(max_size=5)
)
_JSON = st.recursive(
    _LEAF,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=3) | st.sampled_from(["0", "1", "00"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


_KEYS = (
    *("config_groups", "kv_cache_scheme", "ignore", "format", "quantization_status", "export"),
    *("layer_quant_config", "activation_scheme", "quant_algo", "quantization", "strategy"),
)


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


@pytest.mark.parametrize("engine", DEFAULT_ENGINES)
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


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_scales_of_draft_layers_change_no_verdict(tmp_path: Path, engine: str) -> None:
    folder = save_folder(tmp_path / "f", spell(*PAIR, layers=3), quantization=PER_TENSOR)
    report = ask(engine, folder, plain_geometry(num_draft_layers=1))
    assert statuses(report) == [("used", "used")] * 2
    assert any(
        "scales of draft layers (2, such as model.layers.2." in text for text in report.problems
    )


@_BOUNDED
@given(
    method=st.sampled_from(_METHODS) | _JSON,
    parts=st.dictionaries(st.sampled_from(_KEYS), _JSON, max_size=5),
    is_ours=st.booleans(),
)
def test_no_config_makes_it_stumble(
    folder: Path, method: object, parts: dict[str, Any], is_ours: bool
) -> None:
    start = dict(PER_TENSOR) if is_ours else {}
    quantization = {**start, "quant_method": method, **parts}
    document = {"model_type": "llama", "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(document))

    reports = check_folder(open_folder(folder), plain_geometry(), DEFAULT_ENGINES, 1)

    assert tuple(reports) == DEFAULT_ENGINES
    json.dumps(CheckResult(engines=reports).to_json(), allow_nan=False)
