"""The comparison, with reports and observations written by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.real_engines.fuzz import evaluate
from tests.real_engines.fuzz.compare import Finding, Kind, compare
from tests.real_engines.fuzz.draw import Case, parse_case
from tests.real_engines.fuzz.evaluate import Evaluator, Result
from tests.real_engines.fuzz.exclusions import EXCLUDED, find_exclusion
from tests.real_engines.fuzz.observation import (
    HeldPair,
    Observation,
    dequantize,
    describe_difference,
)
from tests.real_engines.fuzz.report import list_disagreements, print_report
from tests.real_engines.fuzz.workers import reduce_one

STORED = {0: {0.25, 0.5}}
MISREAD = {"status": "misread", "value": None, "why": "w"}
REFUSED = {"status": "refused", "value": None, "why": "w"}
NO_SCALE = HeldPair(k=(), v=())


def say(*pair: tuple[str, float | None], weights: object = None, note: str = "") -> dict[str, Any]:
    """Make a report of one layer, from the status and value of k and v."""
    k, v = ({"status": status, "value": value, "why": "w"} for status, value in pair)
    is_ok = weights is None and {k["status"], v["status"]} == {"used"}
    problems = [note] if note else []
    layers = [{"layer": 0, "k": k, "v": v}]
    return {"ok": is_ok, "layers": layers, "weights": weights, "problems": problems}


def hold(k: float, v: float, **changes: Any) -> Observation:
    pair = {"k": (k,), "v": (v,), "is_fp8": changes.pop("is_fp8", True)}
    return Observation(layers={0: HeldPair(**pair)}, **changes)


USED = say(("used", 0.25), ("used", 0.5))
DEFAULTED = say(("defaulted", 1.0), ("defaulted", 1.0))
STOPPED = say(("refused", None), ("refused", None))
ERROR = Observation(error="ValueError: x")
CASES = {
    "the same numbers": (USED, hold(0.25, 0.5), None),
    "the largest of heads": (
        USED,
        Observation(layers={0: HeldPair(k=(0.1, 0.25), v=(0.5, 0.2))}),
        None,
    ),
    "another number": (USED, hold(0.25, 0.4), Kind.FALSE_OK),
    "a cache of 16 bits": (USED, hold(0.25, 0.5, is_fp8=False), Kind.FALSE_OK),
    "no layer": (USED, Observation(), Kind.FALSE_OK),
    "an error": (USED, ERROR, Kind.FALSE_OK),
    "an error that is foreseen": (STOPPED, ERROR, None),
    "an error instead of 1.0": (DEFAULTED, ERROR, Kind.OTHER_FAULT),
    "1.0 as foreseen": (DEFAULTED, hold(1.0, 1.0), None),
    "the file's numbers after all": (DEFAULTED, hold(0.25, 0.5), Kind.FALSE_ALARM),
    "k right and v worse than said": (
        say(("used", 0.25), ("defaulted", 1.0)),
        hold(0.25, math.nan),
        Kind.OTHER_FAULT,
    ),
    "it starts, and is right": (STOPPED, hold(0.25, 0.5), Kind.FALSE_ALARM),
    "it starts, and is wrong": (STOPPED, hold(1.0, 1.0), Kind.OTHER_FAULT),
    "no number": (say(("misread", None), ("used", 0.5)), hold(math.nan, 0.5), None),
    "no scale at all": (
        say(("dropped", None), ("dropped", None)),
        Observation(layers={0: NO_SCALE}),
        None,
    ),
    "weights that are wrong": (USED, hold(0.25, 0.5, weights_fault="x"), Kind.FALSE_OK),
    "weights as said": (
        say(("used", 0.25), ("used", 0.5), weights=MISREAD),
        hold(0.25, 0.5, weights_fault="x"),
        None,
    ),
    "weights better than said": (
        say(("used", 0.25), ("used", 0.5), weights=MISREAD),
        hold(0.25, 0.5),
        Kind.FALSE_ALARM,
    ),
    "weights that stop it": (say(("used", 0.25), ("used", 0.5), weights=REFUSED), ERROR, None),
}


@pytest.mark.parametrize("name", CASES)
def test_disagreements_are_told_apart(name: str) -> None:
    report, seen, kind = CASES[name]
    found = compare(report, seen, STORED, has_kv=True)
    assert (found and found.kind) is kind


def test_a_checkpoint_without_kv_scales_is_fine_where_caches_get_one() -> None:
    found = compare(DEFAULTED, ERROR, STORED, has_kv=False)
    assert found is not None
    assert found.kind is Kind.FALSE_OK


def test_only_listed_errors_are_excluded() -> None:
    assert find_exclusion("vllm", "ValueError: There is no module or parameter named 'x'") == ""
    assert find_exclusion("vllm", "") == ""
    assert "5.19" in find_exclusion("vllm", "Found unknown kwargs={'_name_or_path': ''}")
    assert all(why for reasons in EXCLUDED.values() for why in reasons.values())


def disagree(line: str, engine: str) -> Result:
    found = Finding(kind=Kind.FALSE_OK, check="ok", engine=engine)
    return Result(case=parse_case(line), findings={"vllm": found})


def test_the_same_effect_of_a_damage_is_one_disagreement() -> None:
    """The names of layers and the numbers in an error are not its cause."""
    error = "ValueError: no module named 'layers.{}.k_scale' in {}ForCausalLM of {} layers"
    results = [
        disagree("1:0 fp8 kv-only-k phi3 bfloat16 0", error.format(0, "Phi3", 2)),
        disagree("1:1 fp8 kv-only-k llama float16 0", error.format(1, "Llama", 3)),
        disagree("1:2 fp8 kv-only-k llama float16 0", "AssertionError: "),
        disagree("1:3 fp8 kv-only-v llama float16 0", error.format(0, "Llama", 2)),
        disagree("1:4 quark kv-only-k llama float16 0", error.format(0, "Llama", 2)),
    ]
    found = list_disagreements(results)
    drawn = [[case.seed for case in item.drawn] for item in found]
    assert drawn == [["1:0", "1:1"], ["1:2"], ["1:3"], ["1:4"]]


def test_another_effect_is_not_what_is_simplified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama disagrees as well, for another reason."""
    drawn = disagree("1:0 fp8 kv-only-k phi3 float16 0", "k 0.25")
    other = disagree("1:0 fp8 none llama bfloat16 1", "k inf").findings["vllm"]

    def find(_: Evaluator, case: Case, engine: str) -> Finding:
        return other if case.architecture == "llama" else drawn.findings[engine]

    monkeypatch.setattr(Evaluator, "find", find)
    (found,) = list_disagreements([drawn])
    reduced = reduce_one(Evaluator(Path(), {}), found)
    assert str(reduced.simplest) == "1:0 fp8 none phi3 bfloat16 0"
    assert reduced.finding == found.finding


def test_a_crash_of_check_is_a_disagreement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr(evaluate, "main_inner", crash)
    evaluator = Evaluator(tmp_path, {"vllm": lambda *_: Observation()})
    result = evaluator(parse_case("1:0 fp8 none llama bfloat16 1"))
    assert result.findings["vllm"].kind is Kind.CRASH
    assert result.findings["vllm"].check == "KeyError: 'x'"


def test_a_report_names_the_command_for_each_cause(capsys: pytest.CaptureFixture[str]) -> None:
    line = "1:0 fp8 kv-only-k phi3 bfloat16 0"
    results = [disagree(line, "ValueError: x")]
    print_report(results, list_disagreements(results), seed=1, duration_s=1)
    printed = capsys.readouterr().out
    assert f'scripts/test-engines --engine vllm --case "{line}"' in printed
    assert "CHECK SAYS FINE, THE ENGINE DOES SOMETHING ELSE: 1, of 1 causes" in printed


CODES = torch.tensor([[1.0, 2.0], [4.0, 8.0]]).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (torch.tensor(0.5), [[0.5, 1.0], [2.0, 4.0]]),
        (torch.tensor([[0.5]]), [[0.5, 1.0], [2.0, 4.0]]),
        (torch.tensor([0.5, 2.0]), [[0.5, 4.0], [2.0, 16.0]]),
        (torch.tensor([[0.5], [2.0]]), [[0.5, 4.0], [2.0, 16.0]]),
        (torch.tensor([0.5, 2.0, 3.0]), [[1.0, 2.0], [4.0, 8.0]]),
    ],
)
def test_codes_get_their_scales(scale: torch.Tensor, expected: list[list[float]]) -> None:
    """Of a square matrix a scale belongs to a column in vLLM's [in, out], else to a row."""
    found = dequantize({"w": CODES, "w_scale": scale}, is_transposed=True)["w"]
    assert found.tolist() == expected
    turned = dequantize({"w": CODES.T.contiguous(), "w_scale": scale})["w"]
    assert turned.T.tolist() == expected


def test_blocks_and_parts_of_experts_get_their_scales() -> None:
    codes = torch.ones(2, 256, 384).to(torch.float8_e4m3fn)
    blocks = torch.arange(12.0).reshape(2, 2, 3)
    found = dequantize({"w13": codes, "w13_scale_inv": blocks})["w13"]
    assert [float(found[1, row, column]) for row in (127, 128) for column in (0, 383)] == [
        6,
        8,
        9,
        11,
    ]
    parts = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    found = dequantize({"w13": codes, "w13_scale": parts})["w13"]
    assert [float(found[e, row, 0]) for e in (0, 1) for row in (127, 128)] == [1, 2, 3, 4]


def test_rounding_is_no_difference_and_damage_is() -> None:
    generator = torch.Generator().manual_seed(0)
    meant = {"w": torch.randn(64, 64, generator=generator)}
    rounded = (meant["w"] * 100).to(torch.float8_e4m3fn).float() / 100
    assert describe_difference({"w": rounded}, meant) == ""
    assert describe_difference({"w": rounded.T}, meant) == ""
    assert describe_difference({}, meant) == "w is not there"
    more = {"w": rounded, "layers.1.up_proj.weight": rounded}
    assert "of no tensor of the model" in describe_difference(more, meant)
    norm = {"norm": torch.randn(64, generator=generator)}
    assert describe_difference({"norm": norm["norm"].bfloat16()}, norm) == ""
    assert describe_difference({"norm": torch.ones(64)}, norm).startswith("norm differs by 1")
    assert describe_difference({}, norm) == "norm is not there"
    zeros = torch.zeros(1, 4)
    assert describe_difference({"w": zeros}, {"w": zeros}) == ""
    assert describe_difference({"w": zeros + 1}, {"w": zeros}).startswith("w differs by inf")
    assert describe_difference({"w": rounded * 1.2}, meant).startswith("w differs by 0.2")
    assert describe_difference({"w": rounded * math.nan}, meant).startswith("w differs by inf")
    assert describe_difference({"w": rounded[:32]}, meant).startswith("w differs by inf")


def test_one_row_of_many_is_a_difference() -> None:
    meant = torch.ones(256, 64)
    meant[0] = 0
    held = meant * 1.03
    assert describe_difference({"w": held}, {"w": meant}) == ""
    held[7] = 0
    for way in (held, held.T):
        assert describe_difference({"w": way}, {"w": meant}) == "w differs by 1 of its norm"
