"""What a report says first: the scale that was broken; and when scales are not needed at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from fp8calib.engines.numerics import Numerics
from fp8calib.fp8.formats import E4M3FN
from fp8calib.geometry.sites import Role, Site
from fp8calib.scales.scale_table import Scale, ScaleSource, ScaleTable
from fp8calib.verification.candidates import build_kv_candidate, build_unscaled
from fp8calib.verification.damage_rows import PER_HEAD, SCALED, UNSCALED
from fp8calib.verification.emulation.kv import emulate_kv
from fp8calib.verification.judge.advice import advise, list_unfit_scales
from fp8calib.verification.report import (
    SCALE_ONE,
    CandidateResult,
    LayerResult,
    Remedy,
    Verdict,
    VerifyReport,
)
from fp8calib.verification.verify import ReferenceModel, VerificationRequest, verify
from tests import zoo
from tests.truth.test_statistics import Silent, draw, make_plan
from tests.verification import by_hand
from tests.verification.by_hand import HandCache, opened, plain_forward

PLAIN = Numerics(name="plain")
SEQUENCES = draw([20] * 12)
LAYERS = 4


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


def make_table(subject: by_hand.Subject, values: dict[Site, float]) -> ScaleTable:
    """Wrap scales."""
    return ScaleTable(
        geometry=subject.geometry,
        fmt=E4M3FN,
        tp=1,
        per_head=False,
        scales={
            site: Scale(values=torch.tensor([value]), source=ScaleSource.OBSERVED)
            for site, value in values.items()
        },
    )


def ask(subject: by_hand.Subject, tables: dict[str, ScaleTable]) -> VerifyReport:
    """Verify tables of KV scales, and scale 1.0 beside them."""
    candidates = [build_kv_candidate(name, t, PLAIN, origin="test") for name, t in tables.items()]
    kinds = {SCALED: emulate_kv(next(iter(tables.values())), PLAIN)} if tables else {}
    unscaled = build_unscaled(SCALE_ONE, subject.geometry, E4M3FN, PLAIN)
    request = VerificationRequest(
        numerics=PLAIN,
        candidates=(*candidates, unscaled),
        scale_kinds={UNSCALED: unscaled.emulation.quantizers, **kinds},
    )
    asked = ReferenceModel(
        name="tiny",
        model=subject.model,
        geometry=subject.geometry,
        originals=subject.originals,
        dtype="float32",
        device="cpu",
    )
    plan = make_plan(SEQUENCES)
    return verify(asked, request, plan, batch_size=4, progress=Silent()).report


@pytest.mark.parametrize("layer", range(LAYERS))
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
    """Divided by 64 it clips, times 2**14 it flushes to zero; whichever layer it is."""
    good = {site: amax / 448 * 1.2 for site, amax in amaxes.items()}
    broken = Site(f"model.layers.{layer}.self_attn", role)
    bad = {**good, broken: good[broken] * factor}
    report = ask(subject, {"good": make_table(subject, good), "bad": make_table(subject, bad)})
    results = {candidate.name: candidate for candidate in report.candidates}
    assert results["bad"].kld_mean > results["good"].kld_mean * (2 if factor < 1 else 1.02)
    assert report.advice.startswith(f"bad: {broken} (layer {layer}, amax ")
    assert verb in report.advice.partition(";")[0]
    rows = [row for row in report.layers if row.candidate == "bad"]
    assert rows[0].site == str(broken)
    assert list_unfit_scales("bad", report.layers)[0] == rows[0]
    assert not list_unfit_scales("good", report.layers)
    assert results["bad"].verdict in {Verdict.WARN, Verdict.FAIL, Verdict.CANNOT_TELL}
    share = rows[0].clipped if factor < 1 else rows[0].flushed
    assert share > 0.1
    diagnosis = {row.site: row for row in report.diagnosis}
    assert diagnosis[str(broken)].scaled_db == pytest.approx(
        next(row.sqnr_db for row in report.layers if row.site == str(broken)), abs=3
    )
    assert all(row.per_head_db is None for row in report.diagnosis)
    assert PER_HEAD not in diagnosis


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
    assert report.advice.startswith(f"bad: {broken} (layer {num_layers - 1}, amax ")
    assert "underflows" in report.advice.partition(";")[0]
    assert report.candidates[0].verdict is Verdict.WARN
    assert f"{broken} (layer {num_layers - 1}) is damaged" in report.candidates[0].verdict_why


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
    assert report.advice.startswith("layers 1 and 2 clip at scale 1.0; use good (KLD ")
    assert alone.advice.startswith("layers 1 and 2 clip at scale 1.0 (KLD ")
    assert alone.advice.endswith("; calibrate.")
    one = next(c for c in report.candidates if c.name == SCALE_ONE)
    good_one = next(c for c in report.candidates if c.name == "good")
    assert one.kld_mean > 5 * good_one.kld_mean
    assert [c.name for c in report.candidates] == ["good", SCALE_ONE]


def test_an_identical_candidate_makes_no_difference(subject: by_hand.Subject) -> None:
    """Nothing is quantized: ratio 1, divergence 0, agreement 1, exactly."""
    candidate = build_unscaled("same", subject.geometry, E4M3FN, PLAIN)
    nothing = type(candidate)(
        name="same", description="", emulation=type(candidate.emulation)(quantizers={})
    )
    asked = ReferenceModel(
        name="tiny",
        model=subject.model,
        geometry=subject.geometry,
        originals=subject.originals,
        dtype="float32",
        device="cpu",
    )
    request = VerificationRequest(numerics=PLAIN, candidates=(nothing,))
    verified = verify(asked, request, make_plan(SEQUENCES), batch_size=4, progress=Silent())
    (result,) = verified.report.candidates
    assert (result.ppl_ratio, result.ppl_ratio_se) == (1.0, 0.0)
    assert (result.kld_mean, result.kld_p99, result.kld_max) == (0.0, 0.0, 0.0)
    assert result.top1_agreement == 1.0
    assert result.verdict is Verdict.NO_DIFFERENCE
    assert torch.equal(verified.logprobs["same"], verified.logprobs["reference"])
    assert verified.report.tokens == 12 * 19 == len(verified.logprobs["reference"])


# --- sentences, from rows made by hand ---------------------------------------------------------


def candidate(name: str, kld: float, verdict: Verdict = Verdict.PASS) -> CandidateResult:
    """Make a candidate of which only the divergence matters."""
    return CandidateResult(
        name=name,
        description="",
        ppl=10.0,
        ppl_ratio=1.0,
        ppl_ratio_se=0.0,
        kld_mean=kld,
        kld_median=kld,
        kld_p99=kld,
        kld_max=kld,
        top1_agreement=1.0,
        verdict=verdict,
        verdict_why="why",
        gate="kv",
        by_position=(),
    )


def row(
    name: str, layer: int, sqnr_db: float | None = 31.0, *, role: str = "v", **changes: float
) -> LayerResult:
    """Make a row that fits, unless told."""
    return LayerResult(
        candidate=name,
        site=f"layers.{layer}.attn.{role}",
        layer=layer,
        role=role,  # type: ignore[arg-type]
        sqnr_db=sqnr_db,
        clipped=changes.get("clipped", 0.0),
        flushed=changes.get("flushed", 0.0),
        amax=3.0,
        scale=changes.get("scale"),
    )


def good_rows(name: str) -> list[LayerResult]:
    """Make six rows that fit."""
    return [row(name, layer) for layer in range(6)]


KLD_TABLE = [
    (0.0060, 0.0059, Verdict.PASS, "this model does not need KV scales: KLD 0.0060 at scale 1.0"),
    (0.0060, 0.0020, Verdict.PASS, "scales help: use mine (KLD 0.0060 at scale 1.0 against 0.0020"),
    (0.0060, 0.0090, Verdict.PASS, "scale 1.0 is better than mine (KLD 0.0060 at scale 1.0 agai"),
    (
        1.2e-6,
        1.1e-6,
        Verdict.PASS,
        "this model does not need KV scales: KLD 1.20e-06 at scale 1.0 ",
    ),
    (9e-5, 1e-5, Verdict.PASS, "scales help: use mine (KLD 9.00e-05 at scale 1.0 against 1.00e-05"),
    (
        0.0,
        0.0,
        Verdict.PASS,
        "this model does not need KV scales: KLD 0.0000 at scale 1.0 against ",
    ),
    (0.5000, 0.4900, Verdict.FAIL, "use mine, which passes: why at scale 1.0 (KLD 0.5000"),
]


@pytest.mark.parametrize(("unscaled", "scaled", "verdict", "sentence"), KLD_TABLE)
def test_what_is_said_of_scales(
    unscaled: float, scaled: float, verdict: Verdict, sentence: str
) -> None:
    candidates = [candidate("mine", scaled), candidate(SCALE_ONE, unscaled, verdict)]
    said = advise(candidates, [*good_rows("mine"), *good_rows(SCALE_ONE)], {"mine": 0.0}).text
    assert said.startswith(sentence)
    assert said.endswith(".")


@pytest.mark.parametrize(
    ("unscaled", "scaled", "error", "sentence"),
    [
        (0.0060, 0.0020, 0.0019, "scales help: use mine"),
        (0.0060, 0.0020, 0.0021, "this model does not need KV scales"),
        (0.0020, 0.0060, 0.0019, "scale 1.0 is better than mine"),
        (0.0020, 0.0060, 0.0021, "this model does not need KV scales"),
        (0.0020, 0.0060, None, "this model does not need KV scales"),
    ],
)
def test_a_divergence_inside_its_error_is_no_difference(
    unscaled: float, scaled: float, error: float | None, sentence: str
) -> None:
    """Twice the standard error of the difference, and more, is one."""
    candidates = [candidate("mine", scaled), candidate(SCALE_ONE, unscaled)]
    rows = [*good_rows("mine"), *good_rows(SCALE_ONE)]
    assert advise(candidates, rows, {"mine": error, SCALE_ONE: 0.0}).text.startswith(sentence)


def test_scales_that_break_the_same_layers_are_not_advised() -> None:
    """An engine may have no place for them (MLA in vLLM): what it serves is scale 1.0 again."""
    candidates = [candidate("mine", 0.5, Verdict.WARN), candidate(SCALE_ONE, 0.5, Verdict.WARN)]
    rows = [row(name, 3, 2.0, clipped=0.8) for name in ("mine", SCALE_ONE)]
    rows += [*good_rows("mine"), *good_rows(SCALE_ONE)]
    said = advise(candidates, rows, {"mine": 0.0}).text
    assert said.endswith(
        " layer 3 clips at scale 1.0, and mine does not fix it (KLD 0.5000 at scale 1.0 against "
        "0.5000): calibrate, or leave the KV cache unquantized."
    )
    mended = [candidate("mine", 0.1, Verdict.WARN), candidates[1]]
    assert "layer 3 clips at scale 1.0; use mine" in advise(mended, rows, {"mine": 0.0}).text


FIT: dict[str, float] = {}
CLIP = {"sqnr_db": 2.0, "clipped": 0.8}


@pytest.mark.parametrize(
    ("unscaled", "scaled", "verdict", "rows", "sentence", "remedy"),
    [
        (0.006, 2.0, Verdict.PASS, CLIP, "this model does not need KV scales.", Remedy.SERVE),
        (0.006, 2.0, Verdict.PASS, FIT, "this model does not need KV scales.", Remedy.SERVE),
        (0.3, 2.0, Verdict.FAIL, FIT, "do not use these scales, calibrate.", Remedy.CALIBRATE),
        (
            3.0,
            2.0,
            Verdict.FAIL,
            CLIP,
            "layer 3 clips with its scales: calibrate.",
            Remedy.CALIBRATE,
        ),
        (3.0, 2.0, Verdict.FAIL, FIT, "unquantized, or of all.", Remedy.FIND_LAYERS),
    ],
)
def test_what_is_said_of_scales_that_fail(
    unscaled: float,
    scaled: float,
    verdict: Verdict,
    rows: dict[str, float],
    sentence: str,
    remedy: Remedy,
) -> None:
    """Layers are left out only where the scales fit: others are made anew."""
    candidates = [candidate("mine", scaled, Verdict.FAIL), candidate(SCALE_ONE, unscaled, verdict)]
    layers = [row("mine", 3, **rows), *good_rows("mine"), *good_rows(SCALE_ONE)]

    found = advise(candidates, layers, {"mine": 0.01})

    assert found.text.endswith(sentence)
    assert found.remedy is remedy


def test_of_one_token_nothing_is_said() -> None:
    """Where no error is known nothing is concluded, of scale 1.0 alone or beside scales."""
    one, other = (
        candidate(name, kld, Verdict.CANNOT_TELL)
        for name, kld in ((SCALE_ONE, 0.006), ("mine", 0.001))
    )
    rows = [*good_rows("mine"), *good_rows(SCALE_ONE)]
    assert advise([one], rows, {}).text == (
        "whether this model needs KV scales is unknown: at scale 1.0 KLD 0.0060, why."
    )
    assert advise([other, one], rows, {"mine": None}).text == (
        "whether scales help is unknown (KLD 0.0060 at scale 1.0 against 0.0010 with mine): "
        "use more text."
    )


@pytest.mark.parametrize(
    ("verdict", "sentence"),
    [
        (Verdict.NO_DIFFERENCE, "this model does not need KV scales: at scale 1.0 KLD 0.0060, why"),
        (Verdict.FAIL, "scale 1.0 costs accuracy (KLD 0.0060, why), though no layer stands out"),
    ],
)
def test_what_is_said_of_scale_one_alone(verdict: Verdict, sentence: str) -> None:
    said = advise([candidate(SCALE_ONE, 0.006, verdict)], good_rows(SCALE_ONE), {}).text
    assert said.startswith(sentence)


def test_layers_that_clip_and_underflow_are_told_apart() -> None:
    rows = [
        row(SCALE_ONE, 0, 2.0, clipped=0.2),
        row(SCALE_ONE, 16, 9.0, clipped=0.002),
        row(SCALE_ONE, 5, 3.0, flushed=0.9),
        *(row(SCALE_ONE, layer) for layer in range(20, 30)),
    ]
    said = advise([candidate(SCALE_ONE, 1.0, Verdict.FAIL)], rows, {}).text
    assert said.startswith("layers 0 and 16 clip and layer 5 underflows at scale 1.0")
    both = [row(SCALE_ONE, 5, 2.0, clipped=0.2), rows[2], *rows[3:]]
    said = advise([candidate(SCALE_ONE, 1.0, Verdict.FAIL)], both, {}).text
    assert said.startswith("layer 5 clips and underflows at scale 1.0")


@pytest.mark.parametrize(
    ("changes", "is_broken"),
    [
        ({"sqnr_db": 31.0}, False),
        ({"sqnr_db": 31.0, "clipped": 0.0009}, False),
        ({"sqnr_db": 31.0, "clipped": 0.0011}, True),
        ({"sqnr_db": 24.9, "clipped": 1e-6}, True),
        ({"sqnr_db": 24.9, "flushed": 0.021}, True),
        ({"sqnr_db": 24.9, "flushed": 0.019}, False),
        ({"sqnr_db": 25.1, "flushed": 0.5}, False),
        ({"sqnr_db": 14.9, "flushed": 1e-6}, True),
        ({"sqnr_db": 14.9}, False),
        ({"sqnr_db": None, "flushed": 1.0}, False),
    ],
)
def test_a_scale_is_broken_when(changes: dict[str, float], is_broken: bool) -> None:
    """It clips, or lies 6 dB under its role's median and something was lost at an end."""
    rows = [row("mine", 9, **changes), *good_rows("mine")]  # type: ignore[arg-type]
    assert bool(list_unfit_scales("mine", rows)) is is_broken


@pytest.mark.parametrize(("sqnr_db", "is_named"), [(20.0, True), (24.9, True), (25.1, False)])
def test_a_weight_that_is_not_what_it_was_is_named(sqnr_db: float, is_named: bool) -> None:
    """A scale that is a tenth too large clips nothing and flushes nothing."""
    rows = [row("mine", 9, sqnr_db, role="weight")]
    rows += [row("mine", layer, role="weight") for layer in range(4)]
    said = advise([candidate("mine", 1.0)], rows, {}).text
    assert ("layers.9.attn.weight (layer 9, amax 3) is distorted" in said) is is_named


def test_three_broken_sites_are_described_and_the_others_counted() -> None:
    rows = [row("mine", layer, 1.0 + layer, clipped=0.25, scale=0.5) for layer in range(5)]
    said = advise([candidate("mine", 1.0, Verdict.FAIL)], rows, {}).text
    assert said == (
        "mine: "
        "layers.0.attn.v (layer 0, amax 3, scale 0.5) clips: its scale is too small, 25.0% of the "
        "values clip; "
        "layers.1.attn.v (layer 1, amax 3, scale 0.5) clips: its scale is too small, 25.0% of the "
        "values clip; "
        "layers.2.attn.v (layer 2, amax 3, scale 0.5) clips: its scale is too small, 25.0% of the "
        "values clip, and 2 more. mine: fail."
    )


def quantized_rows(*names: str) -> list[LayerResult]:
    return [row(name, 0, role="weight") for name in names]


def test_of_fp8_weights_the_smallest_loss_that_passes_is_advised() -> None:
    one = candidate(SCALE_ONE, 0.5)
    best, warned, failed = (
        candidate("best", 0.02),
        candidate("warned", 0.03, Verdict.WARN),
        candidate("failed", 0.01, Verdict.FAIL),
    )
    rows = quantized_rows("best", "warned", "failed")
    found = advise([warned, best, failed, one], rows, {})
    assert found.text == (
        "warned: warn (KLD 0.0300, why); best: pass (KLD 0.0200, why); failed: fail (KLD 0.0100, "
        "why); use best."
    )
    assert (found.remedy, found.candidate) == (Remedy.USE, "best")
    found = advise([best, one], rows, {})
    assert found.text == "best: pass (KLD 0.0200, why)."
    assert (found.remedy, found.candidate) == (Remedy.USE, "best")
    found = advise([warned, best, one], rows, {}, {"best"})
    assert found.text.endswith("(KLD 0.0200, why; the engine cannot load it); use warned.")
    found = advise([failed, one], rows, {})
    assert found.text.endswith(
        "leave the most sensitive layers unquantized, or use another scheme."
    )
    assert (found.remedy, found.candidate) == (Remedy.FIND_LAYERS, "failed")
    assert advise([failed, one], rows, {}, {"failed"}).remedy is Remedy.NONE
    unknown = candidate("unknown", 0.01, Verdict.CANNOT_TELL)
    assert advise([unknown, one], rows, {}).remedy is Remedy.NONE


def test_fp8_weights_beside_kv_scales_are_named_first() -> None:
    candidates = [candidate("kv", 0.0059), candidate("weights", 0.03, Verdict.WARN)]
    rows = [*good_rows("kv"), *good_rows(SCALE_ONE), *quantized_rows("weights")]
    found = advise([*candidates, candidate(SCALE_ONE, 0.006)], rows, {"kv": 0.0})
    assert found.text.startswith("weights: warn (KLD 0.0300, why). this model does not need KV")
    assert found.conclusion == found.text


def test_scales_that_the_engine_cannot_load_are_not_advised() -> None:
    candidates = [candidate("mine", 0.01), candidate(SCALE_ONE, 0.5)]
    rows = [*good_rows("mine"), *good_rows(SCALE_ONE)]
    assert advise(candidates, rows, {"mine": 0.0}).remedy is Remedy.USE
    found = advise(candidates, rows, {"mine": 0.0}, {"mine"})
    assert found.remedy is Remedy.NONE
    assert found.text.endswith("But the engine cannot load it: use another engine or format.")
