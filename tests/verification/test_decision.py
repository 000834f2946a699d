"""Decisions from figures made by hand: whether scales are needed, and what is recommended."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fp8calib.verification.judge.decide import choose_smallest, explain_broken
from fp8calib.verification.judge.decide import conclude as conclude_report
from fp8calib.verification.judge.fits import assess_need, describe_damage, is_damaged, list_losing
from fp8calib.verification.report import (
    SCALE_ONE,
    CandidateResult,
    Decision,
    KvNeed,
    LayerResult,
    PairedAnswer,
    PairedResult,
    Remedy,
    Verdict,
)
from tests.kit.reports import make_candidate, make_layer, make_small


def settle(
    *,
    candidates: Sequence[CandidateResult],
    layers: Sequence[LayerResult],
    fits: Mapping[str, Sequence[LayerResult]],
    kv: KvNeed | None,
    paired: Sequence[PairedResult] = (),
    refused: Sequence[str] = (),
    **more: Any,
) -> Decision:
    """Conclude from figures made by hand; rows of `fits` have the scales of those of `layers`."""
    scales = {(each.candidate, each.site): each.scale for each in layers}
    fitted = {
        (name, each.site): each.model_copy(
            update={"candidate": name, "scale": scales.get((name, each.site))}
        )
        for name, rows in fits.items()
        for each in rows
    }
    others = [each for each in layers if (each.candidate, each.site) not in fitted]
    removed = tuple(pair for pair in paired if pair.base == SCALE_ONE)
    report = make_small(
        candidates=tuple(candidates),
        layers=(*fitted.values(), *others),
        kv=kv and kv.model_copy(update={"removed": removed}),
        comparisons=tuple(paired),
        unusable=tuple(refused),
        **more,
    )
    return conclude_report(report).decision


def fit(layer: int, role: str = "v", *, loss_db: float = 0.0, **more: Any) -> LayerResult:
    """Make a row whose scale loses nothing against a fitted one, unless told."""
    fields = {"loss_db": loss_db, "worst_db": 30.0 - loss_db, **more}
    return make_layer("it", layer, role, site=f"layers.{layer}.attn.{role}", **fields)


def candidate(
    name: str, kld: float, verdict: Verdict = Verdict.PASS, **more: Any
) -> CandidateResult:
    """Make a candidate of which only the divergence matters."""
    values: dict[str, Any] = {"ppl_ratio": 1.0, "ppl_ratio_se": 0.0, "top1_agreement": 1.0}
    values |= {"kld_mean": kld, "kld_se": 0.0001, "verdict": verdict, "verdict_why": "why"}
    return make_candidate(name, **values | more)


def row(name: str, role: str = "v", layer: int = 3, **more: Any) -> LayerResult:
    values: dict[str, Any] = {"site": f"layers.3.attn.{role}", "sqnr_db": 31.0}
    return make_layer(name, layer, role, **values | {"amax": 3.0, "scale": 0.01} | more)


def pair(
    name: str, base: str, difference: float, answer: PairedAnswer, **more: Any
) -> PairedResult:
    values: dict[str, Any] = {"se": 0.0005, "margin": 0.001}
    return PairedResult(
        candidate=name, base=base, difference=difference, answer=answer, **values | more
    )


CLIPS = fit(3, loss_db=28.0, worst_db=2.0, lost_clipped=0.8, clips=True)
UNDERFLOWS = fit(5, "k", loss_db=2.0, worst_db=28.0, lost_flushed=0.004)
QUERY = fit(7, "q", loss_db=25.0, worst_db=5.0, lost_flushed=0.9)
WORSE, UNSURE, SAME = "worse", "cannot-tell", "no-difference"
PASS, WARN, FAIL = Verdict.PASS, Verdict.WARN, Verdict.FAIL


def need(answer: PairedAnswer | None, *losing: LayerResult) -> KvNeed:
    """Assess the need where scale 1.0 against fitted scales is `answer`."""
    if answer is None:
        return assess_need(losing, (0.006, 0.0001), None, [])
    added = pair(SCALE_ONE, "scales that fit", 0.002, answer, tokens_to_tell=123_456)
    return assess_need(losing, (0.004, 0.0002), added, [])


@pytest.mark.parametrize(
    ("losing", "answer", "expected"),
    [
        ((), None, "no"),
        ((), WORSE, "no"),  # no site loses: the texts round differently by chance
        ((UNDERFLOWS,), WORSE, "yes"),
        ((UNDERFLOWS,), UNSURE, "cannot-tell"),
        ((UNDERFLOWS,), SAME, "no"),
        ((UNDERFLOWS,), "better", "no"),
        ((UNDERFLOWS,), None, "cannot-tell"),
        ((CLIPS,), UNSURE, "yes"),
        ((UNDERFLOWS, QUERY), SAME, "yes"),
    ],
)
def test_sites_and_divergence_decide_together(
    losing: tuple[LayerResult, ...], answer: PairedAnswer | None, expected: str
) -> None:
    found = need(answer, *losing)
    assert found.answer == expected
    assert found.sites == tuple(each.site for each in losing)


@pytest.mark.parametrize(
    ("one", "is_losing", "is_destroyed"),
    [
        (fit(0, loss_db=0.99), False, False),
        (fit(0, loss_db=1.01), True, False),
        (fit(0, lost_clipped=0.0011), True, False),
        (fit(0, lost_clipped=0.011), True, True),
        (fit(0, loss_db=0.5, worst_db=3.0), False, False),  # no scale of the tensor helps that head
        (fit(0, loss_db=1.1, worst_db=14.9), True, True),
        (fit(0, loss_db=2.9, lost_flushed=0.5), True, False),
        (fit(0, loss_db=3.1, lost_flushed=0.011), True, True),
        (fit(0, loss_db=3.1, lost_flushed=0.009), True, False),
        (fit(0, loss_db=0.4, lost_flushed=0.033), False, False),  # small values without energy
    ],
)
def test_what_a_fitted_scale_would_keep_is_a_loss(
    one: LayerResult, is_losing: bool, is_destroyed: bool
) -> None:
    assert bool(list_losing([one, *(fit(layer) for layer in range(1, 9))])) is is_losing
    assert is_damaged(one) is is_destroyed
    assert bool(describe_damage([fit(1), one])) is is_destroyed


def test_many_small_losses_count_together() -> None:
    assert not list_losing([fit(layer, loss_db=0.3) for layer in range(8)])
    assert len(list_losing([fit(layer, loss_db=0.5) for layer in range(8)])) == 8
    assert not list_losing([fit(0, loss_db=0.9), *(fit(layer) for layer in range(1, 8))])


def conclude(
    found: KvNeed,
    *scaled: CandidateResult,
    fits: dict[str, list[LayerResult]] | None = None,
    one: CandidateResult | None = None,
    **more: Any,
) -> Decision:
    """Decide on candidates with KV scales beside scale 1.0."""
    unscaled = one or candidate(SCALE_ONE, 0.006)
    paired = [pair(each.name, SCALE_ONE, -0.002, "better") for each in scaled]
    losing = [each for each in (CLIPS, UNDERFLOWS, QUERY) if each.site in found.sites]
    return settle(
        candidates=(*scaled, unscaled),
        layers=[row(each.name) for each in (*scaled, unscaled)],
        fits={each.name: [fit(3)] for each in scaled} | {SCALE_ONE: losing} | (fits or {}),
        kv=found,
        paired=paired,
        **more,
    )


NO, YES = need(None), need(WORSE, CLIPS)
MINE = candidate("mine", 0.004)
NEEDS = {"no": NO, "yes": YES, "unsure": need(UNSURE, UNDERFLOWS)}
KLD = {SCALE_ONE: 0.006, "mine": 0.004, "other": 0.004, "a": 0.03, "b": 0.02, "c": 0.01}
ADDS = "At scale 1.0 v of layer 3 clips, which adds KLD +0.0020 ± 0.0005 to the 0.0040 ± 0.0002"


def spell(name: str) -> str:
    return SCALE_ONE if name == "1.0" else name


def decide(needs: str, named: str, more: str) -> Decision:
    """Decide on a row of `decisions.tsv`."""
    made: dict[str, CandidateResult] = {}
    for each in named.split():
        name, _, given = each.partition("=")
        verdict, kld, agreement = [*given.split(":"), "", ""][:3]
        name = spell(name)
        made[name] = candidate(
            name,
            float(kld or KLD[name]),
            Verdict(verdict or "pass"),
            top1_agreement=float(agreement or 1),
        )
    one = made.pop(SCALE_ONE, candidate(SCALE_ONE, 0.006))
    flags = dict(each.partition(":")[::2] for each in more.split())
    options: dict[str, Any] = {"has_gate": "gate" in flags, "is_strict": "strict" in flags}
    options["refused"] = [spell(flags["refused"])] if "refused" in flags else []
    if "ppl" in flags:
        options["broken"] = explain_broken(float(flags["ppl"]), 49_152)
    if needs != "weights":
        fits = {flags["clips"]: [CLIPS]} if "clips" in flags else {}
        return conclude(NEEDS[needs], *made.values(), one=one, fits=fits, **options)
    answer = flags.get("a")
    return settle(
        candidates=(*made.values(), one),
        layers=[row(name, "weight") for name in made],
        fits={},
        kv=None,
        paired=[pair("a", name, 0.001, answer) for name in made if answer],
        **options,
    )


def describe(**more: Any) -> Decision:
    """Describe a weight, or an input whose scale covers 6.6, of a candidate that passes."""
    values: dict[str, Any] = {"role": "input", "scale": 6.6 / 448, "largest": 6.6, "sqnr_db": 9.0}
    layers = [row("mine", **values | more)]
    return settle(candidates=[candidate("mine", 0.1)], layers=layers, fits={}, kv=None)


def misfit(**more: Any) -> Decision:
    """Decide on KV scales that do not fit layer 3."""
    return conclude(YES, MINE, fits={"mine": [fit(3, **more)]})


def query() -> Decision:
    """Scales of K and V do not change q: they fix layer 3, and leave layer 7."""
    return settle(
        candidates=(MINE, candidate(SCALE_ONE, 0.1)),
        layers=[row("mine"), row("mine", "q", site=QUERY.site, layer=7, scale=1.0), row(SCALE_ONE)],
        fits={"mine": [QUERY], SCALE_ONE: [CLIPS, QUERY]},
        kv=need(WORSE, CLIPS, QUERY),
    )


def wrong(db: float, *roles: str) -> Decision:
    """Decide on a checkpoint that fails, whose scales of V clip if it has any."""
    layers = [row("q", role, sqnr_db=db) for role in roles]
    fits = {"q": [CLIPS]} if "v" in roles else {}
    return settle(candidates=[candidate("q", 0.5, FAIL)], layers=layers, fits=fits, kv=None)


CASES: list[tuple[str, Callable[[], Decision], Remedy, str, str]] = [
    # what is decided, from what, the remedy, the headline, and a line of the details
    ("weights: wrong scales", lambda: wrong(-143.0, "weight"), "check", "",
     "The scales of layers.3.attn.weight are wrong"),
    ("weights: scales that fit", lambda: wrong(31.0, "weight"), "find-layers", "", ""),
    ("weights: wrong scales of a cache", lambda: wrong(31.0, "weight", "v"), "check", "",
     f"The scales of {CLIPS.site} are wrong"),
    ("weights: distorted", lambda: describe(role="weight", sqnr_db=12.0, scale=None), "use",
     "", "mine: attn.weight of layer 3 is distorted."),
    ("an input clips", lambda: describe(amax=12.0, clipped=4e-6, flushed=6.7e-4), "use",
     "", "mine: attn.input of layer 3 clips."),
    ("an input is distorted", lambda: describe(amax=6.0, flushed=0.25), "use", "",
     "mine: attn.input of layer 3 is distorted."),
    ("v is zeroed", lambda: misfit(loss_db=2.0), "calibrate", "",
     "mine: v of layer 3 is partly zeroed."),
    ("v clips", lambda: misfit(loss_db=5.0, clips=True, lost_flushed=0.02), "calibrate", "",
     "mine: v of layer 3 clips."),
    ("q has no scale", query, "scale-query",
     "This model needs KV scales, and mine has no scale for q of layer 7.",
     "At scale 1.0 v of layer 3 clips and q of layer 7 is partly zeroed, "),
    ("the cost of scales that fit is told once",
     lambda: conclude(YES, MINE.model_copy(update={"kld_se": 0.0002})), "use", "",
     f"{ADDS} that FP8 costs with scales that fit."),
]  # fmt: skip


for line in Path(__file__).with_name("decisions.tsv").read_text("utf-8").splitlines()[1:]:
    name, *given = ("" if cell == "-" else cell for cell in line.split("\t"))
    CASES.append((name, partial(decide, *given[:3]), given[3], *given[4:]))


@pytest.mark.parametrize(
    ("make", "remedy", "headline", "line"), [pytest.param(*each, id=name) for name, *each in CASES]
)
def test_the_decision_is(
    make: Callable[[], Decision], remedy: Remedy, headline: str, line: str
) -> None:
    found = make()
    assert found.remedy == remedy
    assert found.headline.startswith(headline)
    assert not headline.endswith(".") or found.headline == headline
    assert any(each.startswith(line) for each in found.details.splitlines() or [""])


def test_the_command_serves_what_the_answer_says_to_use() -> None:
    found = settle(
        candidates=(MINE, candidate("fp8", 0.03), candidate(SCALE_ONE, 0.006)),
        layers=[row("mine"), row("fp8", "weight"), row(SCALE_ONE)],
        fits={"mine": [fit(3)], SCALE_ONE: []},
        kv=NO,
        paired=[pair("mine", SCALE_ONE, -0.002, "better")],
    )
    assert found.headline.startswith("fp8 costs KLD ")
    assert (found.remedy, found.candidate) == ("use", "fp8")


# --- the smallest candidate that passes, and what is no choice -----------------------------------


SIZES = {SCALE_ONE: 200, "overlay": 200, "static": 100, "dynamic": 104, "block": 106}
KLDS = {SCALE_ONE: 0.002, "overlay": 0.001, "static": 0.03, "dynamic": 0.02, "block": 0.01}


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
            "1.05. `quantize --scheme w8a16` or `gptq` may lose less."
        )
    else:
        assert found.candidate == spell(chosen)
        place = "the model itself" if chosen == SCALE_ONE else spell(chosen)
        assert found.headline == f"Serve {place}: KLD {KLDS[chosen]:.4f} ± 0.0010."
    unusable = report.model_copy(update={"unusable": tuple(spell(each) for each in verdicts)})
    assert not choose_smallest(unusable, sizes).candidate
