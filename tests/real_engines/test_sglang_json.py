"""What `check` says of a JSON file is what SGLang's own loader returns."""

import json
from pathlib import Path
from typing import Any

import pytest

from fp8calib.engines.status import Status
from tests.engines.check_handmade import (
    ask_sglang_json,
    plain_geometry,
)
from tests.engines.test_check_sglang_json import GOOD, change
from tests.kit.numbers import finite
from tests.real_engines.sglang_sources import Loader, extract_loader

FACTORS = (
    '{"0": {"0": 0.05, "1": 0.04}}',
    '{"rank0": {"0": 0.05, "1": 0.04}}',
    '{"0": {"0": true, "1": "0.1"}}',
    '{"00": {" 0": 1, "1.0": 0.1}}',
    '{"0": {"0": 7, "0": 1, "1": 0.1}}',
    '{"0": {"0": NaN, "1": 0}}',
    '{"0": {"0": [0.1, 0.2], "1": 0.1}}',
    '{"0": {"_comment": "x", "0": 0.1, "1": 0.1}}',
    '{"0": {"0": 0.1}}',
    '{"0": {"0": 0.1, "1": 0.1, "2": 0.1}}',
    '{"0": {"-1": 0.1, "0": 0.1}}',
    '{"0": {"1e0": 0.1, "0": 0.1}}',
    '{"0": {"0": 1e400, "1": -0.5}}',
    '{"0": {"0": 0.1, "1": 0.1}, "1": {"0": 0.2, "1": 0.1}}',
    "{}",
    "[]",
)
DOCUMENTS: list[Any] = [
    GOOD,
    change(model_type=None),
    change(model_type="qwen"),
    {"kv_cache": GOOD["kv_cache"]},
    change(dtype="float8_e4m3fnuz"),
    change(mlp={}, _comment=1),
]
TEXTS = [
    *(json.dumps(document) for document in DOCUMENTS),
    *(json.dumps(GOOD).replace('{"0": {"0": 0.05, "1": 0.04}}', text) for text in FACTORS),
    "",
    "\ufeff" + json.dumps(GOOD),
    "[" * 100_000,
]


@pytest.fixture(scope="module")
def loader() -> Loader:
    """Give SGLang's function."""
    return extract_loader()


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("number", range(len(TEXTS)))
def test_sglangs_loader_returns_what_check_says(
    tmp_path: Path, loader: Loader, number: int, tp: int
) -> None:
    path = tmp_path / "scales.json"
    path.write_text(TEXTS[number])
    ranks = [dict(loader(str(path), rank, tp, 2, "llama")) for rank in range(tp)]
    expected = {i: finite([float(rank.get(i, 1.0)) for rank in ranks]) for i in range(2)}

    report = ask_sglang_json(path, plain_geometry(), tp)

    assert {layer.layer: layer.k.value for layer in report.layers} == expected
    is_empty = not any(ranks)
    assert all((layer.k.status is Status.DEFAULTED) == is_empty for layer in report.layers)
