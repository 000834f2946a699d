"""A function returns what its command prints with `--json`."""

import doctest
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

import fp8calib
from fp8calib.calibration.calibration_stats import save_stats
from fp8calib.plugins.vllm import load_kv_scales
from tests import zoo
from tests.cli.program import snapshot, succeed
from tests.kit.minutes import takes_minutes
from tests.plugins.vllm.live_cases import CLEAN, Recorded, write_model

pytestmark = pytest.mark.filterwarnings("ignore::fp8calib.Fp8CalibWarning")
QUICK = ("--samples", 4, "--seq-len", 16, "--dtype", "float32")


@pytest.fixture(scope="module")
def out(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results") / "out"
    succeed("calibrate", model, "--data", data, *QUICK, "--out", folder)
    return folder


# --- the results of the python functions show one screen of themselves ---------------------------


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
    names = dir(results[name])
    assert not [each for each in names if each.startswith("_")]
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


# --- tables of results ----------------------------------------------------------------------------


ROWS = [{"input_ids": list(range(5 + row, 60 + row))} for row in range(3)]
OPTIONS = {"observe": ["kv", "inputs"], "pack": False}


def load(folder: Path) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def work(folder: Path, out: str) -> None:
    """Calibrate between two steps of a training."""
    distributed.init_process_group("gloo")
    model = load(folder)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    ids = torch.tensor([ROWS[0]["input_ids"]])
    for step in range(2):
        model(ids, labels=ids).loss.backward()
        if step == 0:
            stats = fp8calib.calibrate(model, ROWS, **OPTIONS).stats
    save_stats(stats, Path(f"{out}-{distributed.get_rank()}"))
    with pytest.raises(fp8calib.ModelError, match="is sharded over processes"):
        fp8calib.calibrate(model, ROWS, **OPTIONS, out=out)
    distributed.destroy_process_group()


@takes_minutes
def test_every_process_has_the_statistics_of_the_whole_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", factor=0)
    own = tmp_path / "own"
    save_stats(fp8calib.calibrate(load(folder), ROWS, **OPTIONS).stats, own)

    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", __name__)
    subprocess.run([sys.executable, *torchrun, folder, tmp_path / "sharded"], check=True)

    for rank in range(2):
        assert (tmp_path / f"sharded-{rank}").read_bytes() == own.read_bytes()
    assert load_kv_scales(Recorded(CLEAN), tmp_path / "sharded-0").ok


if __name__ == "__main__":
    work(Path(sys.argv[1]), sys.argv[2])


# --- the examples of docs/python-api.md, run as doctests -----------------------------------------


PAGE = Path(__file__).parents[2] / "docs" / "python-api.md"


@pytest.mark.filterwarnings("ignore::fp8calib.Fp8CalibWarning")
def test_the_examples_give_what_the_page_shows(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(model, tmp_path / "model")
    shutil.copy(data, tmp_path / "calib.jsonl")
    monkeypatch.chdir(tmp_path)
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted > 20
    assert not result.failed


def test_quantize_and_export_take_a_model_in_memory(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = zoo.save("llama", tmp_path / "saved")
    stats = fp8calib.calibrate(model, [torch.arange(3, 100)])
    capfd.readouterr()
    fp8calib.quantize(model, "fp8-static", tmp_path / "live", stats=stats)
    assert capfd.readouterr().err == ""
    fp8calib.quantize(tmp_path / "saved", "fp8-static", tmp_path / "path", stats=stats)
    assert snapshot(tmp_path / "live") == snapshot(tmp_path / "path")
    fp8calib.export(stats, tmp_path / "out-live", formats="kv-overlay", model=model)
    fp8calib.export(stats, tmp_path / "out-path", formats="kv-overlay", model=tmp_path / "saved")
    assert snapshot(tmp_path / "out-live") == snapshot(tmp_path / "out-path")
    gpt2 = zoo.build("gpt2")
    with pytest.raises(
        fp8calib.ModelError, match=r"^GPT2LMHeadModel: gpt2 keeps its weights"
    ) as raised:
        fp8calib.quantize(gpt2, "fp8-dynamic", tmp_path / "gpt2")
    assert "fp8calib-model-" not in repr(raised.value) + raised.value.hint
    assert {path.name for path in tmp_path.iterdir()} == {
        *("saved", "live", "path", "out-live", "out-path")
    }


def test_a_model_in_memory_is_written_with_the_tokenizer_that_is_passed(
    model: Path, tmp_path: Path
) -> None:
    live = AutoModelForCausalLM.from_pretrained(model)
    stats = fp8calib.calibrate(live, [torch.arange(3, 100)])
    both = ["kv-overlay", "kv-scales"]
    with pytest.warns(fp8calib.Fp8CalibWarning, match="no tokenizer is written"):
        fp8calib.quantize(live, "fp8-dynamic", tmp_path / "a")
    alone = fp8calib.export(stats, tmp_path / "b", formats=both, model=live).warnings
    assert [text for text in alone if "no tokenizer is written" in text]
    assert not fp8calib.export(stats, tmp_path / "c", formats="kv-scales").warnings
    tokenizer = AutoTokenizer.from_pretrained(model)
    done = fp8calib.export(stats, tmp_path / "d", formats=both, model=live, tokenizer=tokenizer)
    assert not [text for text in done.warnings if "no tokenizer is written" in text]
    assert "kv-overlay/tokenizer.json" in done.files
    with pytest.raises(TypeError, match=r"got an unexpected keyword argument 'tokeniser'"):
        fp8calib.export(stats, tmp_path / "e", formats=both, tokeniser=tokenizer)  # type: ignore[call-arg]
