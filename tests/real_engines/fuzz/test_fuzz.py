"""What is drawn, what damages change, and how `check` and an engine are compared."""

import copy
import math
from random import Random
from typing import Any

import pytest
import torch

from tests.real_engines.fuzz.architectures import ARCHITECTURES, SIMPLEST, save_model
from tests.real_engines.fuzz.compare import HeldPair, Kind, Observation, compare
from tests.real_engines.fuzz.draft import Draft, UnfitError
from tests.real_engines.fuzz.draw import DAMAGES, draw, parse_case
from tests.real_engines.fuzz.forms import FORMS


def test_three_hundred_cases_have_every_form_damage_and_architecture() -> None:
    cases = draw(300, 0)
    assert {case.form for case in cases} == set(FORMS)
    assert {name for case in cases for name in case.damages} == set(DAMAGES)
    assert {case.architecture for case in cases} == set(ARCHITECTURES)
    assert 40 <= sum(not case.damages for case in cases) <= 100
    assert [parse_case(str(case)) for case in cases[:50]] == draw(50, 0) != draw(50, 1)


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Draft]:
    """Make a llama in every form, and a model that stores each expert by itself."""
    made = {}
    for architecture, forms in ((SIMPLEST, list(FORMS)), ("qwen3_moe", ["kv-overlay"])):
        folder = tmp_path_factory.mktemp("fuzz")
        save_model(architecture, folder / "model", "bfloat16")
        for number, form in enumerate(forms):
            random = Random(0)  # noqa: S311
            out = folder / f"out{number}"
            made[architecture, form] = FORMS[form].write(folder / "model", out, random)
    return made


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damage_changes_a_form_that_it_fits(
    drafts: dict[tuple[str, str], Draft], name: str
) -> None:
    """Some forms have the shape or the key already; a form that lacks what it needs says so."""
    damage = DAMAGES[name]
    for (architecture, form), plain in drafts.items():
        if damage.fits(FORMS[form]) and architecture in (damage.architectures or {SIMPLEST}):
            draft = copy.deepcopy(plain)
            try:
                damage.change(draft)
            except UnfitError:
                continue
            if list_contents(draft) != list_contents(plain):
                return
    pytest.fail("nothing is changed")


def list_contents(draft: Draft) -> list[object]:
    tensors = {name: draft[name] for name in draft}
    raw = {n: t.contiguous().reshape(-1).view(torch.uint8) for n, t in tensors.items()}
    return [
        {n: (t.dtype, t.shape, raw[n].numpy().tobytes()) for n, t in tensors.items()},
        (draft.config, draft.own_file, draft.metadata, draft.missing_files),
        (draft.is_indexed, draft.unlisted, list(draft.written_last)),
    ]


STORED = {0: {0.25, 0.5}}
MISREAD = {"status": "misread", "value": None, "why": "w"}
REFUSED = {"status": "refused", "value": None, "why": "w"}


def say(*pair: tuple[str, float | None], weights: object = None) -> dict[str, Any]:
    """Make a report of one layer, from the status and value of k and v."""
    k, v = ({"status": status, "value": value, "why": "w"} for status, value in pair)
    is_ok = weights is None and {k["status"], v["status"]} == {"used"}
    layers = [{"layer": 0, "k": k, "v": v}]
    return {"ok": is_ok, "layers": layers, "weights": weights, "problems": []}


def hold(k: float, v: float, **changes: Any) -> Observation:
    pair = {"k": (k,), "v": (v,), "is_fp8": changes.pop("is_fp8", True)}
    return Observation(layers={0: HeldPair(**pair)}, **changes)


PAIR = (("used", 0.25), ("used", 0.5))
USED = say(*PAIR)
DEFAULTED = say(("defaulted", 1.0), ("defaulted", 1.0))
DROPPED = say(("dropped", None), ("dropped", None))
STOPPED = say(("refused", None), ("refused", None))
ERROR = Observation(error="ValueError: x")
NO_SCALE = Observation(layers={0: HeldPair(k=(), v=())})
HEADS = Observation(layers={0: HeldPair(k=(0.1, 0.25), v=(0.5, 0.2))})


@pytest.mark.parametrize(
    ("report", "seen", "kind"),
    [
        (USED, hold(0.25, 0.5), None),
        (USED, HEADS, None),
        (USED, hold(0.25, 0.4), Kind.FALSE_OK),
        (USED, hold(0.25, 0.5, is_fp8=False), Kind.FALSE_OK),
        (USED, Observation(), Kind.FALSE_OK),
        (USED, ERROR, Kind.FALSE_OK),
        (STOPPED, ERROR, None),
        (STOPPED, hold(0.25, 0.5), Kind.FALSE_ALARM),
        (STOPPED, hold(1.0, 1.0), Kind.OTHER_FAULT),
        (DEFAULTED, ERROR, Kind.OTHER_FAULT),
        (DEFAULTED, hold(1.0, 1.0), None),
        (DEFAULTED, hold(0.25, 0.5), Kind.FALSE_ALARM),
        (say(("used", 0.25), ("defaulted", 1.0)), hold(0.25, math.nan), Kind.OTHER_FAULT),
        (say(("misread", None), ("used", 0.5)), hold(math.nan, 0.5), None),
        (DROPPED, NO_SCALE, None),
        (USED, hold(0.25, 0.5, weights_fault="x"), Kind.FALSE_OK),
        (say(*PAIR, weights=MISREAD), hold(0.25, 0.5, weights_fault="x"), None),
        (say(*PAIR, weights=MISREAD), hold(0.25, 0.5), Kind.FALSE_ALARM),
        (say(*PAIR, weights=REFUSED), ERROR, None),
    ],
)
def test_disagreements_are_told_apart(
    report: dict[str, Any], seen: Observation, kind: Kind | None
) -> None:
    found = compare(report, seen, STORED, has_kv=True)
    assert (found and found.kind) is kind
