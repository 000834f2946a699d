"""Verdicts by hand, and gate files good and bad."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8calib.errors import UsageError
from fp8calib.verification.judge.fits import describe_damage
from fp8calib.verification.judge.gates import GATES, Gate, judge, load_gate
from fp8calib.verification.report import CandidateResult, LayerResult, Verdict
from tests.kit.reports import make_layer


def make_summary(
    ratio: float,
    error: float,
    *,
    kld: float = 0.01,
    kld_se: float | None = 0.0001,
    tokens: float = 20_000,
    clusters: float = 32,
    sequences: int | None = None,
) -> CandidateResult:
    """Make a summary of a ratio with its own standard error (not its logarithm's)."""
    return CandidateResult(
        num_tokens=int(tokens),
        num_sequences=int(clusters if sequences is None else sequences),
        clusters=int(clusters),
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
OWN_GATES = {each.name: each for each in (STRICT, NARROW, OWN)}

Row = tuple[dict[str, Any], str, Verdict, str]


def read_rows() -> Iterator[Row]:
    """Read figures, gate, verdict and reason of `verdicts.tsv`; what is not told has a default."""
    names = ("ratio", "error", "kld", "kld_se", "tokens", "clusters")
    for line in Path(__file__).with_name("verdicts.tsv").read_text("utf-8").splitlines()[1:]:
        *cells, gate, verdict, why, _ = line.split("\t")
        told = {name: cell for name, cell in zip(names, cells, strict=True) if cell != "-"}
        figures = {name: None if each == "unknown" else float(each) for name, each in told.items()}
        yield figures, gate, Verdict(verdict), "" if why == "-" else why


@pytest.mark.parametrize(("figures", "gate", "expected", "why"), read_rows())
def test_the_verdict_is(figures: dict[str, Any], gate: str, expected: Verdict, why: str) -> None:
    """Errors count on the logarithm; below eight sequences Student's t widens the interval."""
    verdict, told = judge(make_summary(**figures), OWN_GATES.get(gate) or GATES[gate])
    assert verdict is expected
    assert why in told


@pytest.mark.parametrize(
    ("ratio", "of_one", "of_many"),
    [(1.018, "cannot-tell", "pass"), (1.002, "no-difference", "no-difference")],
)
def test_one_sequence_is_trusted_no_more_than_a_few(
    ratio: float, of_one: str, of_many: str
) -> None:
    """Its 32 parts give an error of 0.007, whose interval of 95 % reaches 0.0143 either way."""
    assert judge(make_summary(ratio, 0.007, sequences=1), GATES["w8a8"])[0] == of_one
    assert judge(make_summary(ratio, 0.007), GATES["w8a8"])[0] == of_many


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
    _, why = judge(make_summary(1.0, 0.0, kld=kld, tokens=50), GATES["kv"])
    implied = float(why.partition("KLD implies, is ")[2].partition(",")[0])
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
        verdict, told = judge(summary, GATES["kv"], "layer 7 is destroyed")
        assert verdict is Verdict.FAIL
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
