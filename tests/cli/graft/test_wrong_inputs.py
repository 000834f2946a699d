"""Every wrong input has one clear message, and nothing is written or changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.checkpoints import change_config

Refused = Callable[..., str]


def test_modelopt_without_an_algorithm(
    refused: Refused, children: Callable[[str], Path], tmp_path: Path
) -> None:
    child = Path(shutil.copytree(children("ModelOpt"), tmp_path / "child"))
    own = (child / "hf_quant_config.json").read_text()
    (child / "hf_quant_config.json").write_text('{"quantization": {}}')
    assert "hf_quant_config.json: the ModelOpt config has no quant_algo" in refused(7, child)
    (child / "hf_quant_config.json").write_text(own)
    change_config(child, lambda config: config["quantization_config"].pop("quant_algo"))
    text = refused(7, child)
    assert f"{child / 'config.json'}: the ModelOpt config has no quant_algo" in text


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        (lambda c: c["quantization_config"].update(config_groups=[]), 7, "config_groups is []"),
        (lambda c: c.pop("quantization_config"), 4, "config.json has no quantization_config"),
        (lambda c: c.update(model_type="nobody"), 4, "model_type 'nobody' is unknown"),
    ],
)
def test_a_wrong_config(
    refused: Refused, child: Path, change: Callable[[Any], object], code: int, says: str
) -> None:
    change_config(child, change)
    assert says in refused(code, child)
