"""`verify`, `quantize`, `export` and `check` beside the commands of the same names."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import fp8calib
from tests import zoo
from tests.cli.program import snapshot

pytestmark = pytest.mark.filterwarnings("ignore::fp8calib.Fp8CalibWarning")


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
    with pytest.raises(
        TypeError, match=r"export\(\) got an unexpected keyword argument 'tokeniser'"
    ):
        fp8calib.export(stats, tmp_path / "e", formats=both, tokeniser=tokenizer)  # type: ignore[call-arg]
