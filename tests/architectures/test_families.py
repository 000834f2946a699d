"""Families that are not understood are refused in a message that names the reason."""

import re
from pathlib import Path
from unittest.mock import patch

import pytest

from fp8calib.errors import ModelError
from tests.architectures import families
from tests.cli.conftest import write_rows
from tests.cli.program import fail
from tests.doors import make_plan, run_calibration
from tests.zoo import draw


@pytest.mark.parametrize("family", sorted(families.REFUSED))
def test_a_family_that_is_not_understood_is_refused_by_name(family: str, tmp_path: Path) -> None:
    """The message names the class or family, and what was looked for."""
    changes, message = families.REFUSED[family]
    families.save(family, changes, tmp_path / "model")
    with pytest.raises(ModelError, match=message):
        run_calibration(tmp_path / "model", make_plan(draw([20])))


@pytest.mark.parametrize("family", ["longcat_flash", "minimax"])
def test_what_is_not_understood_is_refused_before_loading(family: str, tmp_path: Path) -> None:
    changes, message = families.REFUSED[family]
    families.save(family, changes, tmp_path / "model")
    data = write_rows(tmp_path / "rows.jsonl", [{"input_ids": draw([20])[0].tolist()}])
    with patch("fp8calib.calibration.run_model.load_model") as load:
        said = fail(4, "calibrate", tmp_path / "model", "--data", data, "--out", tmp_path / "out")
    assert not load.called
    assert re.search(message, said)
