"""What `check` says of KV scales is what vLLM held after loading them."""

import json
from pathlib import Path

import pytest

from fp8calib.engines.check import check_folder
from fp8calib.engines.replay.folder import open_folder
from fp8calib.engines.replay.verdicts import EngineReport
from fp8calib.model.geometry_from_config import read_geometry
from tests.engines.vllm_cases import CASES, GOLDENS

VLLM = "vllm==0.32"


@pytest.fixture(scope="module")
def goldens() -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = json.loads(GOLDENS.read_text())
    return found


@pytest.mark.parametrize("name", CASES)
def test_check_says_what_vllm_does(
    tmp_path: Path, goldens: dict[str, dict[str, object]], name: str
) -> None:
    case, golden = CASES[name], goldens[name]
    report = _ask(case.write(tmp_path / "model"))

    found = [[each.k.status.value, each.v.status.value] for each in report.layers]
    pair = [case.status] * 2 if isinstance(case.status, str) else case.status
    assert found == [pair, [case.later_status] * 2 if case.later_status else pair]
    verdicts = [each for layer in report.layers for each in (layer.k, layer.v)]
    assert any(case.why in f"{each.why} {each.fix}" for each in verdicts)
    if case.status == "unknown":
        assert report.unknown
        return
    assert bool(golden["error"]) is (case.status == "refused")
    assert [each.k.value for each in report.layers] == golden.get("k", [None, None])
    assert [each.v.value for each in report.layers] == golden.get("v", [None, None])


def _ask(folder: Path) -> EngineReport:
    opened = open_folder(folder)
    geometry = read_geometry(folder, opened.config)
    return check_folder(opened, geometry, [VLLM], 1)[VLLM]
