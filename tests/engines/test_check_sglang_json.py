"""Expected outcomes, as seen where SGLang's own loader was run."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from fp8calib.model.geometry import ModelGeometry
from tests.engines.check_handmade import (
    PER_TENSOR,
    ask_sglang_json,
    both,
    plain_geometry,
    statuses,
    values,
)
from tests.formats.handmade import hybrid_stats

GOOD: dict[str, Any] = {
    "model_type": "llama",
    "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.05, "1": 0.04}}},
}


TEXTS = {"deep": "[" * 100_000, "digits": '{"model_type": ' + "9" * 5000 + "}"}
ROWS = json.loads(Path(__file__).with_name("kv_cases.json").read_text())
THROWN_AWAY = ROWS["json that SGLang throws away"]
"""Documents or texts, two of them by name, and a part of the reason."""


def change(**parts: Any) -> dict[str, Any]:
    """Change the good document: `model_type`, `dtype`, `scaling_factor`, or new top-level keys."""
    document = copy.deepcopy(GOOD)
    for key, value in parts.items():
        place = document["kv_cache"] if key in ("dtype", "scaling_factor") else document
        place[key] = value
    return document


def write(path: Path, document: Any) -> Path:
    is_text = isinstance(document, str)
    path.write_text(TEXTS.get(document, document) if is_text else json.dumps(document))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Give where a file may be written."""
    return tmp_path / "scales.json"


@pytest.mark.parametrize(("document", "why"), THROWN_AWAY)
def test_what_the_loader_throws_away_is_one_for_all_layers(
    path: Path, document: Any, why: str
) -> None:
    report = ask_sglang_json(write(path, document), plain_geometry(), 1)

    assert statuses(report) == both("defaulted")
    assert values(report) == [(1.0, 1.0)] * 2
    assert why in report.layers[0].k.why
    assert "vllm-json" in report.layers[0].k.fix


def test_one_bad_rank_is_enough(path: Path) -> None:
    two = {"0": {"0": 0.05, "1": 0.04}, "1": {"0": 0.05, "1": 0.0}}

    report = ask_sglang_json(write(path, change(scaling_factor=two)), plain_geometry(), 2)

    assert ["does not multiply" in layer.k.why for layer in report.layers] == [True, False]


def _hybrid() -> ModelGeometry:
    return hybrid_stats().header.geometry


@pytest.mark.parametrize(
    "geometry",
    [
        _hybrid(),
        *(plain_geometry(model_type=name) for name in ("mixtral", "gpt2", "hunyuan_v1_dense")),
    ],
)
def test_models_that_take_no_file_stop_the_engine(path: Path, geometry: ModelGeometry) -> None:
    report = ask_sglang_json(write(path, change(model_type=geometry.model_type)), geometry, 1)

    assert {status for pair in statuses(report) for status in pair} == {"refused"}
    assert "RuntimeError" in report.layers[0].k.why


def test_a_float_over_a_parameter_stops_the_engine(path: Path) -> None:
    report = ask_sglang_json(write(path, GOOD), plain_geometry(), 1, quantization=PER_TENSOR)

    assert statuses(report) == both("refused")
    assert "TypeError" in report.layers[0].k.why


@pytest.mark.parametrize("architecture", ["LlavaForConditionalGeneration", "LlamaForCausalLM"])
def test_a_class_around_the_text_model_takes_no_file(tmp_path: Path, architecture: str) -> None:
    """SGLang calls `load_kv_cache_scales` of the outermost class alone."""
    geometry = plain_geometry(model_type="llama", architecture=architecture)
    report = ask_sglang_json(tmp_path / "there is none.json", geometry, 1)
    is_refused = "reads no file of scales" in report.layers[0].k.why
    assert is_refused == (architecture == "LlavaForConditionalGeneration")
