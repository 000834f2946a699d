"""Statistics of a model in memory, verified on its folder, and the reverse: the same figures."""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from transformers import LlamaForSequenceClassification, LlamaModel

import fp8calib
from fp8calib.errors import ModelError, VerificationError
from fp8calib.verification.emulation.emulate import EmulationHooks
from tests import zoo
from tests.kit.minutes import in_minutes
from tests.kit.pictures import assert_unchanged, take

ROWS = [{"input_ids": [3 + (i * j) % 90 for j in range(1, 33)]} for i in range(6)]


@pytest.fixture(autouse=True)
def _without_notes() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fp8calib.Fp8CalibWarning)
        yield


def test_an_emulation_that_meets_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build("llama")
    monkeypatch.setattr(EmulationHooks, "on_kv", lambda _self, _attention, key, value: (key, value))
    monkeypatch.setattr(EmulationHooks, "on_query", lambda _self, _attention, query: query)
    with pytest.raises(VerificationError, match=r"scale-1.0: nothing was quantized"):
        fp8calib.verify(model, (), ROWS, engine="reference", seq_len=32)


def test_statistics_of_another_shape_are_refused() -> None:
    """The fingerprint is the same, but a layer is missing."""
    model = zoo.build("llama")
    stats = fp8calib.calibrate(model, ROWS, seq_len=32).stats
    geometry = stats.geometry.model_copy(update={"layers": stats.geometry.layers[:1]})
    header = stats.header.model_copy(update={"geometry": geometry})
    broken = type(stats)(header=header, sites=stats.sites, shard=stats.shard)
    with pytest.raises(ModelError, match="the layers of the statistics are not those of the model"):
        fp8calib.verify(model, broken, ROWS, seq_len=32)


@pytest.mark.parametrize("kind", [LlamaModel, LlamaForSequenceClassification])
def test_a_model_without_an_output_head_is_refused(kind: Any) -> None:
    model = kind(zoo.build("llama").config).eval()
    with pytest.raises(ModelError, match=f"{kind.__name__} has no output head"):
        fp8calib.verify(model, (), ROWS, seq_len=32)


def measure_static(model: Any) -> tuple[int, float | None]:
    stats = fp8calib.calibrate(model, ROWS, recipe="w8a8-static", seq_len=32).stats
    report = fp8calib.verify(model, stats, ROWS, scheme="fp8-static", seq_len=32)
    return len(stats.sites), report.candidates[0].kld_mean


@cache
def measure_plain(measure: Callable[[Any], Any]) -> Any:
    return measure(zoo.build("llama"))


@pytest.mark.parametrize(
    "part",
    ["layers", "self_attn", "wrapped layers", *in_minutes("mlp", "model", "wrapped self_attn")],
)
def test_compiled_modules_are_run_as_they_are_written(part: str) -> None:
    """Hooks see q and the inputs of linears, and the model is compiled afterwards as before."""
    model = zoo.build("llama")
    compiled = []
    for index, layer in enumerate(model.model.layers):
        if part == "wrapped layers":
            model.model.layers[index] = torch.compile(layer, backend="eager")
        elif part == "wrapped self_attn":
            layer.self_attn = torch.compile(layer.self_attn, backend="eager")
        elif part != "model":
            compiled.append(layer if part == "layers" else getattr(layer, part))
    for module in [model.model] if part == "model" else compiled:
        module.compile(backend="eager")
    names = [name for name, _ in model.named_modules()]
    assert measure_static(model) == measure_plain(measure_static)
    assert all(module._compiled_call_impl is not None for module in compiled)
    assert [name for name, _ in model.named_modules()] == names


def test_a_live_model_is_left_as_it_was() -> None:
    """Long factors of longrope are written into a buffer; captured outputs leave hooks behind."""
    model = zoo.build(
        "phi3",
        rope_scaling={
            "rope_type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [3.0] * 4,
            "factor": 4.0,
        },
        original_max_position_embeddings=16,
    )
    model.config.output_hidden_states = True

    before = take(model)
    stats = fp8calib.calibrate(model, ROWS, seq_len=32).stats
    assert_unchanged(model, before)
    fp8calib.verify(model, stats, ROWS, seq_len=32)
    assert_unchanged(model, before)
