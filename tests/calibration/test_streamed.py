"""A streamed model gives the statistics of the whole one, byte for byte."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import zoo
from tests.architectures import families
from tests.doors import as_bytes, make_plan, run_calibration
from tests.kit.minutes import in_minutes
from tests.zoo import draw

FURTHER = [f"further-{name}" for name in sorted(families.FAMILIES)]
MODELS: dict[str, Callable[[Path], object]] = {
    **{name: lambda folder, name=name: zoo.save(name, folder) for name in zoo.ZOO},  # type: ignore[misc]
    **{
        f"further-{name}": lambda folder, name=name: families.save(  # type: ignore[misc]
            name, families.FAMILIES[name], folder
        )
        for name in families.FAMILIES
    },
}
RUN = [*sorted(zoo.ZOO), *FURTHER[::2], *in_minutes(*FURTHER[1::2])]


@pytest.mark.parametrize("name", RUN)
def test_every_architecture_gives_the_same_file(name: str, tmp_path: Path) -> None:
    """Batches are padded, hidden states wait in a file, and the ninth row is in the histograms."""
    MODELS[name](tmp_path / "model")
    plan = make_plan(draw([7, 20, 13, 3, 20, 9, 20, 4, 11], seed=9), packed=False)
    whole, streamed = (
        run_calibration(
            tmp_path / "model", plan, batch_size=5, streamed=is_streamed, hidden_ram_bytes=0
        )[1]
        for is_streamed in (False, True)
    )
    assert as_bytes(whole, tmp_path) == as_bytes(streamed, tmp_path)
