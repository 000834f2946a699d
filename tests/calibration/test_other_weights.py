"""Tensors that are no weights of linears."""

from pathlib import Path

import pytest
import torch

from fp8calib.calibration.weight_stats import check_other_weights
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.errors import ModelError
from tests import zoo
from tests.kit.checkpoints import change_tensors


def test_nan_in_a_norm_is_refused_and_integers_are_passed_over(tmp_path: Path) -> None:
    zoo.save("llama", tmp_path)
    change_tensors(tmp_path, {"model.ids": torch.arange(3)})
    with Checkpoint.open(tmp_path) as checkpoint:
        check_other_weights(checkpoint, ["model.ids", "model.norm.weight"])

    change_tensors(tmp_path, {"model.norm.weight": torch.tensor([1.0, float("nan")] * 16)})
    with Checkpoint.open(tmp_path) as checkpoint, pytest.raises(ModelError, match=r"norm\.weight"):
        check_other_weights(checkpoint, ["model.norm.weight"])
