"""The plan of a run: its sizes against sums by hand, and its refusals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fp8calib.calibration.memory_plan import (
    GIVEN,
    Limits,
    MemoryPlan,
    Workload,
    batch_bytes,
    find_limits,
    loading_bytes,
    plan_halved,
    plan_memory,
)
from fp8calib.calibration.passes import BatchObserver
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.data.sequences import Batch, batches
from fp8calib.errors import UsageError
from fp8calib.model.load import build_skeleton, open_source
from fp8calib.model.prepared import prepare
from fp8calib.model.topology.find import find_geometry
from fp8calib.model.weight_source import WeightSource
from tests import zoo
from tests.doors import make_plan, run_calibration
from tests.kit.allocations import peak_allocated

# The zoo's llama: 32 wide, 48 inside, 4 heads of 8, 2 KV heads, 2 layers, 128 tokens, untied.
LAYER = 4 * (32 * 32 * 2 + 16 * 32 * 2 + 3 * 32 * 48 + 2 * 32)
EMBEDDING = 4 * 128 * 32
NORM = 4 * 32
TOKENS = torch.arange(40).view(2, 20)
BATCHES = (
    Batch(input_ids=TOKENS, lengths=(20, 20), first=0),
    Batch(input_ids=TOKENS + 10, lengths=(20, 20), first=2),
    Batch(input_ids=TOKENS[:1] + 20, lengths=(20,), first=4),
)
"""100 tokens, and 50 distinct ones."""
STATES = 100 * 32 * 4


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    zoo.save("llama", folder)
    return folder


@contextmanager
def workload(folder: Path, scratch: Path, **changes: Any) -> Iterator[Workload]:
    """Open a model for a run in fp32."""
    source = open_source(str(folder))
    with Checkpoint.open(folder) as checkpoint:
        yield Workload(
            prepared=prepare(build_skeleton(source, dtype=torch.float32), checkpoint),
            checkpoint=checkpoint,
            dtype=torch.float32,
            **{"device": "cpu", "batches": BATCHES, "scratch": scratch, **changes},
        )


@pytest.fixture(name="work")
def _work(folder: Path, tmp_path: Path) -> Iterator[Workload]:
    with workload(folder, tmp_path, extra={"statistics": 11}) as found:
        yield found


def limits(host: int, *, device: int | None = None, is_given: bool = True) -> Limits:
    return Limits(
        host_bytes=host,
        host_why=GIVEN if is_given else "available",
        process_bytes=1000,
        device_bytes=device,
    )


def stream(work: Workload, found: Limits) -> MemoryPlan:
    device = "cpu" if found.device_bytes is None else "cuda:0"
    return plan_memory(replace(work, device=device, always_streams="asked for by a test"), found)


def test_a_whole_model_counts_every_weight_once(work: Workload) -> None:
    plan = plan_memory(work, limits(2**30))
    buffers = 4 * 4 * 2  # the rotary frequencies of half a head, twice
    assert plan.peak["weights"] == 2 * LAYER + 2 * EMBEDDING + NORM + buffers
    assert plan.peak["statistics"] == 11
    assert plan.peak["process"] == 1000 + 96 * 2**20
    assert plan.read_bytes == 2 * LAYER + 2 * EMBEDDING + NORM
    assert plan.streaming is None
    assert plan.why.startswith("the model is held whole: it needs ")


def test_a_model_larger_than_the_limit_is_not_held_whole(work: Workload) -> None:
    large = replace(work, extra={"statistics": 2**30})
    needed = sum(plan_memory(large, limits(2**34)).peak.values())
    assert plan_memory(large, limits(needed)).streaming is None
    with pytest.raises(UsageError, match="as the caller says"):
        plan_memory(large, limits(needed - 1), cannot_stream=UsageError("as the caller says"))
    streamed = plan_memory(large, limits(needed - EMBEDDING))
    assert streamed.streaming is not None
    assert streamed.why.startswith("streaming layer by layer: the model needs ")


def test_on_a_gpu_the_memory_of_the_gpu_decides(work: Workload) -> None:
    plan = plan_memory(work, limits(2**30, device=2**30))
    needed = sum(plan.device_peak.values())
    assert needed > 2 * LAYER + 2 * EMBEDDING
    assert plan.streaming is None
    assert plan_memory(work, limits(2**30, device=needed - 1)).streaming is not None
    assert "weights" not in plan.peak


def test_a_model_is_not_streamed_for_the_sake_of_a_large_batch(work: Workload) -> None:
    ids = torch.arange(8 * 20).view(8, 20) % 60
    large = replace(work, batches=[Batch(input_ids=ids, lengths=(20,) * 8, first=0)])
    of_two = sum(plan_memory(work, limits(2**30)).peak.values())  # those of BATCHES
    with pytest.raises(UsageError, match="even layer by layer"):
        plan_memory(large, limits(of_two))
    planned = plan_halved(large, limits(of_two), 8)
    assert planned.streaming is None
    assert sum(planned.peak.values()) == of_two
    assert plan_halved(large, limits(2**30), 8) == plan_memory(large, limits(2**30))
    streamed = replace(large, always_streams="asked for by a test")
    assert plan_halved(streamed, limits(2**30), 8) == plan_memory(streamed, limits(2**30))
    with pytest.raises(UsageError, match="even layer by layer"):
        plan_halved(large, limits(100), 8)


def test_a_streamed_model_needs_two_layers(work: Workload) -> None:
    plan = stream(work, limits(2**30))
    assert plan.streaming is not None
    assert plan.as_json()["layers"] == 2
    assert plan.read_bytes == 2 * LAYER + NORM + 50 * 32 * 4
    assert plan.peak["layers"] == 2 * LAYER
    assert plan.peak["embedding"] == 50 * 32 * 4
    assert plan.peak["around the layers"] == NORM
    assert plan.peak["hidden states"] == STATES
    assert plan.scratch_bytes == 0


@pytest.mark.parametrize(
    ("family", "elements"),
    [
        # Four residual streams, and K and V of the last layers of either kind, which others read.
        ("gemma3n_text", 4 * 32 + 2 * 2 * 2 * 16),
        # Its layers return the scores of their heads, which wait with the output.
        ("bloom", 32 + 4 * 20),
    ],
)
def test_what_waits_between_layers(family: str, elements: int, tmp_path: Path) -> None:
    zoo.save(family, tmp_path / "model")
    with workload(tmp_path / "model", tmp_path) as work:
        assert stream(work, limits(2**30)).peak["hidden states"] == 100 * elements * 4


def test_a_mask_counts_where_transformers_builds_one(work: Workload) -> None:
    # A token: attention 2 * 32 wide in 4 copies and 2 in fp32, and the hidden state in 6.
    plain = 40 * (64 * (4 * 4 + 2 * 4) + 32 * 6 * 4)
    assert stream(work, limits(2**30)).peak["micro-batch"] == plain
    padded = replace(work, batches=(replace(BATCHES[0], lengths=(20, 19)), *BATCHES[1:]))
    found = stream(padded, limits(2**30)).peak["micro-batch"]
    assert found == plain + 2 * 20 * 20 * (1 + 4)
    work.prepared.model.config.attention_chunk_size = 16
    found = stream(work, limits(2**30)).peak["micro-batch"]
    assert found == plain + 2 * 20 * 20 * (1 + 4)


def test_hidden_states_fill_the_remaining_memory_and_the_rest_is_on_disk(work: Workload) -> None:
    room = stream(work, limits(2**30))
    bare = sum(room.peak.values()) - STATES
    tight = stream(work, limits(bare + 4000))
    assert tight.streaming is not None
    assert tight.streaming.hidden_ram_bytes == 4000
    assert tight.scratch_bytes == STATES - 4000
    assert sum(tight.peak.values()) == bare + 4000


def test_a_limit_that_is_too_small_names_the_smallest_that_works(work: Workload) -> None:
    with pytest.raises(UsageError, match="even layer by layer") as caught:
        stream(work, limits(50 * 2**20))
    named = caught.value.hint.split("use --memory ")[1].split(" ")[0]
    found = limits(int(float(named) * 2**30))
    assert stream(work, found).streaming is not None
    with pytest.raises(UsageError):
        stream(work, limits(found.host_bytes - 2**26))


def test_a_gpu_holds_one_layer_and_the_host_the_tensors_read_ahead(work: Workload) -> None:
    plan = stream(work, limits(2**30, device=2**30))
    assert plan.device_peak["layers"] == LAYER
    assert plan.peak.keys() == {"process", "layers", "hidden states"}
    assert plan.peak["layers"] == LAYER
    assert "on the GPU it needs" in "\n".join(plan.describe())
    needed = sum(plan.device_peak.values())
    assert stream(work, limits(2**30, device=needed)).streaming is not None
    with pytest.raises(UsageError, match="on the GPU"):
        stream(work, limits(2**30, device=needed - 1))
    with pytest.raises(UsageError, match="on the GPU"):
        stream(work, limits(2**30, device=LAYER))


def test_a_full_disk_is_refused_before_the_run(
    work: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = sum(stream(work, limits(2**30)).peak.values()) - STATES
    usage = type("Usage", (), {"free": STATES - 1})()
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(UsageError, match="hidden states have to be stored"):
        stream(work, limits(bare))


def test_the_smaller_of_the_given_and_the_available_memory_counts() -> None:
    machine, small, large = (find_limits("cpu", given) for given in (None, 0.5, 2.0**30))
    assert small.host_bytes == 2**29
    assert small.host_why == GIVEN
    assert large.host_why == "available"
    assert abs(large.host_bytes - machine.host_bytes) < 2**30


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        # One matrix at a time: gate, up or down.
        ("llama", 4 * 32 * 48),
        # Two layers of four experts, each with three matrices that are joined to two parameters.
        ("mixtral", 4 * 32 * 48 + 2 * 4 * 3 * 4 * 32 * 48),
        # Its experts are stored as they are used.
        ("gpt_oss", 4 * 32 * 64),
    ],
)
def test_joined_experts_exist_twice_while_they_are_loaded(
    family: str, expected: int, tmp_path: Path
) -> None:
    zoo.save(family, tmp_path)
    source = open_source(str(tmp_path))
    model = build_skeleton(source)
    with Checkpoint.open(tmp_path) as checkpoint:
        weights = WeightSource(model, checkpoint)
        geometry, _ = find_geometry(model, weights.single_tensors, checkpoint_dtype="float32")
        assert loading_bytes(geometry, weights, 4) == expected


@contextmanager
def measured_batches() -> Iterator[list[int]]:
    """Gather the most that torch's allocator took for each batch in each layer."""
    peaks: list[int] = []
    observed = BatchObserver.observed

    @contextmanager
    def measured(observer: BatchObserver, batch: Batch) -> Iterator[Any]:
        with peak_allocated(peaks), observed(observer, batch) as cache:
            yield cache

    with mock.patch.object(BatchObserver, "observed", measured):
        yield peaks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "family",
    [
        *("llama", "mistral", "mixtral", "qwen2_moe", "gpt_oss", "bloom", "gemma3n_text"),
        *("bamba", "jamba", "kimi_linear", "qwen3_next"),
    ],
)
def test_a_micro_batch_takes_no_more_than_planned(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    zoo.save(family, tmp_path / "model")
    text = make_plan(zoo.draw([768]))
    with measured_batches() as peaks:
        run_calibration(tmp_path / "model", text, dtype=dtype, streamed=True)
    assert peaks
    with workload(tmp_path / "model", tmp_path, batches=list(batches(text, 1))) as work:
        planned = batch_bytes(replace(work, dtype=dtype))
    # The first batch also makes the statistics, which the plan's reserve covers.
    assert max(peaks) <= planned + 2**17
    assert max(peaks) > planned // 5
