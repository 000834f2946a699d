"""Code that comes with a checkpoint runs only on request."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import QUICK
from tests.cli.program import succeed
from tests.kit.checkpoints import change_config

Refused = Callable[..., str]

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({marker!r}).write_text("ran")
class CarriedConfig(LlamaConfig):
    model_type = "carried"
class CarriedForCausalLM(LlamaForCausalLM):
    config_class = CarriedConfig
"""


@pytest.fixture
def carried(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a checkpoint whose own Python code writes the file `ran` when it is imported."""
    folder = shutil.copytree(model, tmp_path / "carried")
    modules = tmp_path / "modules"
    modules.mkdir()
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(modules))
    monkeypatch.setattr(sys, "path", [*sys.path])
    (folder / "carried.py").write_text(CODE.format(marker=str(tmp_path / "ran")))
    names = {
        "AutoConfig": "carried.CarriedConfig",
        "AutoModelForCausalLM": "carried.CarriedForCausalLM",
    }
    return change_config(
        folder, model_type="carried", architectures=["CarriedForCausalLM"], auto_map=names
    )


def test_carried_code_is_not_run_unasked(refused: Refused, carried: Path, tmp_path: Path) -> None:
    text = refused(4, carried)
    assert "model_type carried needs the Python code of the checkpoint" in text
    assert "--trust-remote-code" in text
    assert not (tmp_path / "ran").exists()


def test_code_beside_a_known_architecture_is_not_run(
    carried: Path, data: Path, tmp_path: Path
) -> None:
    change_config(carried, model_type="llama", architectures=["LlamaForCausalLM"])
    succeed("calibrate", carried, "--data", data, *QUICK, "--dry-run")
    assert not (tmp_path / "ran").exists()
