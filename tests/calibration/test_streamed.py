"""A streamed model gives the statistics of the whole one, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fp8calib.calibration.calibration_stats import save_stats
from tests import zoo
from tests.architectures import families
from tests.doors import make_plan, run_calibration
from tests.zoo import draw

Save = Callable[[Path], object]
MODELS: dict[str, Save] = {
    **{name: lambda folder, name=name: zoo.save(name, folder) for name in zoo.ZOO},  # type: ignore[misc]
    **{
        f"further-{name}": lambda folder, name=name: families.save(  # type: ignore[misc]
            name, families.FAMILIES[name], folder
        )
        for name in families.FAMILIES
    },
}


def require_same_bytes(folder: Path, lengths: list[int]) -> None:
    """Require that a whole and a streamed run over rows of these lengths give the same file."""
    plan, path = make_plan(draw(lengths, seed=9), packed=False), folder.parent / "stats"
    found = []
    for streamed in (False, True):
        _, stats = run_calibration(folder, plan, batch_size=3, streamed=streamed, ram_bytes=0)
        save_stats(stats, path)
        found.append(path.read_bytes())
    assert found[0] == found[1]


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_architecture_gives_the_same_file(name: str, tmp_path: Path) -> None:
    """Batches are padded, and hidden states wait in a file."""
    MODELS[name](tmp_path / "model")
    require_same_bytes(tmp_path / "model", [7, 20, 13, 3, 20, 9, 20, 4, 11, 6])
