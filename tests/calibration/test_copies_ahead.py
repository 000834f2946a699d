"""A GPU gets the next layer while one computes: same bytes, order of streams, memory, errors.

The simulated GPUs refuse a read that does not wait for its copy, and memory that is freed in use.
"""

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fp8calib.calibration import calibrate
from fp8calib.calibration.decoder import OutOfMemoryInForward, copy_ids
from fp8calib.calibration.layer_steps import HiddenStateStore
from fp8calib.calibration.streamed_weights import EmbeddingRows, HeldTensors, ModelPart, PartLoader
from fp8calib.errors import ModelError
from scripts.benchmarks.launches import WorkCounter
from tests import zoo
from tests.calibration.test_plan import limit_memory
from tests.calibration.test_resume import Stopping, interrupt, keep_every_batch, keep_in  # noqa: F401 -- a fixture
from tests.doors import LENGTHS, WorkShare, as_bytes, opened, rows_of
from tests.simulated_gpus import Event, gpu

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="simulated GPUs are compiled by g++"
)
AHEAD: Any = {"streamed": True, "device": "cuda:0", "copies_ahead": True}
ON_GPU: Any = {**AHEAD, "hidden_gpu_bytes": 1 << 20}
LAYERS = 4
TEXT = LENGTHS[:6]
NUM_BATCHES = 3


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ahead")
    zoo.save("llama", folder / "model", num_hidden_layers=LAYERS)
    return folder


@pytest.fixture(name="expected", scope="module")
def _expected(folder: Path) -> bytes:
    with gpu():
        return run(folder, ON_GPU)


def run(
    folder: Path,
    options: Any,
    share: WorkShare | None = None,
    *,
    lengths: list[int] = TEXT,
    batch_size: int = 2,
) -> bytes:
    plan = rows_of(lengths)
    with opened(folder / "model", **options) as subject:
        return as_bytes(subject.calibrate(share, plan=plan, batch_size=batch_size), folder)


@pytest.mark.parametrize(
    ("family", "dtype", "options"),
    [("mixtral", "float32", AHEAD), ("llama", "bfloat16", ON_GPU)],
)
def test_statistics_are_those_of_a_gpu_that_holds_one_layer(
    family: str, dtype: str, options: Any, tmp_path: Path
) -> None:
    """Of experts that are joined, and of weights that are cast."""
    model = zoo.build(family, num_hidden_layers=LAYERS).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "model")
    with gpu():
        expected = run(tmp_path, {"streamed": True, "device": "cuda:0"}, lengths=LENGTHS[:5])
        assert run(tmp_path, options, lengths=LENGTHS[:5]) == expected


def watch(seen: Callable[[ModelPart], object]) -> Any:
    """Call a function when a part is made, in the thread that makes it."""
    make = PartLoader.make

    def spy(
        self: PartLoader, part: ModelPart, held: HeldTensors, *, keep: bool
    ) -> Iterator[tuple[str, torch.Tensor]]:
        yield from make(self, part, held, keep=keep)
        seen(part)

    return mock.patch.object(PartLoader, "make", spy)


def test_a_layer_is_copied_while_the_one_before_computes(folder: Path) -> None:
    copied = [threading.Event() for _ in range(LAYERS)]
    waited = []

    def note(part: ModelPart) -> None:
        layers = {name.split(".")[2] for name in part.wanted if ".layers." in name}
        for index in layers:
            copied[int(index)].set()

    with gpu(), watch(note), opened(folder / "model", **ON_GPU) as subject:
        for index, layer in enumerate(subject.prepared.geometry.layers[:-1]):
            module = subject.prepared.model.get_submodule(layer.module).mlp
            following = copied[index + 1]
            module.register_forward_pre_hook(lambda *_, e=following: waited.append(e.wait(60)))
        with mock.patch.object(Event, "synchronize", autospec=True) as wait:
            subject.calibrate(plan=rows_of(LENGTHS[:2]))
    assert waited == [True] * (LAYERS - 1)
    # the third layer and the fourth wait until the first and the second are dropped
    assert wait.call_count == LAYERS - 2


def test_the_host_waits_for_no_layer_and_for_no_batch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "INTERVAL_S", 600.0)  # else a slow machine looks for NaN between
    waits = []
    with gpu():
        for lengths in (LENGTHS[:2], LENGTHS[:6]):
            with (
                opened(folder / "model", **ON_GPU) as subject,
                WorkCounter(torch.device("cuda")) as counter,
            ):
                stats = subject.calibrate(plan=rows_of(lengths), batch_size=1)
            waits.append(counter.work.waits)
    copied = sum(len(each.tensors) for each in stats.sites.values())
    # Before the layers the embedding, the last norm and two buffers of frequencies; behind them a
    # look for NaN, and one for each layer that may read another's output.
    assert waits == [4 + copied + 1 + LAYERS - 1] * 2


def test_hidden_states_beyond_the_limit_of_the_gpu_wait_on_the_host(
    folder: Path, expected: bytes
) -> None:
    with gpu():
        assert run(folder, {**AHEAD, "hidden_gpu_bytes": 5000}) == expected
        store = HiddenStateStore(ram_limit_bytes=900, folder=folder, gpu_limit_bytes=900)
        for number in range(3):
            store.put(number, torch.full((100,), float(number)).cuda())
            store.put(number, torch.full((100,), number + 10.0).cuda())
        assert (store.gpu_bytes, store.ram_bytes, store.file_bytes) == (800, 400, 0)
        found = [store.get(number, torch.device("cpu"))[0].item() for number in range(3)]
        assert found == [10.0, 11.0, 12.0]


@pytest.mark.parametrize("options", [{"streamed": True}, ON_GPU])
def test_a_layer_that_reads_an_earlier_one_is_refused(folder: Path, options: Any) -> None:
    """On a CPU at once; on a GPU behind the last layer, in place of an error about NaN."""
    first: list[torch.Tensor] = []
    with gpu(), opened(folder / "model", **options) as subject:
        layers: Any = subject.prepared.model.model.layers
        layers[0].register_forward_hook(lambda *seen: first.append(seen[-1]))
        layers[2].register_forward_pre_hook(lambda _, args: (args[0] + first[-1], *args[1:]))
        with pytest.raises(ModelError, match=r"\(layer 2\) reads more than the output"):
            subject.calibrate(plan=rows_of(TEXT))
    later = LAYERS - 2 if "device" in options else 0
    assert len(first) == (later + 1) * NUM_BATCHES + (0 if later else 1)  # not in its own run


def test_tokens_that_the_model_changes_are_looked_up_anew(folder: Path) -> None:
    """Its copy of a batch's tokens has other values then."""
    with gpu(), opened(folder / "model", **ON_GPU) as subject:
        embedding = subject.prepared.model.get_input_embeddings()
        rows = EmbeddingRows(
            embedding,
            lambda start, stop: torch.arange(start, stop).float()[:, None].expand(-1, 32),
            dtype=torch.float32,
            device="cuda:0",
        )
        ids = copy_ids(torch.tensor([[7, 9]]), torch.device("cuda:0"))
        assert embedding(rows.look_up(ids))[..., 0].tolist() == [[7.0, 9.0]]
        ids[0, 1] = 5
        assert embedding(rows.look_up(ids))[..., 0].tolist() == [[7.0, 5.0]]


def test_batches_are_halved_where_the_next_layer_or_a_batch_does_not_fit(folder: Path) -> None:
    failures = [torch.OutOfMemoryError("CUDA out of memory.")]

    def fail(part: ModelPart) -> None:
        if failures and any(".layers.2." in name for name in part.wanted):
            raise failures.pop()

    with gpu():
        expected = run(folder, ON_GPU, batch_size=1)
        share = WorkShare()
        with watch(fail):
            assert run(folder, ON_GPU, share) == expected
        with opened(folder / "model", **ON_GPU) as subject:
            limit_memory(subject, torch.OutOfMemoryError("CUDA"), sequences=1, layer=1)
            assert as_bytes(subject.calibrate(share, plan=rows_of(TEXT)), folder) == expected
    assert [each["batch_size"] for each in share.back_offs] == [1, 1]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ModelError("a shard is damaged"), "a shard is damaged"),
        (torch.OutOfMemoryError("CUDA"), "out of memory where layer 3 is copied to the GPU"),
    ],
)
def test_an_error_in_the_thread_reaches_the_caller(
    folder: Path, error: Exception, says: str
) -> None:
    def fail(part: ModelPart) -> None:
        if any(".layers.3." in name for name in part.wanted):
            raise error

    raised = ModelError if isinstance(error, ModelError) else OutOfMemoryInForward
    with gpu(), watch(fail), pytest.raises(raised, match=says):
        run(folder, ON_GPU)


@pytest.mark.usefixtures("keep_every_batch")
def test_an_interrupted_run_resumes_and_copies_only_what_it_runs(
    folder: Path, expected: bytes, tmp_path: Path
) -> None:
    made: list[str] = []
    plan = rows_of(TEXT)
    with gpu(), opened(folder / "model", **ON_GPU) as subject:
        share = keep_in(tmp_path / "kept", subject, lengths=TEXT)
        with pytest.raises(KeyboardInterrupt):
            subject.calibrate(
                share, plan=plan, progress=Stopping(1 + 2 * NUM_BATCHES + 2, interrupt)
            )
        with watch(lambda part: made.append(next(iter(part.wanted)))):
            share = keep_in(tmp_path / "kept", subject, lengths=TEXT)
            assert as_bytes(subject.calibrate(share, plan=plan), folder) == expected
    layers = [name.split(".")[2] for name in made if ".layers." in name]
    assert layers == ["2", "3"]
