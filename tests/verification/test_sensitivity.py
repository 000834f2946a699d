"""Which layers are worth leaving unquantized, from what each costs alone."""

from __future__ import annotations

import pytest

from fp8calib.engines.registry import find_emulated
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.report import SensitivityResult
from fp8calib.verification.sensitivity import find_skippable
from tests.dialects.handmade import make_attention, make_geometry


@pytest.mark.parametrize(
    ("klds", "skipped"),
    [
        ([0.001, 0.009], (1,)),  # of two layers the median must not be half the worse one's
        ([0.009, 0.001], (0,)),
        ([0.001, 0.007], ()),
        ([0.009], ()),
        ([0.001, 0.001, 0.009, 0.009], (2, 3)),
        ([0.001, 0.0, 0.002, 0.02, 0.001], (3,)),
        ([0.0, 0.0, 0.0], ()),
        ([], ()),
    ],
)
def test_layers_that_cost_eight_times_the_median_are_named_in_the_engines_flag(
    klds: list[float], skipped: tuple[int, ...]
) -> None:
    layers = [
        SensitivityResult(layer=index, kld_mean=kld, ppl_ratio=1.0)
        for index, kld in enumerate(klds)
    ]
    candidate = Candidate(name="it")
    geometry = make_geometry([make_attention(index) for index in range(len(klds))])
    found = find_skippable(candidate, geometry, layers, find_emulated("vllm")[1], sequences=8)
    assert found.skip_layers == skipped
    flag = f"--kv-cache-dtype-skip-layers {' '.join(map(str, skipped))}" if skipped else ""
    assert found.flag == flag
    assert [row.kld_mean for row in found.layers] == sorted(klds, reverse=True)


def test_the_flag_names_all_layers_that_share_a_cache() -> None:
    """Layer 3 would read the cache of layer 1 as if it were quantized."""
    layers = [
        SensitivityResult(layer=index, kld_mean=kld, ppl_ratio=1.0)
        for index, kld in enumerate([0.001, 0.02, 0.001, 0.0])
    ]
    attentions = [make_attention(index) for index in range(4)]
    attentions[3] = attentions[3].model_copy(update={"producer": 1})
    candidate = Candidate(name="it")
    geometry = make_geometry(attentions)
    found = find_skippable(candidate, geometry, layers, find_emulated("vllm")[1], sequences=8)
    assert found.flag == "--kv-cache-dtype-skip-layers 1 3"


@pytest.mark.parametrize(("error", "skipped"), [(0.0004, (2,)), (0.0006, ())])
def test_a_layer_stands_out_by_more_than_its_error(error: float, skipped: tuple[int, ...]) -> None:
    """0.009 is 0.001 above eight times the median."""
    layers = [
        SensitivityResult(layer=index, kld_mean=kld, kld_se=error, ppl_ratio=1.0)
        for index, kld in enumerate([0.001, 0.001, 0.009])
    ]
    candidate = Candidate(name="it")
    geometry = make_geometry([make_attention(index) for index in range(3)])
    found = find_skippable(candidate, geometry, layers, find_emulated("vllm")[1], sequences=8)
    assert found.skip_layers == skipped
