"""The planted model, and what servers of it predict."""

from pathlib import Path

import pytest
import torch

from fp8calib.plugins.plan.choices import keep_modules
from tests.cli.conftest import save_tokenizer
from tests.plugins.server import planted
from tests.plugins.server.fake import Predict


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the model that needs scales in one layer, with a tokenizer."""
    folder = tmp_path_factory.mktemp("server") / "model"
    planted.save_model(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="package")
def runner(model: Path) -> planted.Runner:
    """Compute what the server computes, in fp32."""
    return planted.Runner(model, torch.float32)


@pytest.fixture(scope="package")
def unscaled(runner: planted.Runner) -> Predict:
    """Give what a server without scales predicts."""
    return runner.predict(runner.emulate(None))


@pytest.fixture(scope="package")
def plain(runner: planted.Runner) -> Predict:
    """Give what an unquantized server predicts."""
    return runner.predict(keep_modules(runner.emulate(None), frozenset()))
