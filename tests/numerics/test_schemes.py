"""The scheme records: which is nearest to a stored linear."""

import pytest

from fp8calib.errors import UsageError
from fp8calib.numerics.schemes import (
    SCHEMES,
    Granularity,
    InputScaling,
    Scaling,
    Scheme,
    find_nearest,
    find_scheme,
)

BLOCK = "fp8-block"
NEAREST = {
    "tensor": {"static": "fp8-static", "token": "fp8-dynamic", "group": "fp8-dynamic"},
    "channel": {"static": "fp8-static", "token": "fp8-dynamic", "group": "fp8-dynamic"},
    "block": {"static": BLOCK, "token": BLOCK, "group": BLOCK},
}


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_a_scheme_is_nearest_to_its_own_granularities(scheme: Scheme) -> None:
    assert find_nearest(scheme) is scheme


@pytest.mark.parametrize("weights", NEAREST)
def test_what_is_no_scheme_is_nearest_to_one_that_engines_treat_alike(weights: str) -> None:
    inputs = {**NEAREST[weights], "none": "w8a16"}
    found = {
        name: find_nearest(Scaling(weights=Granularity(weights), inputs=InputScaling(name))).name
        for name in inputs
    }
    assert found == inputs


def test_an_unknown_scheme_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UsageError, match="int8") as raised:
        find_scheme("int8")
    assert (
        raised.value.hint
        == "known schemes: fp8-static, fp8-dynamic, w8a16, fp8-block, mxfp8, mxfp8-a16"
    )
