"""The results of the Python functions show one screen of themselves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import fp8calib


@pytest.fixture(scope="module")
def results(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("overviews")
    text = {"samples": 4, "seq_len": 16, "dtype": "float32"}
    stats = fp8calib.calibrate(model, str(data), out=folder / "out", **text)
    with pytest.warns(fp8calib.Fp8CalibWarning):
        return {
            "calibrate": stats,
            "verify": fp8calib.verify(model, stats, str(data), **text),
            "check": fp8calib.check(folder / "out" / "kv-overlay"),
            "quantize": fp8calib.quantize(model, "w8a16", folder / "q"),
        }


@pytest.mark.parametrize("name", ["calibrate", "verify", "check", "quantize"])
def test_a_result_fits_on_a_screen(results: dict[str, object], name: str) -> None:
    for shown in (repr(results[name]), str(results[name])):
        assert len(shown.splitlines()) <= 25
        assert len(shown) < 1000
    names = [each for each in dir(results[name]) if not each.startswith("_")]
    assert not [each for each in names if each.startswith("model_") and each != "model_hash"]
    assert {"copy", "json", "parse_obj"}.isdisjoint(names)
    assert {"passed", "to_json"} <= set(names)


def test_a_result_begins_with_its_answer(results: dict[str, object]) -> None:
    assert repr(results["verify"]).startswith("VerifyResult('This model ")
    assert repr(results["check"]).startswith("CheckResult('vllm: ok, 2 of 2 layers served; ")
    result = results["calibrate"]
    assert isinstance(result, fp8calib.CalibrateResult)
    assert re.match(r"CalibrationStats\(LlamaForCausalLM: \d+ tensors, ", repr(result.stats))


def test_amax_is_a_table_of_plain_values(results: dict[str, object]) -> None:
    result = results["calibrate"]
    assert isinstance(result, fp8calib.CalibrateResult)
    table = result.stats.amax_table()
    assert json.loads(json.dumps(table)) == table
    assert [row["layer"] for row in table] == sorted(row["layer"] for row in table)  # type: ignore[type-var]
    by_name = {f"{row['module']}.{row['role']}": row for row in table}
    assert set(by_name) == set(map(str, result.stats.sites))
    for site, seen in result.stats.sites.items():
        row = by_name[str(site)]
        assert (row["amax"], row["tokens"]) == (float(seen.amax.max()), seen.count)
