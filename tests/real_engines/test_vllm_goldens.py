"""vLLM still answers as recorded; with FP8CALIB_RECORD set, its answers are written instead."""

import json
import math
import os
from collections.abc import Sequence

import pytest

from tests.engines.vllm_cases import CASES, GOLDENS
from tests.real_engines.fuzz.engines import list_layers
from tests.real_engines.vllm_job import load_or_refuse

Answer = dict[str, str | list[float | None]]


def finite(numbers: Sequence[float]) -> float | None:
    return max(numbers) if all(map(math.isfinite, numbers)) else None


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """Let vLLM load all cases."""
    root = tmp_path_factory.mktemp("cases")
    folders = {name: case.write(root / str(i)) for i, (name, case) in enumerate(CASES.items())}
    found: dict[str, Answer] = {}
    for name, held in load_or_refuse(folders, dtype="auto").items():
        if isinstance(held, str):
            found[name] = {"error": held[:200].replace(str(root), "")}
            continue
        layers = [pair for _, pair in sorted(list_layers(held).items())]
        found[name] = {
            "error": "",
            "k": [finite(each.k) for each in layers],
            "v": [finite(each.v) for each in layers],
        }
    if "FP8CALIB_RECORD" in os.environ:
        lines = (f"{json.dumps(name)}: {json.dumps(each)}" for name, each in found.items())
        GOLDENS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return found


@pytest.mark.parametrize("name", CASES)
def test_vllm_answers_as_recorded(answers: dict[str, Answer], name: str) -> None:
    recorded = json.loads(GOLDENS.read_text())[name]
    fresh = answers[name]
    assert bool(fresh["error"]) is bool(recorded["error"]), fresh["error"]
    assert fresh.get("k") == recorded.get("k")
    assert fresh.get("v") == recorded.get("v")
