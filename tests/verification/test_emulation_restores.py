"""After an emulation the model is what it was: weights, hooks, attributes, interfaces, forward."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fp8calib.engines.arithmetic import Numerics
from fp8calib.errors import VerificationError
from fp8calib.model.topology import find_text_decoder
from fp8calib.numerics.formats import E4M3FN
from fp8calib.numerics.schemes import SCHEMES, Granularity
from fp8calib.verification.candidates import emulate_kv, make_unscaled_table
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.emulate import EmulationHooks, emulated
from fp8calib.verification.emulation.weights import Changed, WeightParameter
from fp8calib.verification.token_scores import open_lm_head
from tests import zoo
from tests.kit.pictures import assert_unchanged, take
from tests.verification.by_hand import (
    PADDED,
    Subject,
    emulate,
    emulate_scheme,
    opened,
    plain_forward,
)

FAMILIES = ("llama", "gpt2", "mixtral", "gpt_oss", "falcon", "gemma3n_text", "qwen3_next")
WITH_QUERY = Numerics(name="query", quantizes_query=True)


class Interrupted(Exception):  # noqa: N818 -- stands for anything that may happen
    """What a test raises in the middle."""


def make_emulation(subject: Subject, scheme: str = "fp8-dynamic") -> Candidate:
    """Quantize everything there is: K, V, q, inputs and weights."""
    table = make_unscaled_table(subject.geometry, E4M3FN)
    made = emulate_scheme(subject, SCHEMES[scheme], WITH_QUERY)
    return replace(made, quantizers={**emulate_kv(table, WITH_QUERY), **made.quantizers})


@pytest.fixture(scope="module", params=FAMILIES)
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    with opened(zoo.build(request.param), tmp_path_factory.mktemp("zoo") / "m") as found:
        yield found


class _Failing:
    """A change of weights that stops half-way, with one parameter already overwritten."""

    def __init__(self, parameters: tuple[WeightParameter, ...]) -> None:
        self.parameters = parameters

    def apply(self, values: Mapping[str, torch.Tensor]) -> Iterator[Changed]:
        values[self.parameters[0].name].fill_(7.0)
        damage = torch.zeros(6, dtype=torch.float64)
        yield self.parameters[0], damage, (Granularity.TENSOR, 1.0, 1.0)
        raise Interrupted


@pytest.mark.parametrize("error", [None, Interrupted, KeyboardInterrupt, _Failing])
def test_an_emulation_leaves_nothing_behind(subject: Subject, error: Any) -> None:
    """However it ends: well, by an error inside, or while weights are changed."""
    before, plain = take(subject.model), plain_forward(subject.model, PADDED)
    emulation = make_emulation(subject)
    if error is _Failing:
        first, second, *_ = emulation.weights
        emulation = Candidate(weights=(first, _Failing(second.parameters)))
    hooks = EmulationHooks(emulation)

    def run_and_fail() -> None:
        with emulated(subject.prepared, hooks) as run:
            assert not torch.equal(run(PADDED), plain)
            assert any(module._forward_pre_hooks for module in subject.model.modules())
            if error is not None:
                raise error

    if error is None:
        run_and_fail()
    else:
        with pytest.raises(Interrupted if error is _Failing else error):
            run_and_fail()
    assert_unchanged(subject.model, before)
    assert torch.equal(plain_forward(subject.model, PADDED), plain)


def test_an_offloaded_weight_is_refused_and_the_others_come_back(tmp_path: Path) -> None:
    with opened(zoo.build("llama"), tmp_path / "m") as subject:
        before = take(subject.model)
        emulation = make_emulation(subject)
        linear = subject.model.model.layers[1].mlp.down_proj
        weight = linear.weight
        linear.weight = nn.Parameter(weight.detach().to("meta"), requires_grad=False)
        with pytest.raises(
            VerificationError, match=r"layers\.1\.mlp\.down_proj\.weight is offloaded"
        ):
            emulate(subject, emulation, PADDED)
        linear.weight = weight
        assert_unchanged(subject.model, before)


def test_the_decoder_gets_its_forward_back(subject: Subject) -> None:
    before = take(subject.model)
    decoder = find_text_decoder(subject.model)[1]
    with open_lm_head(subject.model) as logits:
        assert "forward" in vars(decoder)
        logits(torch.zeros(3, subject.model.config.hidden_size))
    assert_unchanged(subject.model, before)
    with pytest.raises(Interrupted), open_lm_head(subject.model):
        raise Interrupted
    assert_unchanged(subject.model, before)
