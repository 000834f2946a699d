"""Emulated weights and inputs against a copy of the model that was quantized by hand."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from fp8calib.numerics.schemes import SCHEMES
from fp8calib.verification.emulation.candidate import Candidate
from tests.doors import make_plan, run_calibration
from tests.kit.minutes import in_minutes
from tests.verification.by_hand import (
    BATCHES,
    FULL,
    PLAIN,
    Recipe,
    Subject,
    cast,
    cast_blocks,
    cast_groups,
    cast_mx,
    cast_rows,
    emulate,
    emulate_scheme,
    is_experts,
    plain_forward,
    quantize_by_hand,
    tensor_scale,
)


def _per_tensor(weight: torch.Tensor, group: list[torch.Tensor]) -> torch.Tensor:
    return cast(weight, tensor_scale(*group))


RECIPES = {
    "fp8-dynamic": Recipe(lambda weight, _: cast_rows(weight), lambda _: cast_rows),
    "w8a16": Recipe(lambda weight, _: cast_rows(weight)),
    "fp8-block": Recipe(lambda weight, _: cast_blocks(weight), lambda _: cast_groups),
    "mxfp8": Recipe(lambda weight, _: cast_mx(weight), lambda _: cast_mx),
    "mxfp8-a16": Recipe(lambda weight, _: cast_mx(weight)),
}
DIFFERENT = ("fp8-dynamic", "fp8-block", "mxfp8")
"""The weights of the others are those of one of these."""


def assert_same(subject: Subject, emulation: Candidate, expected_model: PreTrainedModel) -> None:
    """Compare hidden states: bit for bit without experts, whose kernels add in another order."""
    is_sparse = any(is_experts(module) for module in subject.model.modules())
    for batch, hidden in zip(BATCHES, emulate(subject, emulation, *BATCHES), strict=True):
        expected = plain_forward(expected_model, batch)
        plain = plain_forward(subject.model, batch)
        if not is_sparse:
            assert torch.equal(hidden, expected)
            assert not torch.equal(hidden, plain)
            continue
        real = torch.arange(hidden.shape[1])[None] < torch.tensor(batch.lengths)[:, None]
        # A sum in another order may round a later input to the code beside it: few, and little.
        wrong = (hidden - expected).abs()[real]
        cost = (expected - plain).abs()[real]
        assert float(wrong.median()) < 1e-5
        assert float(wrong.mean()) < 0.05 * float(cost.mean())


@pytest.mark.parametrize("scheme", [*DIFFERENT, "w8a16", *in_minutes("mxfp8-a16")])
def test_a_scheme_does_what_replacing_weights_and_inputs_does(
    subject: Subject, scheme: str
) -> None:
    expected = quantize_by_hand(subject.model, RECIPES[scheme])
    assert_same(subject, emulate_scheme(subject, SCHEMES[scheme], PLAIN), expected)


def test_static_scales_are_those_of_the_calibration(
    subject: Subject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One per input, seen by hand in a plain forward; of experts, one for all of them."""
    folder = tmp_path_factory.mktemp("static")
    subject.model.save_pretrained(folder)
    sequences = list(FULL.input_ids)
    _, stats = run_calibration(folder, make_plan(sequences))
    largest = largest_inputs(subject.model, FULL)
    recipe = Recipe(_per_tensor, lambda name: lambda x: cast(x, torch.tensor(largest[name]) / 448))
    emulation = emulate_scheme(subject, SCHEMES["fp8-static"], PLAIN, stats=stats)
    for site, quantizer in emulation.quantizers.items():
        # One sequence at a time is summed up in another order than a batch.
        assert float(quantizer.scale) == pytest.approx(largest[site.module] / 448, rel=1e-5)  # type: ignore[arg-type]
        largest[site.module] = float(quantizer.scale * 448)  # type: ignore[operator]
    assert_same(subject, emulation, quantize_by_hand(subject.model, recipe))


def largest_inputs(model: PreTrainedModel, batch: Any) -> dict[str, float]:
    """Look at the input of every linear and expert in a plain forward."""
    copy = deepcopy(model)
    found: dict[str, float] = {}

    def keep(name: str, x: torch.Tensor) -> torch.Tensor:
        found[name] = max(found.get(name, 0.0), float(x.abs().max()))
        return x

    watching = Recipe(
        lambda weight, _group: weight, lambda name: lambda x, name=name: keep(name, x)
    )
    watched = quantize_by_hand(copy, watching)
    plain_forward(watched, batch)
    for name in list(found):
        if name.endswith(".experts.gate_proj"):
            found[name.replace("gate_proj", "up_proj")] = found[name]
    return found
