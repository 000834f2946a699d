"""Runs that are ended at any point: the next one resumes, and the final file is the same."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fp8calib.calibration import journal as journal_module
from fp8calib.calibration.stats_header import Observe
from fp8calib.data.sequences import Share
from fp8calib.errors import ExportError, ModelError, UsageError
from tests import zoo
from tests.doors import LENGTHS, OBSERVE, Silent, Subject, WorkShare, as_bytes, opened, rows_of


@pytest.fixture(autouse=True)
def keep_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "INTERVAL_S", 0.0)
    monkeypatch.setattr(journal_module, "LAYER_INTERVAL_PER_COST", 0.0)


class Stopping(Silent):
    """A progress bar that calls a function, which ends the run, at the n-th step."""

    def __init__(self, steps: int, end: Callable[[], None]) -> None:
        self.left = steps
        self.end = end

    def advance(self, steps: int) -> None:  # noqa: ARG002 -- tokens, here steps are counted
        """Count a step."""
        self.left -= 1
        if self.left == 0:
            self.end()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    raise KeyboardInterrupt


def keep_in(
    folder: Path,
    subject: Subject,
    *,
    shard: Share | None = None,
    batch_size: int = 2,
    observe: Observe = OBSERVE,
    lengths: list[int] = LENGTHS,
    seed: int = 9,
    told: list[str] | None = None,
    **changes: object,
) -> WorkShare:
    """Keep a run in a folder; warnings are appended to `told`, or are an error."""

    def warn(text: str) -> None:
        assert told is not None, text
        told.append(text)

    folder.mkdir(exist_ok=True)
    plan = rows_of(lengths, seed=seed)
    job = subject.job(plan, observe, shard=shard, asked_batch_size=batch_size)
    vars(job)["header"] = job.header.model_copy(update=changes)
    journal = job.open_journal(folder, warn=warn)
    journal.load()
    return WorkShare(shard=shard, journal=journal)


def end_and_go_on(
    subject: Subject, folder: Path, ends: list[Stopping], *, shard: Share | None = None
) -> bytes:
    """End several runs, each in its own process, then run to the end."""
    context = multiprocessing.get_context("fork")
    for progress in ends:

        def run(progress: Stopping = progress) -> None:
            share = keep_in(folder, subject, shard=shard)
            subject.calibrate(share, progress=progress)

        child = context.Process(target=run)
        child.start()
        child.join()
        assert child.exitcode != 0
    return as_bytes(subject.calibrate(keep_in(folder, subject, shard=shard)), folder.parent)


@pytest.mark.parametrize("family", ["llama", "mixtral", "gemma3n_text"])
def test_a_run_killed_repeatedly_ends_with_the_same_bytes(family: str, tmp_path: Path) -> None:
    zoo.save(family, tmp_path / "model")
    num_linears = 7 if family == "llama" else 0
    with opened(tmp_path / "model") as subject:
        whole = as_bytes(subject.calibrate(), tmp_path)
        # In the weights, in the first batch after them, then three batches on, then two.
        steps = [3, *(2 * num_linears + n for n in (2, 4, 3))]
        found = end_and_go_on(subject, tmp_path / "kept", [Stopping(n, kill) for n in steps])
    assert found == whole


@pytest.mark.parametrize("steps", [16, 18, 21])
def test_an_interrupted_run_resumes_after_its_last_checkpoint(steps: int, tmp_path: Path) -> None:
    zoo.save("llama", tmp_path / "model")
    with opened(tmp_path / "model") as subject:
        whole = as_bytes(subject.calibrate(), tmp_path)
        with pytest.raises(KeyboardInterrupt):
            subject.calibrate(
                keep_in(tmp_path / "kept", subject), progress=Stopping(steps, interrupt)
            )
        share = keep_in(tmp_path / "kept", subject)
        assert share.journal is not None
        bounds = [0, 2, 4, 6, 8, 10, 12, 13]  # of batches
        assert share.journal.sequences == ((0, bounds[steps - 15]),)
        assert as_bytes(subject.calibrate(share), tmp_path) == whole


@pytest.mark.parametrize("family", ["llama", "gemma3n_text"])
def test_a_streamed_run_resumes_after_its_last_layer(family: str, tmp_path: Path) -> None:
    """Killed in the second layer, and, where there are four, again in the fourth."""
    num_batches = 7
    model = zoo.save(family, tmp_path / "model")
    num_layers = model.config.num_hidden_layers
    ends = [Stopping(1 + num_batches + 3, kill), Stopping(1 + 2 * num_batches + 3, kill)]
    with opened(tmp_path / "model", streamed=True) as subject:
        whole = as_bytes(subject.calibrate(), tmp_path)
        kept = tmp_path / "kept"
        assert end_and_go_on(subject, kept, ends[: num_layers // 2]) == whole
        progress = Stopping(10**9, kill)
        assert (
            as_bytes(subject.calibrate(keep_in(kept, subject), progress=progress), tmp_path)
            == whole
        )
    # It knew all layers but the last: one step for those, and the batches of one layer.
    assert 10**9 - progress.left == 1 + num_batches


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "torn": lambda path: path.write_bytes(b"torn"),
    "lost": Path.unlink,
}


@pytest.mark.parametrize("lost", DAMAGES)
def test_a_damaged_hidden_state_is_not_resumed_from(lost: str, tmp_path: Path) -> None:
    zoo.save("llama", tmp_path / "model")
    kept = tmp_path / "kept"
    told: list[str] = []
    with opened(tmp_path / "model", streamed=True) as subject:
        whole = as_bytes(subject.calibrate(), tmp_path)
        subject.calibrate(keep_in(kept, subject))
        DAMAGES[lost](next(kept.iterdir()) / "state-000002.pt")
        share = keep_in(kept, subject, told=told)
        progress = Stopping(10**9, kill)
        assert as_bytes(subject.calibrate(share, progress=progress), tmp_path) == whole
    assert 10**9 - progress.left == 1 + 2 * 7  # from the first layer on
    assert all("starting again" in text for text in told)
    assert len(told) == 1


def test_a_shard_resumes_too(tmp_path: Path) -> None:
    zoo.save("llama", tmp_path / "model")
    shard = Share(index=2, count=2)
    with opened(tmp_path / "model") as subject:
        whole = as_bytes(subject.calibrate(WorkShare(shard=shard)), tmp_path)
        kept = tmp_path / "kept"
        assert end_and_go_on(subject, kept, [Stopping(9, kill)], shard=shard) == whole
        with pytest.raises(UsageError, match="shard 2 of 2, and shard 1 of 2"):
            keep_in(kept, subject, shard=Share(index=1, count=2))
        with pytest.raises(UsageError, match="--batch-size 2, and 3"):
            keep_in(kept, subject, shard=shard, batch_size=3)


def test_a_run_resumes_with_smaller_batches(tmp_path: Path) -> None:
    """Every sequence counts once, although the batches are cut differently."""
    zoo.save("llama", tmp_path / "model")
    with opened(tmp_path / "model") as subject:
        whole = subject.calibrate()
        with pytest.raises(KeyboardInterrupt):
            subject.calibrate(
                keep_in(tmp_path / "kept", subject), batch_size=4, progress=Stopping(15, interrupt)
            )
        found = subject.calibrate(keep_in(tmp_path / "kept", subject), batch_size=3)
    for site, stats in whole.sites.items():
        assert found.sites[site].count == stats.count
        assert torch.allclose(found.sites[site].amax, stats.amax, rtol=1e-5)


def test_the_checkpoint_of_another_run_is_refused_and_the_difference_named(
    tmp_path: Path,
) -> None:
    zoo.save("llama", tmp_path / "model")
    zoo.save("llama", tmp_path / "other", seed=1)
    kept = tmp_path / "kept"
    with opened(tmp_path / "model") as subject:
        subject.calibrate(keep_in(kept, subject))
        for words, changes in {
            "different data": {"seed": 5},
            "different recipe": {"observe": Observe(query=False)},
            "different version of torch": {"versions": {"torch": "1"}},
            "different dtype": {"compute_dtype": "float16"},
        }.items():
            with pytest.raises(UsageError, match=words):
                keep_in(kept, subject, **changes)  # type: ignore[arg-type]
    with (
        opened(tmp_path / "other") as subject,
        pytest.raises(UsageError, match="different weights"),
    ):
        keep_in(kept, subject)


def test_the_checkpoint_of_a_process_that_outlived_its_run_counts_once(tmp_path: Path) -> None:
    zoo.save("llama", tmp_path / "model")
    kept = tmp_path / "kept"
    with opened(tmp_path / "model") as subject:
        whole = as_bytes(subject.calibrate(), tmp_path)
        with pytest.raises(KeyboardInterrupt):
            subject.calibrate(keep_in(kept, subject), progress=Stopping(17, interrupt))
        early = (kept / "checkpoint-00000000.safetensors").read_bytes()
        with pytest.raises(KeyboardInterrupt):
            subject.calibrate(keep_in(kept, subject), progress=Stopping(18, interrupt))
        (kept / "checkpoint-00000000.safetensors").unlink()
        with pytest.raises(KeyboardInterrupt):
            subject.calibrate(keep_in(kept, subject), progress=Stopping(16, interrupt))
        assert (kept / "checkpoint-00000000.safetensors").exists()
        (kept / "checkpoint-00000001.safetensors").write_bytes(early)
        assert as_bytes(subject.calibrate(keep_in(kept, subject)), tmp_path) == whole


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    zoo.save("llama", tmp_path / "model")
    with opened(tmp_path / "model") as subject:
        subject.calibrate(keep_in(tmp_path / "kept", subject))
        path = next((tmp_path / "kept").glob("*-0*.safetensors"))
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(ModelError, match="checkpoint-0") as refused:
            keep_in(tmp_path / "kept", subject)
    assert "to start again, remove" in refused.value.hint


def test_a_full_disk_is_reported_and_the_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zoo.save("llama", tmp_path / "model")
    told: list[str] = []

    def no_space(*_: object) -> None:
        raise ExportError("no space left")

    with opened(tmp_path / "model") as subject:
        whole = as_bytes(subject.calibrate(), tmp_path)
        share = keep_in(tmp_path / "kept", subject, told=told)
        with monkeypatch.context() as patch:
            patch.setattr(journal_module, "save_stats", no_space)
            stats = subject.calibrate(share)
    assert as_bytes(stats, tmp_path) == whole
    assert "no checkpoint was written, the run continues: no space left" in told


def test_layers_of_other_batches_are_not_resumed_from(tmp_path: Path) -> None:
    zoo.save("llama", tmp_path / "model")
    kept = tmp_path / "kept"
    with opened(tmp_path / "model", streamed=True) as subject:
        whole = as_bytes(subject.calibrate(batch_size=3), tmp_path)
        subject.calibrate(keep_in(kept, subject))
        assert [path.name for path in kept.iterdir()] == ["checkpoint-layers-0-00000"]
        share = keep_in(kept, subject)
        assert as_bytes(subject.calibrate(share, batch_size=3), tmp_path) == whole
        with pytest.raises(UsageError, match="different data"):
            keep_in(kept, subject, seed=5)
