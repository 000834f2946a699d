"""What `check` and `vllm check` say of models with towers, beside vLLM's loader."""

from pathlib import Path

import pytest

from fp8calib.plugins import vllm
from tests.engines.test_check_weights import ask
from tests.kit.multimodal import save_multimodal
from tests.real_engines.vllm_job import PYTHON


@pytest.mark.parametrize(
    ("name", "is_loaded"), [("paligemma", False), ("aya_vision", True), ("glmasr", True)]
)
def test_names_of_towers_that_vllm_does_not_know_are_not_called_fine(
    name: str, is_loaded: bool, tmp_path: Path
) -> None:
    """By transformers 5.23 they begin with `vision_tower.encoder`.

    Those of vLLM 0.32 begin with `vision_tower.vision_model`. The processor of aya_vision is made
    with a tokenizer, which vLLM's loader has to have then.
    """
    save_multimodal(name, tmp_path / "model")

    answer = vllm.check(tmp_path / "model", python=PYTHON)
    report = ask(tmp_path / "model", "vllm==0.32")

    assert answer.ok == is_loaded
    assert bool(report.unknown) != is_loaded
    assert ("has no place under this name" in str(report.unknown)) != is_loaded
