"""Runs that are interrupted or killed, and what the next one makes of what they left."""

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8calib.errors import UsageError
from fp8calib.quantization.plan import CalibratedScales
from fp8calib.quantization.write import find_finished
from tests.quantization.by_hand import LAYER, Run, Silent, make_tensors, run, save

SHARDS = 3


class Stopping(Silent):
    """A progress bar that ends the run when a shard and a bit are written."""

    def __init__(self, limit: int, signal_number: int | None) -> None:
        super().__init__()
        self.limit = limit
        self.signal_number = signal_number

    def advance(self, steps: int) -> None:
        """Count, and stop at the limit."""
        super().advance(steps)
        if self.steps > self.limit:
            if self.signal_number is None:
                raise KeyboardInterrupt
            os.kill(os.getpid(), self.signal_number)


def stop(source: Path, out: Path, signal_number: int | None = None) -> None:
    """Quantize until the second shard is begun."""
    first = run(source, out.with_name("planned"), "w8a16").plan.shards[0]
    run(source, out, "w8a16", progress=Stopping(first.data_bytes, signal_number))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = save(tmp_path / "source", make_tensors(), shards=SHARDS)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def check_same(first: Run, second: Run) -> None:
    names = sorted(path.name for path in first.out.iterdir())
    assert names == sorted(path.name for path in second.out.iterdir())
    for name in names:
        assert (first.out / name).read_bytes() == (second.out / name).read_bytes(), name


def interrupt(source: Path, out: Path) -> Path:
    """Interrupt a run and give the folder that it leaves."""
    with pytest.raises(KeyboardInterrupt):
        stop(source, out)
    assert not out.exists()
    return out.with_name(f"{out.name}.partial")


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_run_goes_on_where_it_stopped(tmp_path: Path, source: Path, is_killed: bool) -> None:
    whole = run(source, tmp_path / "whole", "w8a16")
    partial = tmp_path / "out.partial"
    if is_killed:
        context = multiprocessing.get_context("fork")
        child = context.Process(target=stop, args=(source, tmp_path / "out", signal.SIGKILL))
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        assert any(path.name.endswith(".unfinished") for path in partial.iterdir())
    else:
        interrupt(source, tmp_path / "out")
    first = whole.plan.shards[0].name
    kept = (partial / first).stat().st_ino
    resumed = run(source, tmp_path / "out", "w8a16", resume=True)
    assert resumed.written.resumed == (first,)
    assert (resumed.out / first).stat().st_ino == kept
    check_same(whole, resumed)
    assert not partial.exists()


def test_a_shard_without_its_end_is_written_again(tmp_path: Path, source: Path) -> None:
    partial = interrupt(source, tmp_path / "out")
    first = partial / "model-00001-of-00003.safetensors"
    first.write_bytes(first.read_bytes()[:-1])
    resumed = run(source, tmp_path / "out", "w8a16", resume=True)
    assert resumed.written.resumed == ()
    check_same(run(source, tmp_path / "whole", "w8a16"), resumed)


KV = {f"{LAYER}.self_attn.k_scale": torch.tensor(2.0)}


@pytest.mark.parametrize(
    "change",
    [
        {"ignore": ("*.o_proj",)},
        {"form": "modelopt", "scheme": "fp8-dynamic"},
        {"scales": CalibratedScales(inputs={}, kv=KV)},
        {},
    ],
    ids=["other patterns", "other form", "other scales", "other weights"],
)
def test_an_interrupted_run_of_something_else_is_not_resumed(
    tmp_path: Path, source: Path, change: dict[str, Any]
) -> None:
    partial = interrupt(source, tmp_path / "out")
    if not change:
        doubled = {name: tensor * 2 for name, tensor in make_tensors().items()}
        save(source, doubled, shards=SHARDS)
    with pytest.raises(UsageError, match="another model or other options"):
        run(source, tmp_path / "out", resume=True, **{"scheme": "w8a16", **change})
    assert partial.exists()


def test_a_finished_output_is_known(tmp_path: Path, source: Path) -> None:
    found = run(source, tmp_path / "out", "w8a16")
    assert find_finished(found.out, found.plan)
    assert not find_finished(tmp_path / "elsewhere", found.plan)
    other = run(source, tmp_path / "other", "fp8-block")
    assert not find_finished(found.out, other.plan)
    (found.out / "config.json").unlink()
    assert not find_finished(found.out, found.plan)
