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


STRICT = Gate(name="strict", pass_at=1.01, fail_above=1.05, kld_fail_above=0.05)
NARROW = Gate(name="narrow", pass_at=1.0, fail_above=1.0)
OWN = Gate(name="own", pass_at=1.01, fail_above=1.05, kld_fail_above=0.5)
KV, W8A8 = GATES["kv"], GATES["w8a8"]
FEW = "independent parts of the text: use at least 8 sequences, by more text or a smaller --seq-len"

RATIOS: list[tuple[float, float, Verdict, Verdict, str]] = [
    # ratio, its error, verdict by kv (1.01, 1.05), by w8a8 (1.02, 1.06), why by kv
    (1.000, 0.0, SAME, SAME, ""),
    (1.004, 0.005, SAME, SAME, "1.0040 ± 0.0050 is within one standard error of 1"),
    (1.004, 0.001, PASS, PASS, "1.0040 ± 0.0010 is at most 1.01"),
    (0.980, 0.001, PASS, PASS, ""),
    (0.980, 0.030, OPEN, OPEN, ""),
    (1.0099, 0.0001, PASS, PASS, ""),
    (1.015, 0.001, WARN, PASS, ""),
    (1.015, 0.006, PASS, PASS, "1.0150 ± 0.0060 is within one standard error of 1.01"),
    (1.030, 0.001, WARN, WARN, "1.0300 ± 0.0010 is between 1.01 and 1.05"),
    (1.030, 0.012, OPEN, PASS, ""),
    (1.030, 0.050, OPEN, OPEN, ""),
    (1.055, 0.001, FAIL, WARN, ""),
    (1.055, 0.006, WARN, WARN, ""),
    (1.065, 0.001, FAIL, FAIL, "1.0650 ± 0.0010 is above 1.05 by more than one standard error"),
    (1.065, 0.006, FAIL, WARN, ""),
    (1.300, 0.010, FAIL, FAIL, ""),
    (4.0, 1.0, FAIL, FAIL, ""),
    (500.0, 600.0, FAIL, FAIL, ""),  # e**6.2 +- a factor e**1.2, far from 1
    (500.0, 4000.0, OPEN, OPEN, ""),
    (1e250, 1e251, FAIL, FAIL, ""),
]


@pytest.mark.parametrize(("ratio", "error", "kv", "w8a8", "why"), RATIOS)
def test_the_verdict_of_a_ratio(
    ratio: float, error: float, kv: Verdict, w8a8: Verdict, why: str
) -> None:
    """Errors count on the logarithm."""
    summary = make_summary(ratio, error)
    verdict, told = judge(summary, KV)
    assert verdict is kv
    assert not why or told == f"ratio {why}"
    assert judge(summary, W8A8)[0] is w8a8


def of_tokens(tokens: int, kld: float, ratio: float = 1.0) -> Summary:
    return make_summary(ratio, 0.0, kld=kld, tokens=tokens)


def of_clusters(clusters: int, ratio: float, error: float) -> Summary:
    return make_summary(ratio, error, kld=1e-9, clusters=clusters)


def of_kld(kld: float, error: float | None = 0.0001, *, clusters: int = 32) -> Summary:
    return make_summary(1.0, 0.0, kld=kld, kld_se=error, clusters=clusters, tokens=10**7)


CASES: list[tuple[Summary, Gate, Verdict, str]] = [
    # few tokens whose losses are alike tell nothing
    (of_tokens(3, 0.015), KV, OPEN, "is of 3 tokens, too few"),  # sqrt(0.03 / 3) = 0.1
    (of_tokens(3, 0.015, 1.2), KV, FAIL, ""),  # log(1.2) is more than 0.1 above log(1.05)
    (of_tokens(3, 0.015, 1.1), KV, OPEN, "is of 3 tokens, too few"),  # log(1.1) is not
    (of_tokens(301, 0.015), KV, OPEN, "is of 301 tokens"),  # sqrt(0.03 / 301) > log(1.01)
    (of_tokens(304, 0.015), KV, SAME, ""),  # 0.00993
    (of_tokens(3, 0.0001), KV, SAME, ""),  # 0.0082
    (of_tokens(3, 0.0), KV, SAME, ""),
    (of_tokens(3, -1e-9), KV, SAME, ""),  # rounding
    # below eight sequences the interval of Student's t lies between two limits
    (of_clusters(4, 1.0193, 0.0064), KV, OPEN, f"rests on 4 {FEW}"),  # eight: 1.0362 ± 0.0034
    (of_clusters(8, 1.0193, 0.0064), KV, WARN, ""),
    (of_clusters(4, 1.0, 0.003), KV, SAME, ""),  # t is 3.18: at most 1.00955
    (of_clusters(4, 1.0, 0.0032), KV, OPEN, FEW),  # 1.0102
    (of_clusters(8, 1.0, 0.0032), KV, SAME, ""),
    (of_clusters(4, 0.98, 0.001), KV, PASS, ""),
    (of_clusters(4, 1.03, 0.006), KV, WARN, ""),  # 1.011 to 1.049
    (of_clusters(4, 1.03, 0.007), KV, OPEN, FEW),
    (of_clusters(2, 1.065, 0.001), KV, FAIL, ""),  # t is 12.7: at least 1.0523
    (of_clusters(2, 1.065, 0.002), KV, OPEN, FEW),
    (of_clusters(7, 1.065, 0.0065), KV, OPEN, FEW),  # t is 2.45
    (of_clusters(7, 1.07, 0.006), KV, FAIL, ""),
    (of_clusters(2, 1.0, 0.0), KV, SAME, ""),
    # so it is with a threshold on the divergence
    (of_kld(0.06, 0.002, clusters=4), STRICT, FAIL, ""),  # 0.06 - 3.18 * 0.002 = 0.0536
    (of_kld(0.06, 0.004, clusters=4), STRICT, OPEN, f"rests on 4 {FEW}"),
    (of_kld(0.06, 0.004, clusters=8), STRICT, FAIL, ""),
    (of_kld(0.04, 0.004, clusters=4), STRICT, OPEN, FEW),
    (of_kld(0.04, 0.002, clusters=4), STRICT, SAME, ""),
    (of_kld(0.04, 0.004, clusters=8), STRICT, SAME, ""),
    # a divergence above its threshold fails whatever the ratio
    (of_kld(0.0512, 0.001), STRICT, FAIL,
     "mean KLD 0.0512 ± 0.0010 is above 0.05 by more than one standard error"),
    (of_kld(0.0512, 0.002), STRICT, WARN,
     "mean KLD 0.0512 ± 0.0020 is within one standard error of 0.05"),
    (of_kld(0.0512, None), STRICT, OPEN,
     "mean KLD 0.0512 ± ?, whose error is unknown: use more and other text"),
    (of_kld(0.05), STRICT, SAME, ""),
    # a divergence worth a failing ratio is a warning: log(1.05) is 0.0488, log(1.06) is 0.0583
    (of_kld(0.0487), KV, SAME, ""),
    (of_kld(0.0489), KV, WARN, "the mean KLD is 0.0489 ± 0.0001"),
    (of_kld(0.0582), W8A8, SAME, ""),
    (of_kld(0.0584), W8A8, WARN, "the mean KLD is 0.0584 ± 0.0001"),
    (of_kld(0.006), NARROW, SAME, ""),
    (of_kld(0.0489), NARROW, WARN, "the mean KLD is 0.0489 ± 0.0001"),
    (of_kld(0.4), OWN, SAME, ""),  # a threshold of the gate's own takes precedence
]  # fmt: skip


@pytest.mark.parametrize(("summary", "gate", "expected", "why"), CASES)
def test_the_verdict_of_little_text_and_of_a_divergence(
    summary: Summary, gate: Gate, expected: Verdict, why: str
) -> None:
    verdict, told = judge(summary, gate)
    assert verdict is expected
    assert why in told


def test_the_thresholds_are_those_of_the_contract() -> None:
    assert {(g.name, g.pass_at, g.fail_above) for g in GATES.values()} == {
        ("kv", 1.01, 1.05),
        ("w8a8", 1.02, 1.06),
    }
    assert all(gate.kld_fail_above is None for gate in GATES.values())
    assert {name: load_gate(name) for name in GATES} == GATES


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


def test_damage_is_a_failure_whatever_the_mean_says() -> None:
    for ratio, why in ((1.0, ", but layer 7 is destroyed"), (2.0, "error")):
        summary = make_summary(ratio, 0.0, kld=0.0)
        verdict, told = judge(summary, KV, "layer 7 is destroyed")
        assert verdict is FAIL
        assert told.endswith(why)


def test_the_worst_site_is_described() -> None:
    rows = [make_row(3.21, clipped=0.25), make_row(5.0, clipped=0.5)]
    assert describe_damage(rows) == (
        "layers.7.attn.v (layer 7) is destroyed: an SQNR of 3.2 dB, 25.0% clipped, 0.0% zeroed"
    )


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
