"""What `check` says of damaged FP8 weights, by engine, form and scheme."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fp8calib.engines.check import check_folder
from fp8calib.engines.replay.folder import open_folder
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.model.geometry_from_config import read_geometry
from tests.engines.test_check_weights import PAIRS, WHOLE, make
from tests.engines.weight_damages import CT, DAMAGES, Damage, Verdict, copy_damaged

ENGINES = ("vllm==0.32", "sglang", "transformers")
CASES = [(name, pair) for name, damage in DAMAGES.items() for pair in damage.pairs]
Pair = tuple[str, str]
FindBase = Callable[[Pair], tuple[Path, ModelGeometry]]


@pytest.fixture(scope="module")
def find_base(tmp_path_factory: pytest.TempPathFactory) -> FindBase:
    """Give a whole checkpoint of a form and scheme and its geometry, made once."""
    made: dict[Pair, tuple[Path, ModelGeometry]] = {}

    def find(pair: Pair) -> tuple[Path, ModelGeometry]:
        if pair not in made:
            folder = make(tmp_path_factory.mktemp("-".join(pair)), *pair, **WHOLE)
            made[pair] = folder, read_geometry(folder, open_folder(folder).config)
        return made[pair]

    return find


def expect(damage: Damage, pair: Pair, engine: str) -> Verdict | None:
    """Give the verdict of an engine; None where the table has none, or the form is not served."""
    if engine == "vllm":
        return damage.by_pair.get(pair, damage.vllm)
    if engine == "transformers":
        return damage.transformers if pair[0] == CT else None
    return damage.sglang if pair != ("modelopt", "fp8-dynamic") and not damage.by_pair else None


def test_every_form_and_scheme_is_damaged() -> None:
    assert {pair for _, pair in CASES} == set(PAIRS)


@pytest.mark.parametrize(("name", "pair"), CASES)
def test_damages(tmp_path: Path, find_base: FindBase, name: str, pair: Pair) -> None:
    base, geometry = find_base(pair)
    folder = copy_damaged(base, tmp_path / "case", DAMAGES[name].edit)
    expected = {
        engine: expect(DAMAGES[name], pair, engine.partition("==")[0]) for engine in ENGINES
    }
    reports = check_folder(open_folder(folder), geometry, ENGINES, 1).engines
    for engine, (status, words) in ((key, each) for key, each in expected.items() if each):
        verdict = reports[engine].weights
        texts = [verdict.why] if verdict is not None else list(reports[engine].problems)
        assert (str(verdict.status) if verdict is not None else "ok") == status, (engine, texts)
        assert not words or any(words in text for text in texts), (engine, texts)
