"""The decision: the scale that was broken, whether scales are needed, what is recommended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from fp8calib.formats.table import ScaleTable
from fp8calib.model.shapes import Role, Site
from fp8calib.numerics.formats import E4M3FN
from fp8calib.verification.candidates import build_kv_candidate, build_unscaled
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.damage import Damage
from fp8calib.verification.judge.decide import conclude as conclude_report
from fp8calib.verification.judge.decide import explain_broken
from fp8calib.verification.judge.fits import (
    assess_need,
    describe_damage,
    is_damaged,
    list_losing,
    loses,
)
from fp8calib.verification.report import (
    SCALE_ONE,
    CandidateResult,
    Decision,
    KvNeed,
    LayerResult,
    PairedAnswer,
    PairedResult,
    Remedy,
    SiteFit,
    Verdict,
    VerifyReport,
)
from fp8calib.verification.verify import Verification, Verified, verify
from tests import zoo
from tests.doors import Silent, make_plan
from tests.kit.reports import make_candidate, make_layer, make_small
from tests.verification import by_hand
from tests.verification.by_hand import PLAIN, HandCache, make_table, opened, plain_forward
from tests.zoo import draw

SEQUENCES = draw([20] * 12)
LAYERS = 4


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
    report = make_small(
        candidates=tuple(candidates),
        layers=(*fitted.values(), *others),
        kv=kv,
        comparisons=tuple(paired),
        unusable=tuple(refused),
        **more,
    )
    return conclude_report(report).decision


def build() -> PreTrainedModel:
    """Build a model whose attention matters: a random one hardly looks back."""
    model = zoo.build("llama", num_hidden_layers=LAYERS)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 40
            layer.self_attn.o_proj.weight *= 40
    return model


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[by_hand.Subject]:
    with opened(build(), tmp_path_factory.mktemp("llama") / "m") as found:
        yield found


@pytest.fixture(scope="module")
def amaxes(subject: by_hand.Subject) -> dict[Site, float]:
    """Look at K and V of all sequences by hand."""
    cache = HandCache(subject.model.config, dict.fromkeys(range(LAYERS), (torch.clone,) * 2))
    plain_forward(subject.model, by_hand.make_batch([20] * 12), cache)
    return {
        Site(f"model.layers.{index}.self_attn", role): float(x.abs().max())
        for index, pair in cache.seen.items()
        for role, x in zip((Role.K, Role.V), pair, strict=True)
    }


def ask(subject: by_hand.Subject, tables: dict[str, ScaleTable]) -> VerifyReport:
    """Verify tables of KV scales, and scale 1.0 beside them."""
    candidates = [build_kv_candidate(name, t, PLAIN, origin="test") for name, t in tables.items()]
    unscaled = build_unscaled(SCALE_ONE, subject.geometry, E4M3FN, PLAIN)
    return compare(subject, *candidates, unscaled).report


def compare(subject: by_hand.Subject, *candidates: Candidate) -> Verified:
    asked = Verification(
        model="tiny",
        geometry=subject.geometry,
        numerics=PLAIN,
        candidates=candidates,
        plan=make_plan(SEQUENCES),
        batch_size=4,
    )
    return verify(asked, subject.prepared, Silent())


@pytest.mark.parametrize("layer", [0, LAYERS - 1])
@pytest.mark.parametrize("role", [Role.K, Role.V])
@pytest.mark.parametrize(
    ("factor", "verb"), [(1 / 64, "clips: its scale is too small"), (2.0**14, "underflows")]
)
def test_a_broken_scale_is_the_first_thing_the_report_names(
    subject: by_hand.Subject,
    amaxes: dict[Site, float],
    layer: int,
    role: Role,
    factor: float,
    verb: str,
) -> None:
    """Divided by 64 it clips, times 2**14 it flushes to zero; in the first and the last layer."""
    good = {site: amax / 448 * 1.2 for site, amax in amaxes.items()}
    broken = Site(f"model.layers.{layer}.self_attn", role)
    bad = {**good, broken: good[broken] * factor}
    report = ask(subject, {"good": make_table(subject, good), "bad": make_table(subject, bad)})
    results = {candidate.name: candidate for candidate in report.candidates}
    assert results["bad"].kld_mean > results["good"].kld_mean * (2 if factor < 1 else 1.02)
    named = next(line for line in report.decision.details.splitlines() if line.startswith("bad: "))
    assert named.startswith(f"bad: {broken} (layer {layer}, amax ")
    assert verb in named.partition(";")[0]
    rows = [row for row in report.layers if row.candidate == "bad"]
    assert rows[0].site == str(broken)
    assert "good: " not in report.decision.details
    assert results["bad"].verdict is Verdict.FAIL
    assert f"{broken} (layer {layer}) is destroyed" in results["bad"].verdict_why
    share = rows[0].clipped if factor < 1 else rows[0].flushed
    assert share > 0.1


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("role", [Role.K, Role.V])
def test_a_scale_that_underflows_is_named_in_a_model_of_few_layers(
    tmp_path: Path, role: Role, num_layers: int
) -> None:
    """One of two layers, or the only one, is half of all there is to compare with."""
    model = zoo.build("llama", num_hidden_layers=num_layers)
    cache = HandCache(model.config, dict.fromkeys(range(num_layers), (torch.clone,) * 2))
    plain_forward(model, by_hand.make_batch([20] * 12), cache)
    values = {
        Site(f"model.layers.{index}.self_attn", role): float(x.abs().max()) / 448
        for index, pair in cache.seen.items()
        for role, x in zip((Role.K, Role.V), pair, strict=True)
    }
    broken = Site(f"model.layers.{num_layers - 1}.self_attn", role)
    with opened(model, tmp_path / "m") as subject:
        table = make_table(subject, {**values, broken: values[broken] * 2.0**14})
        report = ask(subject, {"bad": table})
    named = report.decision.details.splitlines()[-1]
    assert named.startswith(f"bad: {broken} (layer {num_layers - 1}, amax ")
    assert "underflows" in named.partition(";")[0]
    assert report.candidates[0].verdict is Verdict.FAIL
    assert f"{broken} (layer {num_layers - 1}) is destroyed" in report.candidates[0].verdict_why


def test_a_layer_that_clips_at_one_is_named_and_scales_are_advised(
    amaxes: dict[Site, float], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """V of layers 1 and 2 is 4096 times as large, and o undoes it: the model is the same."""
    model = build()
    with torch.no_grad():
        for layer in (1, 2):
            model.model.layers[layer].self_attn.v_proj.weight *= 4096
            model.model.layers[layer].self_attn.o_proj.weight /= 4096
    enlarged = {Site(f"model.layers.{layer}.self_attn", Role.V) for layer in (1, 2)}
    good = {
        site: amax / 448 * 1.2 * (4096 if site in enlarged else 1) for site, amax in amaxes.items()
    }
    with opened(model, tmp_path_factory.mktemp("large") / "m") as subject:
        report = ask(subject, {"good": make_table(subject, good)})
        alone = ask(subject, {})
    for found in (report, alone):
        assert found.kv is not None
        assert (found.kv.answer, found.kv.layers) == ("yes", (1, 2))
        added = found.kv.added_by_one
        assert added is not None
        assert added.answer is PairedAnswer.WORSE
        assert "\nAt scale 1.0 v of layers 1 and 2 clips, which adds KLD +" in found.advice
    assert (report.decision.remedy, report.decision.candidate) == (Remedy.USE, "good")
    assert alone.decision.remedy is Remedy.CALIBRATE
    assert report.decision.headline == "This model needs KV scales: use good."
    assert alone.decision.headline == "This model needs KV scales: calibrate."
    one = next(c for c in report.candidates if c.name == SCALE_ONE)
    good_one = next(c for c in report.candidates if c.name == "good")
    assert one.kld_mean > 5 * good_one.kld_mean
    assert [c.name for c in report.candidates] == ["good", SCALE_ONE]


def test_an_identical_candidate_makes_no_difference(subject: by_hand.Subject) -> None:
    """Nothing is quantized: ratio 1, divergence 0, agreement 1, exactly."""
    candidate = build_unscaled("same", subject.geometry, E4M3FN, PLAIN)
    nothing = type(candidate)(name="same")
    verified = compare(subject, nothing)
    (result,) = verified.report.candidates
    assert (result.ppl_ratio, result.ppl_ratio_se) == (1.0, 0.0)
    assert (result.kld_mean, result.kld_p99, result.kld_max) == (0.0, 0.0, 0.0)
    assert result.top1_agreement == 1.0
    assert result.verdict is Verdict.NO_DIFFERENCE
    assert torch.equal(verified.logprobs["same"], verified.logprobs["reference"])
    assert verified.report.tokens == 12 * 19 == len(verified.logprobs["reference"])


# --- decisions from figures made by hand ----------------------------------------------------------

HALF = Damage(signal=1000.0, noise=1.0, clipped=0.0, flushed=0.0, num_elements=100.0, amax=3.0)
"""30 dB."""


def fit(layer: int, role: str = "v", *, loss_db: float = 0.0, **more: Any) -> LayerResult:
    """Make a row whose scale loses nothing against a fitted one, unless told."""
    values: dict[str, Any] = {
        "damage": HALF,
        "loss_db": loss_db,
        "worst_db": 30.0 - loss_db,
        "clipped": 0.0,
        "flushed": 0.0,
    }
    found = SiteFit(**values | more)
    return make_layer("it", layer, role, site=f"layers.{layer}.attn.{role}", fit=found)


def candidate(
    name: str, kld: float, verdict: Verdict = Verdict.PASS, **more: Any
) -> CandidateResult:
    """Make a candidate of which only the divergence matters."""
    values: dict[str, Any] = {
        "ppl_ratio": 1.0,
        "ppl_ratio_se": 0.0,
        "kld_mean": kld,
        "kld_se": 0.0001,
        "top1_agreement": 1.0,
        "verdict": verdict,
        "verdict_why": "why",
    }
    return make_candidate(name, **values | more)


def row(name: str, role: str = "v", layer: int = 3, **more: Any) -> LayerResult:
    values: dict[str, Any] = {"site": f"layers.3.attn.{role}", "sqnr_db": 31.0}
    values |= {"amax": 3.0, "scale": 0.01}
    return make_layer(name, layer, role, **values | more)


def pair(
    name: str, base: str, difference: float, answer: PairedAnswer, **more: Any
) -> PairedResult:
    values: dict[str, Any] = {"se": 0.0005, "margin": 0.001}
    return PairedResult(
        candidate=name, base=base, difference=difference, answer=answer, **values | more
    )


CLIPS = fit(3, loss_db=28.0, worst_db=2.0, clipped=0.8)
UNDERFLOWS = fit(5, "k", loss_db=2.0, worst_db=28.0, flushed=0.004)
QUERY = fit(7, "q", loss_db=25.0, worst_db=5.0, flushed=0.9)


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
        ((), PairedAnswer.WORSE, "no"),  # no site loses: the texts round differently by chance
        ((UNDERFLOWS,), PairedAnswer.WORSE, "yes"),
        ((UNDERFLOWS,), PairedAnswer.CANNOT_TELL, "cannot-tell"),
        ((UNDERFLOWS,), PairedAnswer.NO_DIFFERENCE, "no"),
        ((UNDERFLOWS,), PairedAnswer.BETTER, "no"),
        ((UNDERFLOWS,), None, "cannot-tell"),
        ((CLIPS,), PairedAnswer.CANNOT_TELL, "yes"),
        ((UNDERFLOWS, QUERY), PairedAnswer.NO_DIFFERENCE, "yes"),
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
        (fit(0), False, False),
        (fit(0, loss_db=0.99), False, False),
        (fit(0, loss_db=1.01), True, False),
        (fit(0, clipped=0.0011), True, False),
        (fit(0, clipped=0.011), True, True),
        (fit(0, loss_db=0.5, worst_db=3.0), False, False),  # no scale of the tensor helps that head
        (fit(0, loss_db=1.1, worst_db=14.9), True, True),
        (fit(0, loss_db=2.9, flushed=0.5), True, False),
        (fit(0, loss_db=3.1, flushed=0.011), True, True),
        (fit(0, loss_db=3.1, flushed=0.009), True, False),
        (fit(0, loss_db=0.4, flushed=0.033), False, False),  # small values without energy
    ],
)
def test_what_a_fitted_scale_would_keep_is_a_loss(
    one: LayerResult, is_losing: bool, is_destroyed: bool
) -> None:
    assert loses(one) is is_losing
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
    paired = [pair(each.name, SCALE_ONE, -0.002, PairedAnswer.BETTER) for each in scaled]
    losing = [each for each in (CLIPS, UNDERFLOWS, QUERY) if each.site in found.sites]
    return settle(
        candidates=(*scaled, unscaled),
        layers=[row(each.name) for each in (*scaled, unscaled)],
        fits={each.name: [fit(3)] for each in scaled} | {SCALE_ONE: losing} | (fits or {}),
        kv=found,
        paired=paired,
        **more,
    )


def test_scale_one_that_loses_nothing_is_served() -> None:
    found = conclude(need(None), candidate("mine", 0.004))
    assert (found.remedy, found.candidate) == (Remedy.SERVE, SCALE_ONE)
    assert found.headline == "This model does not need KV scales."
    assert found.details.splitlines() == [
        "FP8 costs KLD 0.0060 ± 0.0001 with any scale (perplexity ratio 1.0000 ± 0.0000 at scale "
        "1.0).",
        "At scale 1.0 no K, V or q loses anything that another scale would keep.",
        "Against scale 1.0, mine is better (KLD -0.0020 ± 0.0005) by another rounding alone.",
    ]


def test_scales_that_pass_are_used_where_scale_one_does_not() -> None:
    """By another rounding alone, but the gate decides."""
    failed = candidate(SCALE_ONE, 0.006, Verdict.FAIL)
    found = conclude(need(None), candidate("mine", 0.004), one=failed)
    assert found.headline == "Scale 1.0 does not pass the kv gate: use mine."
    assert (found.remedy, found.candidate) == (Remedy.USE, "mine")
    found = conclude(need(None), candidate("mine", 0.004), one=failed, refused=["mine"])
    assert found.remedy is Remedy.FIND_LAYERS


def test_the_command_serves_what_the_answer_says_to_use() -> None:
    found = settle(
        candidates=(candidate("mine", 0.004), candidate("fp8", 0.03), candidate(SCALE_ONE, 0.006)),
        layers=[row("mine"), row("fp8", "weight"), row(SCALE_ONE)],
        fits={"mine": [fit(3)], SCALE_ONE: []},
        kv=need(None),
        paired=[pair("mine", SCALE_ONE, -0.002, PairedAnswer.BETTER)],
    )
    assert found.headline.startswith("fp8 passes: ")
    assert (found.remedy, found.candidate) == (Remedy.USE, "fp8")


@pytest.mark.parametrize(
    ("verdict", "refused", "remedy", "end"),
    [
        (Verdict.WARN, (), Remedy.SERVE, "."),
        (Verdict.FAIL, (), Remedy.FIND_LAYERS, ", but an FP8 cache fails the kv gate."),
        (Verdict.CANNOT_TELL, (), Remedy.NONE, ", but whether an FP8 cache passes cannot be told."),
        (Verdict.PASS, (SCALE_ONE,), Remedy.NONE, ", but the engine cannot load it."),
    ],
)
def test_what_fails_or_cannot_be_judged_is_not_served(
    verdict: Verdict, refused: tuple[str, ...], remedy: Remedy, end: str
) -> None:
    found = conclude(need(None), one=candidate(SCALE_ONE, 0.006, verdict), refused=refused)
    assert found.remedy is remedy
    assert found.headline == f"This model does not need KV scales{end}"


@pytest.mark.parametrize(("has_gate", "word"), [(False, ""), (True, ", with a warning")])
def test_a_warning_is_told_where_a_gate_is_asked_for(has_gate: bool, word: str) -> None:
    mine = candidate("mine", 0.004, Verdict.WARN)
    found = conclude(need(PairedAnswer.WORSE, CLIPS), mine, has_gate=has_gate)
    assert found.headline == f"This model needs KV scales: use mine{word}."
    layers = [row("mine", "weight"), row(SCALE_ONE)]
    weights = settle(candidates=(mine,), layers=layers, fits={}, kv=None, has_gate=has_gate)
    told = "gets a warning:" if has_gate else "costs"
    assert weights.headline.startswith(f"mine {told} KLD 0.0040 ± 0.0001")


@pytest.mark.parametrize(
    ("verdict", "refused", "remedy", "end"),
    [
        (Verdict.PASS, (), Remedy.USE, ": use mine."),
        (Verdict.WARN, (), Remedy.USE, ": use mine."),
        (Verdict.FAIL, (), Remedy.FIND_LAYERS, ", and with mine it still fails the kv gate."),
        (
            Verdict.CANNOT_TELL,
            (),
            Remedy.NONE,
            ". mine fits, but whether it passes cannot be told.",
        ),
        (Verdict.PASS, ("mine",), Remedy.NONE, "; mine would fit, but the engine cannot use it."),
    ],
)
def test_scales_that_fit_are_used_only_if_they_pass(
    verdict: Verdict, refused: tuple[str, ...], remedy: Remedy, end: str
) -> None:
    found = conclude(
        need(PairedAnswer.WORSE, CLIPS), candidate("mine", 0.004, verdict), refused=refused
    )
    assert found.remedy is remedy
    assert found.headline == f"This model needs KV scales{end}"
    start = (
        "At scale 1.0 v of layer 3 clips, which adds KLD +0.0020 ± 0.0005 to the 0.0040 ± 0.0002"
    )
    assert found.details.startswith(start)


def test_a_warning_is_a_failure_where_the_gate_is_strict() -> None:
    """What exits with 8 is not what the report recommends."""
    warned = candidate(SCALE_ONE, 0.006, Verdict.WARN)
    assert conclude(need(None), one=warned, is_strict=True).remedy is Remedy.FIND_LAYERS
    mine = candidate("mine", 0.004, Verdict.WARN)
    found = conclude(need(PairedAnswer.WORSE, CLIPS), mine, is_strict=True)
    assert found.remedy is Remedy.FIND_LAYERS
    assert weights(candidate("a", 0.03, Verdict.WARN), is_strict=True).remedy is Remedy.FIND_LAYERS


def test_of_scales_that_fit_those_that_pass_come_first() -> None:
    found = conclude(
        need(PairedAnswer.WORSE, CLIPS),
        candidate("mine", 0.003, Verdict.FAIL),
        candidate("other", 0.004),
    )
    assert (found.remedy, found.candidate) == (Remedy.USE, "other")
    cost = "other costs KLD 0.0040 ± 0.0001: -0.0020 ± 0.0005 against scale 1.0."
    assert found.details.splitlines()[1] == cost


def test_scales_that_do_not_fit_are_not_recommended() -> None:
    found = conclude(
        need(PairedAnswer.WORSE, CLIPS), candidate("mine", 0.004), fits={"mine": [CLIPS]}
    )
    assert found.remedy is Remedy.CALIBRATE
    assert found.headline == (
        "This model needs KV scales, and those of the candidates do not fit: calibrate."
    )
    misfit, described = found.details.splitlines()[1:]
    assert misfit == "In mine v of layer 3 clips."
    assert described.startswith("mine: layers.3.attn.v (layer 3, amax 3, scale 0.01) clips")


def test_q_is_told_from_k_and_v() -> None:
    """Scales of K and V do not change q: they fix layer 3, and leave layer 7."""
    found = settle(
        candidates=(candidate("mine", 0.004), candidate(SCALE_ONE, 0.1)),
        layers=[
            row("mine"),
            row("mine", "q", site=QUERY.site, layer=7, scale=1.0),
            row(SCALE_ONE),
        ],
        fits={"mine": [QUERY], SCALE_ONE: [CLIPS, QUERY]},
        kv=need(PairedAnswer.WORSE, CLIPS, QUERY),
    )
    assert (found.remedy, found.candidate) == (Remedy.SCALE_QUERY, "mine")
    assert "At scale 1.0 v of layer 3 clips and q of layer 7 underflows, " in found.details
    assert found.headline == "This model needs KV scales, and mine has no scale for q of layer 7."


def test_a_loss_below_the_noise_says_how_much_text_would_tell() -> None:
    found = conclude(need(PairedAnswer.CANNOT_TELL, UNDERFLOWS), candidate("mine", 0.004))
    assert found.remedy is Remedy.NONE
    assert found.headline == "This text cannot tell whether the model needs KV scales."
    assert found.details == (
        "At scale 1.0 k of layer 5 underflows, which changes the KLD by +0.0020 ± 0.0005; about "
        "120,000 tokens would tell."
    )


def test_what_makes_the_figures_meaningless_is_said_first() -> None:
    lost = candidate(SCALE_ONE, 3.0, Verdict.CANNOT_TELL, top1_agreement=0.5)
    found = conclude(need(None), one=lost, broken=explain_broken(51_443.0, 49_152))
    assert found.remedy is Remedy.NONE
    assert found.headline == (
        "Nothing can be told: the unquantized model predicts no better than chance."
    )
    collapse = "Scale 1.0 predicts another token than the unquantized model 50% of the time."
    assert found.details.splitlines() == [
        collapse,
        "Its perplexity is 51,443, its vocabulary 49,152: is the model, its tokenizer or the text "
        "the right one?",
    ]
    assert conclude(need(None), broken=explain_broken(900.0, 49_152)).headline.startswith("This")
    lost = candidate(SCALE_ONE, 3.0, Verdict.FAIL, top1_agreement=0.5)
    assert conclude(need(None), one=lost).details.startswith(collapse)


def weights(
    *found: CandidateResult,
    refused: tuple[str, ...] = (),
    is_strict: bool = False,
    **answers: PairedAnswer,
) -> Decision:
    """Decide between candidates with FP8 weights; `answers` are those against the others."""
    return settle(
        candidates=(*found, candidate(SCALE_ONE, 0.006)),
        layers=[row(each.name, "weight") for each in found],
        fits={},
        kv=None,
        paired=[
            pair(name, base.name, 0.001, answer)
            for name, answer in answers.items()
            for base in found
        ],
        refused=refused,
        is_strict=is_strict,
    )


def test_of_fp8_weights_the_smallest_loss_that_passes_is_recommended() -> None:
    a, b = candidate("a", 0.03), candidate("b", 0.02)
    failed, unknown = candidate("c", 0.01, Verdict.FAIL), candidate("c", 0.01, Verdict.CANNOT_TELL)
    found = weights(a, b, a=PairedAnswer.WORSE)
    assert found.headline == "Use b: KLD 0.0200 ± 0.0001, perplexity ratio 1.0000 ± 0.0000."
    assert found.details == "Against b, a is worse (KLD +0.0010 ± 0.0005)."
    assert (found.remedy, found.candidate) == (Remedy.USE, "b")
    found = weights(a, b, a=PairedAnswer.CANNOT_TELL)
    assert found.details == (
        "Against b, a differs by less than this text can tell (KLD +0.0010 ± 0.0005)."
    )
    found = weights(a, b, refused=("b",))
    assert (found.candidate, found.details) == ("a", "The engine cannot use b.")
    assert weights(a).headline.startswith("a passes: KLD 0.0300 ± 0.0001, ")
    assert weights(failed).remedy is Remedy.FIND_LAYERS
    for other in (failed, unknown):
        assert weights(a, b, other, a=PairedAnswer.WORSE).candidate == "b"
    assert weights(unknown).remedy is Remedy.NONE
    assert weights(failed, refused=("c",)).remedy is Remedy.NONE


def test_weights_that_are_not_what_they_were_are_named() -> None:
    bad = row("mine", "weight", sqnr_db=12.0, scale=None)
    found = settle(candidates=[candidate("mine", 0.1)], layers=[bad], fits={}, kv=None)
    assert found.details == (
        "mine: layers.3.attn.weight (layer 3, amax 3) is distorted: its SQNR is 12.0 dB."
    )
    assert describe_damage([bad])
    assert not describe_damage([row("mine", "weight", sqnr_db=26.0)])


def describe_input(**more: Any) -> str:
    """Describe an input whose scale covers 6.6, and whose SQNR is low."""
    values: dict[str, Any] = {"scale": 6.6 / 448, "largest": 6.6, "sqnr_db": 9.0}
    found = row("mine", "input", **values | more)
    return settle(candidates=[candidate("mine", 0.1)], layers=[found], fits={}, kv=None).details


def test_amax_above_the_range_clips_whatever_share_of_values_becomes_zero() -> None:
    assert describe_input(amax=12.0, clipped=4e-6, flushed=6.7e-4) == (
        "mine: layers.3.attn.input (layer 3, amax 12, scale 0.0147) clips: its scale is too small, "
        "0.0004% of the values clip."
    )


@pytest.mark.parametrize(
    ("amax", "flushed", "said"),
    [
        (0.5, 6.7e-4, "underflows: its scale is too large, 0.07% of the values become zero."),
        (0.5, 0.25, "underflows: its scale is too large, 25.0% of the values become zero."),
        (6.0, 0.25, "is distorted: its SQNR is 9.0 dB."),  # no other scale would keep more
    ],
)
def test_values_are_lost_to_a_large_scale_only_where_amax_is_far_below_its_range(
    amax: float, flushed: float, said: str
) -> None:
    assert describe_input(amax=amax, flushed=flushed).endswith(said)


def test_precision_that_small_values_lose_is_said_in_decibels() -> None:
    found = conclude(need(None), candidate("mine", 0.004), fits={"mine": [fit(3, loss_db=2.0)]})
    assert found.details.endswith("underflows: its scale is too large, which costs 2.0 dB.")


def test_a_site_that_clips_and_underflows_clips() -> None:
    both = fit(3, loss_db=5.0, clipped=1e-4, flushed=0.02)
    found = conclude(
        need(PairedAnswer.WORSE, CLIPS), candidate("mine", 0.004), fits={"mine": [both]}
    )
    assert "In mine v of layer 3 clips." in found.details
    assert found.details.endswith(
        "clips: its scale is too small, 0.01% of the values of one head clip."
    )


@pytest.mark.parametrize(("db", "remedy"), [(-143.0, Remedy.CHECK), (31.0, Remedy.FIND_LAYERS)])
def test_weights_whose_scales_are_wrong_are_checked_not_planned(db: float, remedy: Remedy) -> None:
    report = make_small(
        candidates=(make_candidate("q", verdict=Verdict.FAIL),),
        layers=(make_layer("q", 0, "weight", sqnr_db=db),),
    )
    found = conclude_report(report).decision
    assert found.remedy is remedy
    assert ("self_attn.weight are wrong" in found.details) == (remedy is Remedy.CHECK)
