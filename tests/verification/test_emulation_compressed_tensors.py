"""Emulated schemes against compressed-tensors' own fake quantization, as llm-compressor runs it."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.lifecycle.forward import fake_quantize, forward_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from torch import nn

from fp8calib.engines.numerics import Numerics
from fp8calib.fp8.formats import E4M3FN
from fp8calib.fp8.schemes import SCHEMES, InputScaling
from fp8calib.geometry.sites import Role, Site
from fp8calib.verification.emulation.emulate import Emulation, EmulationHooks, emulated
from fp8calib.verification.emulation.fake_quantize import Quantizer
from tests import zoo
from tests.verification.by_hand import (
    Subject,
    emulate,
    emulate_scheme,
    make_batch,
    opened,
    plain_forward,
)

PLAIN = Numerics(name="plain")
BATCH = make_batch([20, 7])
SIZES = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "vocab_size": 128}
"""Whole blocks of 128: compressed-tensors refuses inputs that are none."""
PRESETS = {"FP8": "fp8-static", "FP8_DYNAMIC": "fp8-dynamic", "FP8_BLOCK": "fp8-block"}
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("o_proj",), ("down_proj",))
INPUT_SCALE = 0.0137


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    with opened(zoo.build("llama", **SIZES), tmp_path_factory.mktemp("llama")) as found:
        yield found


def make_oracle(model: nn.Module, preset: str) -> Any:
    """Give a copy that compressed-tensors quantizes and dequantizes as it runs."""
    copy = deepcopy(model)
    config = QuantizationConfig(config_groups={preset: ["Linear"]}, ignore=["lm_head"])
    apply_quantization_config(copy, config)
    for layer in copy.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for names in FUSED:
                group = [getattr(block, name) for name in names if hasattr(block, name)]
                for module in group:
                    _set_scales(module, group, preset)
    return copy


def _set_scales(module: Any, group: list[Any], preset: str) -> None:
    args = module.quantization_scheme.weights
    lowest, highest = _extremes(module, group, preset)
    scale, _ = calculate_qparams(lowest, highest, args)
    module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
    if preset == "FP8":
        module.input_scale.data.fill_(INPUT_SCALE)
    module.quantization_status = QuantizationStatus.FROZEN


def _extremes(module: Any, group: list[Any], preset: str) -> tuple[torch.Tensor, torch.Tensor]:
    weight = module.weight.data
    if preset == "FP8":
        extremes = [torch.aminmax(member.weight.data) for member in group]
        return torch.stack([e.min for e in extremes]).min(), torch.stack(
            [e.max for e in extremes]
        ).max()
    if preset == "FP8_DYNAMIC":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    rows, columns = (size // 128 for size in weight.shape)
    blocks = weight.reshape(rows, 128, columns, 128)
    return blocks.amin((1, 3)), blocks.amax((1, 3))


def make_emulation(subject: Subject, preset: str) -> Emulation:
    """Ask the product; the static input scale is a number of this test."""
    scheme = SCHEMES[PRESETS[preset]]
    if preset != "FP8":
        return emulate_scheme(subject, scheme, PLAIN)
    made = emulate_scheme(subject, replace(scheme, inputs=InputScaling.NONE), PLAIN)
    static = Quantizer(fmt=E4M3FN, scale=torch.tensor(INPUT_SCALE))
    sites = (Site(linear.module, Role.INPUT) for _, linear in subject.geometry.linears())
    return replace(made, quantizers=dict.fromkeys(sites, static))


@pytest.mark.parametrize("preset", PRESETS)
def test_weights_are_those_of_compressed_tensors(subject: Subject, preset: str) -> None:
    """At zero tolerance, while the emulation holds."""
    oracle = make_oracle(subject.model, preset)
    emulation = make_emulation(subject, preset)
    hooks = EmulationHooks(emulation.quantizers)
    compared = 0
    with emulated(subject.model, subject.geometry, emulation, hooks, originals=subject.originals):
        for name, module in subject.model.named_modules():
            if not isinstance(module, nn.Linear):
                continue
            other = oracle.get_submodule(name)
            scheme = getattr(other, "quantization_scheme", None)
            expected = other.weight.data
            if scheme is not None:
                expected = forward_quantize(other, expected, "weight", scheme.weights)
                compared += 1
            assert torch.equal(module.weight.data, expected), name
    assert compared == 14


@pytest.mark.parametrize("preset", PRESETS)
def test_hidden_states_are_those_of_compressed_tensors(subject: Subject, preset: str) -> None:
    expected = plain_forward(make_oracle(subject.model, preset), BATCH)
    (found,) = emulate(subject, make_emulation(subject, preset), BATCH)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(found, plain_forward(subject.model, BATCH), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("preset", PRESETS)
def test_inputs_are_those_of_compressed_tensors(subject: Subject, preset: str) -> None:
    """With outliers, and a token of zeros."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, 5, 256, generator=generator) * 3
    x[0, 1, 7], x[2, 4] = 900.0, 0.0
    module = make_oracle(subject.model, preset).model.layers[0].self_attn.q_proj
    args = module.quantization_scheme.input_activations
    expected = forward_quantize(module, x, "input", args)
    quantizer = make_emulation(subject, preset).quantizers[
        Site("model.layers.0.self_attn.q_proj", Role.INPUT)
    ]
    assert torch.equal(quantizer.fake(x).values, expected)


@pytest.mark.parametrize("factor", [0.02, 1.0, 300.0])
def test_the_cache_is_that_of_compressed_tensors(factor: float) -> None:
    """Their kv_cache scheme: per tensor, and per head."""
    config = QuantizationConfig(config_groups={"FP8": ["Linear"]})
    args = config.config_groups["FP8"].input_activations
    generator = torch.Generator().manual_seed(4)
    key = torch.randn(2, 4, 9, 16, generator=generator)
    per_head = key.abs().amax((0, 2, 3)) / 448 * factor
    for scale in (per_head.max(), per_head.reshape(4, 1, 1)):
        expected = fake_quantize(key, scale, None, args)
        assert torch.equal(Quantizer(fmt=E4M3FN, scale=scale).fake(key).values, expected)
