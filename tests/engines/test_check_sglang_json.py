"""What SGLang does with a JSON file of scales, as read."""

from pathlib import Path

import pytest

from fp8calib.model.geometry import ModelGeometry
from tests.engines.check_handmade import PER_TENSOR, ask_sglang_json, both, plain_geometry, statuses
from tests.formats.handmade import hybrid_stats


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "scales.json"
    path.write_text('{"kv_cache": {"scaling_factor": {"0": {"0": 0.05, "1": 0.04}}}}')
    return path


def test_its_attention_does_not_multiply_by_the_numbers(path: Path) -> None:
    report = ask_sglang_json(path, plain_geometry(), 1)

    assert statuses(report) == both("misread")
    assert "does not multiply" in report.layers[0].k.why


@pytest.mark.parametrize(
    ("text", "tp"),
    [("[]", 1), ('{"kv_cache": {"scaling_factor": {"rank0": {"0": 0.05}}}}', 1), ("", 2)],
)
def test_other_forms_and_numbers_of_ranks_are_thrown_away(path: Path, text: str, tp: int) -> None:
    path.write_text(text or path.read_text())
    report = ask_sglang_json(path, plain_geometry(), tp)

    assert statuses(report) == both("defaulted")
    assert report.layers[0].k.value == 1.0


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
    report = ask_sglang_json(path, geometry, 1)

    assert {status for pair in statuses(report) for status in pair} == {"refused"}
    assert "RuntimeError" in report.layers[0].k.why


def test_a_float_over_a_parameter_stops_the_engine(path: Path) -> None:
    report = ask_sglang_json(path, plain_geometry(), 1, quantization=PER_TENSOR)

    assert statuses(report) == both("refused")
    assert "TypeError" in report.layers[0].k.why


@pytest.mark.parametrize("architecture", ["LlavaForConditionalGeneration", "LlamaForCausalLM"])
def test_a_class_around_the_text_model_takes_no_file(path: Path, architecture: str) -> None:
    """SGLang calls `load_kv_cache_scales` of the outermost class alone."""
    geometry = plain_geometry(model_type="llama", architecture=architecture)
    report = ask_sglang_json(path, geometry, 1)
    is_refused = "reads no file of scales" in report.layers[0].k.why
    assert is_refused == (architecture == "LlavaForConditionalGeneration")
