"""The smallest candidate that passes, and what is no choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from fp8calib.verification.judge.smallest import choose_smallest
from fp8calib.verification.report import SCALE_ONE, KvNeed, Verdict
from tests.kit.reports import make_candidate, make_layer, make_small

SIZES = {SCALE_ONE: 200, "overlay": 200, "static": 100, "dynamic": 104, "block": 106}
KLDS = {SCALE_ONE: 0.002, "overlay": 0.001, "static": 0.03, "dynamic": 0.02, "block": 0.01}
PASS, WARN, FAIL = Verdict.PASS, Verdict.WARN, Verdict.FAIL


@pytest.mark.parametrize(
    ("verdicts", "left_out", "need", "chosen"),
    [
        ({"static": PASS, "dynamic": PASS, "block": PASS, "overlay": PASS}, (), "yes", "dynamic"),
        ({"static": PASS, "block": PASS}, (), "yes", "static"),
        ({"dynamic": WARN, "block": Verdict.NO_DIFFERENCE}, (), "yes", "block"),
        ({"static": FAIL, "overlay": PASS, SCALE_ONE: PASS}, (), "cannot-tell", "overlay"),
        ({"static": FAIL, "overlay": PASS, SCALE_ONE: PASS}, (), "no", SCALE_ONE),
        ({"static": FAIL, "overlay": PASS, SCALE_ONE: WARN}, (), "no", "overlay"),
        ({"static": PASS, "overlay": PASS}, ("static",), "yes", "overlay"),
        ({"static": WARN, "dynamic": Verdict.CANNOT_TELL}, (), "yes", ""),
    ],
)
def test_of_sizes_that_are_alike_the_smallest_loss_is_chosen(
    verdicts: Mapping[str, Verdict], left_out: Sequence[str], need: str, chosen: str
) -> None:
    def spell(name: str) -> str:
        return name if name == SCALE_ONE else f"out/{name}"

    candidates = tuple(
        make_candidate(spell(name), verdict=verdict, kld_mean=KLDS[name], kld_se=0.001)
        for name, verdict in verdicts.items()
    )
    kv = KvNeed.model_construct(answer=need)
    layers = (make_layer("out/overlay", 0), make_layer(SCALE_ONE, 0))
    report = make_small(candidates=candidates, layers=layers, kv=kv)
    sizes = {name: size for name, size in SIZES.items() if name not in left_out}
    found = choose_smallest(report, sizes)
    assert found.details == report.decision.details
    if not chosen:
        assert not found.candidate
        assert found.headline == (
            "No choice passes the gate; the nearest, dynamic, gets cannot-tell: between 1.01 and "
            "1.05."
        )
    else:
        assert found.candidate == spell(chosen)
        place = "the model itself" if chosen == SCALE_ONE else spell(chosen)
        assert found.headline == f"Serve {place}: KLD {KLDS[chosen]:.4f} ± 0.0010."
    unusable = report.model_copy(update={"unusable": tuple(spell(each) for each in verdicts)})
    assert not choose_smallest(unusable, sizes).candidate
