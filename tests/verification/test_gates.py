"""Verdicts by hand, and gate files good and bad."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from fp8calib.errors import UsageError
from fp8calib.verification.judge.fits import describe_damage
from fp8calib.verification.judge.gates import GATES, Gate, judge, load_gate
from fp8calib.verification.report import LayerResult, Verdict
from fp8calib.verification.summary import Summary
from tests.kit.reports import make_layer

PASS, WARN, FAIL, SAME = Verdict.PASS, Verdict.WARN, Verdict.FAIL, Verdict.NO_DIFFERENCE
OPEN = Verdict.CANNOT_TELL


def make_summary(
    ratio: float,
    error: float,
    *,
    kld: float = 0.01,
    kld_se: float | None = 0.0001,
    tokens: int = 20_000,
    clusters: int = 32,
) -> Summary:
    """Make a summary of a ratio with its own standard error (not its logarithm's)."""
    return Summary(
        tokens=tokens,
        clusters=clusters,
        ppl=10 * ratio,
        log_ratio=math.log(ratio),
        log_ratio_se=error / ratio,
        ppl_ratio=ratio,
        ppl_ratio_se=error,
        kld_mean=kld,
        kld_se=kld_se,
        kld_median=kld,
        kld_p99=kld,
        kld_max=kld,
        top1_agreement=0.9,
        top1_se=None,
        top1_ties=0.0,
    )


TABLE = [
    # ratio, its error, verdict by kv (1.01, 1.05), by w8a8 (1.02, 1.06)
    (1.000, 0.0, SAME, SAME),
    (1.004, 0.005, SAME, SAME),
    (1.004, 0.001, PASS, PASS),
    (0.980, 0.001, PASS, PASS),
    (0.980, 0.030, OPEN, OPEN),
    (1.0099, 0.0001, PASS, PASS),
    (1.015, 0.001, WARN, PASS),
    (1.015, 0.006, PASS, PASS),
    (1.030, 0.001, WARN, WARN),
    (1.030, 0.012, OPEN, PASS),
    (1.030, 0.050, OPEN, OPEN),
    (1.055, 0.001, FAIL, WARN),
    (1.055, 0.006, WARN, WARN),
    (1.065, 0.001, FAIL, FAIL),
    (1.065, 0.006, FAIL, WARN),
    (1.300, 0.010, FAIL, FAIL),
    (4.0, 1.0, FAIL, FAIL),
    (500.0, 600.0, FAIL, FAIL),
    (500.0, 4000.0, OPEN, OPEN),
    (1e250, 1e251, FAIL, FAIL),
]


@pytest.mark.parametrize(("ratio", "error", "kv", "w8a8"), TABLE)
def test_the_verdict_of(ratio: float, error: float, kv: Verdict, w8a8: Verdict) -> None:
    """Errors count on the logarithm: 500 +- 600 is e**6.2 +- a factor e**1.2, far from 1."""
    summary = make_summary(ratio, error)
    assert judge(summary, GATES["kv"])[0] is kv
    assert judge(summary, GATES["w8a8"])[0] is w8a8


@pytest.mark.parametrize(
    ("ratio", "error", "reason"),
    [
        (1.004, 0.005, "1.0040 ± 0.0050 is within one standard error of 1"),
        (1.004, 0.001, "1.0040 ± 0.0010 is at most 1.01"),
        (1.015, 0.006, "1.0150 ± 0.0060 is within one standard error of 1.01"),
        (1.030, 0.001, "1.0300 ± 0.0010 is between 1.01 and 1.05"),
        (1.065, 0.001, "1.0650 ± 0.0010 is above 1.05 by more than one standard error"),
    ],
)
def test_the_reason_names_the_ratio_its_error_and_the_threshold(
    ratio: float, error: float, reason: str
) -> None:
    assert judge(make_summary(ratio, error), GATES["kv"])[1] == f"ratio {reason}"


def test_the_thresholds_are_those_of_the_contract() -> None:
    assert {(g.name, g.pass_at, g.fail_above) for g in GATES.values()} == {
        ("kv", 1.01, 1.05),
        ("w8a8", 1.02, 1.06),
    }
    assert all(gate.kld_fail_above is None for gate in GATES.values())
    assert {name: load_gate(name) for name in GATES} == GATES


def test_a_divergence_above_its_threshold_fails_whatever_the_ratio() -> None:
    gate = Gate(name="strict", pass_at=1.01, fail_above=1.05, kld_fail_above=0.05)
    assert judge(make_summary(1.0, 0.0, kld=0.0512, kld_se=0.001), gate) == (
        FAIL,
        "mean KLD 0.0512 ± 0.0010 is above 0.05 by more than one standard error",
    )
    assert judge(make_summary(1.0, 0.0, kld=0.0512, kld_se=0.002), gate) == (
        WARN,
        "mean KLD 0.0512 ± 0.0020 is within one standard error of 0.05",
    )
    assert judge(make_summary(1.0, 0.0, kld=0.0512, kld_se=None), gate) == (
        OPEN,
        "mean KLD 0.0512 ± ?, whose error is unknown: use more and other text",
    )
    assert judge(make_summary(1.0, 0.0, kld=0.05), gate)[0] is SAME


@pytest.mark.parametrize(
    ("tokens", "kld", "ratio", "expected"),
    [
        (3, 0.015, 1.0, OPEN),  # sqrt(0.03 / 3) = 0.1
        (3, 0.015, 1.2, FAIL),  # log(1.2) = 0.18 is more than 0.1 above log(1.05) = 0.049
        (3, 0.015, 1.1, OPEN),  # log(1.1) = 0.095 is not
        (301, 0.015, 1.0, OPEN),  # sqrt(0.03 / 301) = 0.00998, log(1.01) = 0.00995
        (304, 0.015, 1.0, SAME),  # 0.00993
        (3, 0.0001, 1.0, SAME),  # 0.0082
        (3, 0.0, 1.0, SAME),
        (3, -1e-9, 1.0, SAME),  # rounding
    ],
)
def test_few_tokens_whose_losses_are_alike_tell_nothing(
    tokens: int, kld: float, ratio: float, expected: Verdict
) -> None:
    summary = make_summary(ratio, 0.0, kld=kld, tokens=tokens)
    verdict, why = judge(summary, GATES["kv"])
    assert verdict is expected
    assert (f"is of {tokens} tokens, too few" in why) is (expected is OPEN)


@pytest.mark.parametrize(
    ("clusters", "ratio", "error", "expected"),
    [
        (4, 1.0193, 0.0064, OPEN),  # eight sequences of that text: 1.0362 ± 0.0034
        (8, 1.0193, 0.0064, WARN),
        (4, 1.0, 0.003, SAME),  # t is 3.18: at most 1.00955
        (4, 1.0, 0.0032, OPEN),  # 1.0102
        (8, 1.0, 0.0032, SAME),
        (4, 0.98, 0.001, PASS),
        (4, 1.03, 0.006, WARN),  # 1.011 to 1.049
        (4, 1.03, 0.007, OPEN),
        (2, 1.065, 0.001, FAIL),  # t is 12.7: at least 1.0523
        (2, 1.065, 0.002, OPEN),
        (7, 1.065, 0.0065, OPEN),  # t is 2.45
        (7, 1.07, 0.006, FAIL),
        (2, 1.0, 0.0, SAME),
    ],
)
def test_below_eight_sequences_the_interval_of_students_t_lies_between_two_limits(
    clusters: int, ratio: float, error: float, expected: Verdict
) -> None:
    summary = make_summary(ratio, error, kld=1e-9, clusters=clusters)
    verdict, why = judge(summary, GATES["kv"])
    assert verdict is expected
    hint = f"rests on {clusters} independent parts of the text: use at least 8 sequences, "
    hint += "by more text or a smaller --seq-len"
    assert why.endswith(hint) is (expected is OPEN)


@pytest.mark.parametrize(
    ("clusters", "kld", "error", "expected"),
    [
        (4, 0.06, 0.002, FAIL),  # 0.06 - 3.18 * 0.002 = 0.0536
        (4, 0.06, 0.004, OPEN),
        (8, 0.06, 0.004, FAIL),
        (4, 0.04, 0.004, OPEN),
        (4, 0.04, 0.002, SAME),
        (8, 0.04, 0.004, SAME),
    ],
)
def test_so_it_is_with_a_threshold_on_the_divergence(
    clusters: int, kld: float, error: float, expected: Verdict
) -> None:
    gate = Gate(name="strict", pass_at=1.01, fail_above=1.05, kld_fail_above=0.05)
    summary = make_summary(1.0, 0.0, kld=kld, kld_se=error, clusters=clusters, tokens=10**7)
    assert judge(summary, gate)[0] is expected


def test_the_kld_implies_the_spread_of_the_log_ratio() -> None:
    """Tokens drawn from a distribution, and the mean of what another one near it loses on them."""
    generator = np.random.default_rng(7)
    logits = generator.normal(0, 2, 300)
    moved = logits + generator.normal(0, 0.2, 300)
    p, q = (np.exp(each) / np.exp(each).sum() for each in (logits, moved))
    drawn = generator.choice(300, p=p, size=(4000, 50))
    means = np.log(p / q)[drawn].mean(axis=1)
    kld = float((p * np.log(p / q)).sum())
    implied = make_summary(1.0, 0.0, kld=kld, tokens=50).implied_log_ratio_se
    assert implied == pytest.approx(means.std(), rel=0.1)


# --- what a ratio hides ------------------------------------------------------------------------


def make_row(sqnr_db: float | None, *, role: str = "v", **more: float) -> LayerResult:
    return make_layer("it", 7, role, site=f"layers.7.attn.{role}", sqnr_db=sqnr_db, **more)


@pytest.mark.parametrize(
    ("row", "is_broken"),
    [
        (make_row(14.9, flushed=0.5), True),
        (make_row(0.0, flushed=1.0), True),
        (make_row(14.9, clipped=0.001), True),
        (make_row(14.9), False),  # nothing was lost at an end: a coarse format
        (make_row(14.9, role="weight"), True),
        (make_row(23.9, flushed=0.021), True),  # a scale times 2^14: 6 dB under the others
        (make_row(24.1, flushed=0.5), False),
        (make_row(23.9, flushed=0.019), False),
        (make_row(23.9, flushed=0.5, role="input"), False),
        (make_row(30.0, clipped=0.011), True),
        (make_row(30.0, clipped=0.009), False),
        (make_row(None, clipped=0.5), True),
        (make_row(None), False),
    ],
)
def test_a_broken_site_is_damage(row: LayerResult, is_broken: bool) -> None:
    rows = [*[make_row(30.0, role=role) for role in ("v", "v", "input", "input")], row]
    expected = f"{row.site} (layer 7) is destroyed: " if is_broken else ""
    found = describe_damage(rows)
    assert found.startswith(expected)
    assert bool(found) is is_broken


@pytest.mark.parametrize(("ratio", "why"), [(1.0, ", but layer 7 is destroyed"), (2.0, "error")])
def test_damage_is_a_failure_whatever_the_mean_says(ratio: float, why: str) -> None:
    summary = make_summary(ratio, 0.0, kld=0.0)
    found = judge(summary, GATES["kv"], "layer 7 is destroyed")
    assert found[0] is FAIL
    assert found[1].endswith(why)


def test_the_worst_site_is_described() -> None:
    rows = [make_row(3.21, clipped=0.25), make_row(5.0, clipped=0.5)]
    assert describe_damage(rows) == (
        "layers.7.attn.v (layer 7) is destroyed: an SQNR of 3.2 dB, 25.0% clipped, 0.0% zeroed"
    )


@pytest.mark.parametrize(
    ("gate", "kld", "expected"),
    [
        (GATES["kv"], 0.0487, SAME),
        (GATES["kv"], 0.0489, WARN),
        (GATES["w8a8"], 0.0582, SAME),
        (GATES["w8a8"], 0.0584, WARN),
        (Gate(name="strict", pass_at=1.0, fail_above=1.0), 0.006, SAME),
        (Gate(name="strict", pass_at=1.0, fail_above=1.0), 0.0489, WARN),
        (Gate(name="own", pass_at=1.01, fail_above=1.05, kld_fail_above=0.5), 0.4, SAME),
    ],
)
def test_a_divergence_worth_a_failing_ratio_is_a_warning(
    gate: Gate, kld: float, expected: Verdict
) -> None:
    """log(1.05) is 0.0488, log(1.06) is 0.0583; a threshold of the gate's own takes precedence."""
    summary = make_summary(1.0, 0.0, kld=kld)
    found, why = judge(summary, gate)
    assert found is expected
    assert (f"the mean KLD is {kld:.4f} ± 0.0001" in why) is (found is WARN)


# --- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "own"),
    [
        ("a.yaml", "pass_at: 1.005\nfail_above: 1.2\nkld_fail_above: 0.3\n", "a.yaml"),
        ("a.json", '{"pass_at": 1.005, "fail_above": 1.2, "kld_fail_above": 0.3}', "a.json"),
        ("a.yml", "name: b\npass_at: 1.005\nfail_above: 1.2\nkld_fail_above: 0.3", "b"),
    ],
)
def test_a_file_holds_the_thresholds(name: str, text: str, own: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    expected = Gate(name=own, pass_at=1.005, fail_above=1.2, kld_fail_above=0.3)
    assert load_gate(str(tmp_path / name)) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"- 1\n- 2", "not a gate"),
        (b"a: b: c", "not a gate"),
        (b"\xff\xfe\x00pass_at", "not a gate"),
        (b"1: 2\npass_at: 1.0\nfail_above: 1.1", "1: Keys should be strings"),
        (b"pass_at: 1.01", "fail_above: Field required"),
        (b"pass_at: 1.01\nfail_above: 1.05\npas_at: 1", "pas_at: Extra inputs"),
        (b"pass_at: 1.06\nfail_above: 1.05", "needs 1 <= pass_at <= fail_above"),
        (b"pass_at: 0.99\nfail_above: 1.05", "needs 1 <= pass_at <= fail_above"),
        (b"pass_at: 1.01\nfail_above: .inf", "fail_above: Input should be a finite number"),
        (b"pass_at: 1\nfail_above: 1\nkld_fail_above: -1", "kld_fail_above: Input should be gr"),
    ],
)
def test_a_bad_file_is_a_usage_error_that_names_it(
    content: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        load_gate(str(path))
    assert f"--gate {path}" in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["kw", "", "/", "x" * 5000, "a\0b"])
def test_what_is_neither_a_gate_nor_a_file_is_a_usage_error(name: str) -> None:
    with pytest.raises(UsageError, match="neither a gate"):
        load_gate(name)
