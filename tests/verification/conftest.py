"""Tiny models, opened for an emulation."""

from collections.abc import Iterator

import pytest

from tests import zoo
from tests.verification.by_hand import Subject, opened


@pytest.fixture(scope="module", params=zoo.KINDS)
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    with opened(zoo.build(request.param), tmp_path_factory.mktemp("zoo") / "m") as found:
        yield found


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    with opened(zoo.build("llama"), tmp_path_factory.mktemp("llama") / "m") as found:
        yield found


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """Open a llama whose weights span several blocks in both directions."""
    sizes = {"hidden_size": 160, "intermediate_size": 200, "head_dim": 40}
    with opened(zoo.build("llama", **sizes), tmp_path_factory.mktemp("wide") / "m") as found:
        yield found
