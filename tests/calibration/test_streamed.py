"""A streamed model gives the statistics of the whole one, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fp8calib.calibration.calibrate import collect_stats, make_header
from fp8calib.calibration.calibration_stats import save_stats
from fp8calib.calibration.observe import Observe
from fp8calib.calibration.streamed_model import Streaming
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.data.sequences import DataPlan
from fp8calib.model.load import build_skeleton, load_model, open_source
from fp8calib.model.prepared import prepare
from tests import zoo
from tests.architectures import families
from tests.doors import Silent, make_plan
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


def stats_bytes(
    folder: Path,
    plan: DataPlan | None,
    *,
    streamed: bool,
    batch_size: int = 2,
    dtype: torch.dtype = torch.float32,
    observe: Observe | None = None,
    ram_bytes: int = 0,
) -> bytes:
    observe = observe or Observe(weights=True)
    source = open_source(str(folder))
    if streamed:
        model = build_skeleton(source, dtype=dtype)
        streaming = Streaming(
            dtype=dtype, device="cpu", hidden_ram_bytes=ram_bytes, scratch=folder.parent
        )
    else:
        model = load_model(source, dtype=dtype, device="cpu", device_map=None)
        streaming = None
    with Checkpoint.open(folder) as checkpoint:
        prepared = prepare(model, checkpoint, observe.ignore)
        header = make_header(
            *(prepared, plan, source, checkpoint), observe=observe, recipe_name="test"
        )
        stats = collect_stats(
            *(prepared, plan, checkpoint, header),
            observe=observe,
            batch_size=batch_size,
            progress=Silent(),
            streaming=streaming,
        )
    path = folder.parent / ("streamed" if streamed else "whole")
    save_stats(stats, path)
    return path.read_bytes()


def both(folder: Path, plan: DataPlan | None, **options: object) -> tuple[bytes, bytes]:
    """Give the stats files of the whole and of the streamed model."""
    return (
        stats_bytes(folder, plan, streamed=False, **options),  # type: ignore[arg-type]
        stats_bytes(folder, plan, streamed=True, **options),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_architecture_gives_the_same_file(name: str, tmp_path: Path) -> None:
    """Rows of several lengths, padded inside batches, and hidden states stored in a file."""
    MODELS[name](tmp_path / "model")
    rows = draw([7, 20, 13, 3, 20, 9, 20, 4, 11, 6], seed=9)
    whole, streamed = both(tmp_path / "model", make_plan(rows, packed=False), batch_size=3)
    assert whole == streamed


def test_transposed_inputs_of_few_tokens_are_rounded_alike(tmp_path: Path) -> None:
    """Jamba's mixers give their linears transposed inputs, which torch multiplies in two ways."""
    changes = {**families.FAMILIES["jamba"], "hidden_size": 64, "intermediate_size": 128}
    families.save("jamba", changes, tmp_path / "model")
    rows = draw([3, 2, 3, 2, 3, 3, 2, 2], seed=9)
    whole, streamed = both(tmp_path / "model", make_plan(rows, packed=False), batch_size=3)
    assert whole == streamed
