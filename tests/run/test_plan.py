"""The plan of a run: its sizes against sums by hand, and its refusals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.data.sequences import batches
from fp8calib.errors import UsageError
from fp8calib.machine.units import format_gib
from fp8calib.model.load import build_skeleton, open_source
from fp8calib.model.prepared import prepare
from fp8calib.model.topology.find import find_geometry
from fp8calib.model.weight_source import WeightSource
from fp8calib.run.memory_plan.footprint import Workload, loading_bytes, peak_of_layers
from fp8calib.run.memory_plan.limits import Limits, find_limits
from fp8calib.run.memory_plan.plan import PlanInputs, plan_whole
from fp8calib.run.memory_plan.stream_plan import StreamPlanner
from fp8calib.run.streaming.probe import Probe
from fp8calib.run.streaming.weights import PartSize
from tests import zoo
from tests.doors import make_plan
from tests.zoo import draw

# The zoo's llama: 32 wide, 48 inside, 4 heads of 8, 2 KV heads, 2 layers, 128 tokens, untied.
LAYER = 4 * (32 * 32 * 2 + 16 * 32 * 2 + 3 * 32 * 48 + 2 * 32)
EMBEDDING = 4 * 128 * 32
NORM = 4 * 32
WORK = Workload(rows=2, columns=20, num_tokens=100, num_distinct=50)
PROBE = Probe(batch_bytes=7000, state_bytes=5120)


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    zoo.save("llama", folder)
    return folder


@pytest.fixture(name="subject")
def _subject(folder: Path) -> Iterator[PlanInputs]:
    source = open_source(str(folder))
    model = build_skeleton(source, dtype=torch.float32)
    with Checkpoint.open(folder) as checkpoint:
        yield PlanInputs(
            prepared=prepare(model, checkpoint),
            checkpoint=checkpoint,
            work=WORK,
            dtype=torch.float32,
            device="cpu",
            extra={"statistics": 11},
        )


def limits(host: int, *, device: int | None = None, is_given: bool = True) -> Limits:
    return Limits(
        host_bytes=host,
        host_why="given by --memory" if is_given else "available",
        is_given=is_given,
        process_bytes=1000,
        device_bytes=device,
    )


def planner(subject: PlanInputs, found: Limits, scratch: Path) -> StreamPlanner:
    device = "cpu" if found.device_bytes is None else "cuda:0"
    return StreamPlanner(replace(subject, device=device), found, scratch)


def test_a_whole_model_counts_every_weight_once(subject: PlanInputs, tmp_path: Path) -> None:
    plan = plan_whole(subject, limits(2**30), tmp_path)
    assert plan is not None
    buffers = 4 * 4 * 2  # the rotary frequencies of half a head, twice
    assert plan.peak["weights"] == 2 * LAYER + 2 * EMBEDDING + NORM + buffers
    assert plan.peak["statistics"] == 11
    assert plan.peak["process"] == 1000 + 96 * 2**20
    assert plan.read_bytes == 2 * LAYER + 2 * EMBEDDING + NORM
    assert not plan.streams


def test_a_model_larger_than_the_limit_is_not_held_whole(
    subject: PlanInputs, tmp_path: Path
) -> None:
    plan = plan_whole(subject, limits(2**30), tmp_path)
    assert plan is not None
    needed = sum(plan.peak.values())
    assert plan_whole(subject, limits(needed), tmp_path) is not None
    assert plan_whole(subject, limits(needed - 1), tmp_path) is None


def test_on_a_gpu_the_memory_of_the_gpu_decides(subject: PlanInputs, tmp_path: Path) -> None:
    plan = plan_whole(subject, limits(2**30, device=2**30), tmp_path)
    assert plan is not None
    assert plan.device_peak is not None
    needed = sum(plan.device_peak.values())
    assert needed > 2 * LAYER + 2 * EMBEDDING
    assert plan_whole(subject, limits(2**30, device=needed - 1), tmp_path) is None
    assert "weights" not in plan.peak


def test_a_streamed_model_needs_two_layers(subject: PlanInputs, tmp_path: Path) -> None:
    plan = planner(subject, limits(2**30), tmp_path).plan(PROBE)
    assert plan.streams
    assert plan.num_layers == 2
    assert plan.read_bytes == 2 * LAYER + NORM + 50 * 32 * 4
    assert plan.peak["layers"] == 2 * LAYER
    assert plan.peak["embedding"] == 50 * 32 * 4
    assert plan.peak["around the layers"] == NORM
    assert plan.scratch_bytes == 0
    # 5120 bytes wait of a micro-batch of 40 tokens; there are 100 tokens.
    assert plan.peak["hidden states"] == 5120 * 100 // 40


def test_an_embedding_waits_for_each_token_of_rows_with_media(
    subject: PlanInputs, tmp_path: Path
) -> None:
    seen = replace(subject, work=replace(WORK, num_media_tokens=30))
    for probe in (PROBE, None):
        plain, found = (
            planner(each, limits(2**30), tmp_path).plan(probe).peak["hidden states"]
            for each in (subject, seen)
        )
        assert found == plain + 30 * 32 * 4


def test_a_probe_that_measured_more_than_the_formula_counts(
    subject: PlanInputs, tmp_path: Path
) -> None:
    making = planner(subject, limits(2**30), tmp_path)
    formula = making.plan().peak["micro-batch"]
    small, large = (replace(PROBE, batch_bytes=size) for size in (formula - 1, formula + 1))
    assert making.plan(small).peak["micro-batch"] == formula
    assert making.plan(large).peak["micro-batch"] == formula + 1


def test_a_mask_counts_where_transformers_builds_one(subject: PlanInputs, tmp_path: Path) -> None:
    # A token: attention 2 * 32 wide in 4 copies and 2 in fp32, and the hidden state in 4.
    plain = 40 * (64 * (4 * 4 + 2 * 4) + 32 * 4 * 4)
    assert planner(subject, limits(2**30), tmp_path).plan().peak["micro-batch"] == plain
    padded = replace(subject, work=replace(WORK, is_padded=True))
    found = planner(padded, limits(2**30), tmp_path).plan().peak["micro-batch"]
    assert found == plain + 2 * 20 * 20 * (1 + 4)
    subject.prepared.model.config.attention_chunk_size = 16
    found = planner(subject, limits(2**30), tmp_path).plan().peak["micro-batch"]
    assert found == plain + 2 * 20 * 20 * (1 + 4)


def test_hidden_states_fill_the_remaining_memory_and_the_rest_is_on_disk(
    subject: PlanInputs, tmp_path: Path
) -> None:
    room = planner(subject, limits(2**30), tmp_path).plan(PROBE)
    bare = sum(room.peak.values()) - room.hidden_ram_bytes
    tight = planner(subject, limits(bare + 4000), tmp_path).plan(PROBE)
    assert tight.hidden_ram_bytes == 4000
    assert tight.scratch_bytes == 12800 - 4000
    assert sum(tight.peak.values()) == bare + 4000


def test_a_limit_that_is_too_small_names_the_smallest_that_works(
    subject: PlanInputs, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="even layer by layer") as caught:
        planner(subject, limits(50 * 2**20), tmp_path).plan()
    named = caught.value.hint.split("the smallest --memory that works is ")[1].split(";")[0]
    found = limits(int(float(named) * 2**30))
    assert planner(subject, found, tmp_path).plan().streams
    with pytest.raises(UsageError):
        planner(subject, limits(found.host_bytes - 2**26), tmp_path).plan()


def test_on_a_machine_that_is_too_small_no_larger_memory_is_suggested(
    subject: PlanInputs, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="are available") as caught:
        planner(subject, limits(50 * 2**20, is_given=False), tmp_path).plan()
    assert "--memory" not in caught.value.hint


def test_a_gpu_holds_one_layer_and_the_host_the_tensors_read_ahead(
    subject: PlanInputs, tmp_path: Path
) -> None:
    plan = planner(subject, limits(2**30, device=2**30), tmp_path).plan()
    assert plan.device_peak is not None
    assert plan.device_peak["layers"] == LAYER
    assert plan.peak.keys() == {"process", "layers", "hidden states"}
    assert plan.peak["layers"] == LAYER
    assert "plan: on the GPU" in "\n".join(plan.describe())
    needed = sum(plan.device_peak.values())
    assert planner(subject, limits(2**30, device=needed), tmp_path).plan().streams
    with pytest.raises(UsageError, match="on the GPU"):
        planner(subject, limits(2**30, device=needed - 1), tmp_path).plan()
    with pytest.raises(UsageError, match="on the GPU"):
        planner(subject, limits(2**30, device=LAYER), tmp_path).plan()


def test_a_full_disk_is_refused_before_the_run(
    subject: PlanInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    making = planner(subject, limits(2**30), tmp_path)
    room = making.plan(PROBE)
    bare = sum(room.peak.values()) - room.hidden_ram_bytes
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 12799})())
    with pytest.raises(UsageError, match="hidden states have to be stored"):
        planner(subject, limits(bare), tmp_path).plan(PROBE)


@pytest.mark.parametrize("memory", [0.0, -1.0, float("nan"), float("inf")])
def test_a_memory_limit_that_is_not_positive_is_refused(memory: float) -> None:
    with pytest.raises(UsageError, match="--memory"):
        find_limits("cpu", memory)


def test_the_smaller_of_the_given_and_the_available_memory_counts() -> None:
    machine, small, large = (find_limits("cpu", given) for given in (None, 0.5, 2.0**30))
    assert small.host_bytes == 2**29
    assert small.is_given
    assert not large.is_given
    assert abs(large.host_bytes - machine.host_bytes) < 2**30


def test_processes_of_one_machine_share_its_available_memory() -> None:
    alone, four = find_limits("cpu", None), find_limits("cpu", None, sharers=4)
    left = alone.host_bytes - alone.process_bytes
    assert abs(4 * (four.host_bytes - four.process_bytes) - left) < 2**30
    assert find_limits("cpu", 0.5, sharers=4).host_bytes == 2**29


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


def test_a_layer_overlaps_with_the_one_read_ahead() -> None:
    a = PartSize(stored=100, placed=200, step=10)
    b = PartSize(stored=300, placed=600, step=50)
    # a beside b being read: 200 + 300; b being made: 600 + 50; then alone: 600.
    assert peak_of_layers([a, b], keep=False) == 650
    # b, what was read of it, and the step: 300 + 600 + 50.
    assert peak_of_layers([a, b], keep=True) == 950
    # On a GPU: c as read, beside d as read.
    c, d = PartSize(stored=300, placed=0, step=10), PartSize(stored=100, placed=0, step=50)
    assert peak_of_layers([c, d], keep=True) == 400


def test_a_workload_is_measured_from_the_batches() -> None:
    rows = draw([7, 20, 13, 3, 20], seed=9)
    found = list(batches(make_plan(rows, packed=False), 2))
    work = Workload.of(found)
    assert (work.rows, work.columns) == max(
        (b.input_ids.shape for b in found), key=lambda s: s[0] * s[1]
    )
    assert work.num_distinct == len({0, *(token for row in rows for token in row.tolist())})
    assert work.num_tokens == sum(b.input_ids.shape[0] * b.input_ids.shape[1] for b in found)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(12, "12 bytes"), (3 * 2**20, "3 MiB"), (2**29, "0.50 GiB"), (140 * 2**30, "140.00 GiB")],
)
def test_sizes_are_formatted(size_bytes: int, text: str) -> None:
    assert format_gib(size_bytes) == text
