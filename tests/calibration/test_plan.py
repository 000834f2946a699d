"""The plan of a run: its sizes against sums by hand, and its refusals."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fp8calib.calibration import memory_plan
from fp8calib.calibration.memory_plan import (
    GIVEN,
    MemoryPlan,
    Workload,
    find_limits,
    peak_of_pairs,
    plan_halved,
    plan_memory,
)
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.data.sequences import Batch
from fp8calib.errors import CalibrationError, ExportError, UsageError
from fp8calib.machine import GIB
from fp8calib.model.load import build_skeleton, open_source
from fp8calib.model.prepared import prepare
from tests import zoo
from tests.architectures import families
from tests.doors import Subject, as_bytes, make_plan, opened, run_calibration
from tests.kit.minutes import in_minutes
from tests.zoo import draw

# The zoo's llama: 32 wide, 48 inside, 4 heads of 8, 2 KV heads, 2 layers, 128 tokens, untied.
LAYER = 4 * (32 * 32 * 2 + 16 * 32 * 2 + 3 * 32 * 48 + 2 * 32)
EMBEDDING = 4 * 128 * 32
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
            **{"device": "cpu", "batches": BATCHES, "scratch": scratch, **changes},
        )


@pytest.fixture(name="work")
def _work(folder: Path, tmp_path: Path) -> Iterator[Workload]:
    with workload(folder, tmp_path, extra={"statistics": 11}) as found:
        yield found


def limit(
    work: Workload, host: int, *, device: int | None = None, is_given: bool = True
) -> Workload:
    return replace(
        work,
        host_bytes=host,
        host_why=GIVEN if is_given else "available",
        process_bytes=1000,
        device_bytes=device,
    )


def test_processes_of_one_machine_share_its_free_memory(work: Workload) -> None:
    """A tenth of 40 GiB is left to others; a process of unknown size counts half a GiB."""
    free = patch.multiple(memory_plan, available_bytes=lambda: 40 * GIB, anonymous_bytes=lambda: 0)
    of_four = replace(work, sharers=4)
    with free:
        assert find_limits(work, None).host_bytes == 36.5 * GIB
        assert find_limits(of_four, None).host_bytes == 9.5 * GIB
        given = find_limits(of_four, 3.0)
    assert (given.host_bytes, given.host_why) == (3 * GIB, GIVEN)


def stream(work: Workload, host: int, *, device: int | None = None) -> MemoryPlan:
    name = "cpu" if device is None else "cuda:0"
    work = replace(work, device=name, always_streams="asked for by a test")
    return plan_memory(limit(work, host, device=device))


def test_a_model_larger_than_the_limit_is_not_held_whole(work: Workload) -> None:
    large = replace(work, extra={"statistics": 2**30})
    needed = sum(plan_memory(limit(large, 2**34)).peak.values())
    assert not plan_memory(limit(large, needed)).is_streamed
    streamed = plan_memory(limit(large, needed - EMBEDDING))
    assert streamed.is_streamed
    assert streamed.why.startswith("streaming layer by layer: the model needs ")


def test_a_model_is_not_streamed_for_the_sake_of_a_large_batch(work: Workload) -> None:
    ids = torch.arange(8 * 20).view(8, 20) % 60
    large = replace(work, batches=[Batch(input_ids=ids, lengths=(20,) * 8, first=0)])
    of_two = sum(plan_memory(limit(work, 2**30)).peak.values())  # those of BATCHES
    with pytest.raises(UsageError, match="even layer by layer"):
        plan_memory(limit(large, of_two))
    planned = plan_halved(limit(large, of_two), 8)
    assert not planned.is_streamed
    assert sum(planned.peak.values()) == of_two
    assert plan_halved(limit(large, 2**30), 8) == plan_memory(limit(large, 2**30))
    streamed = replace(large, always_streams="asked for by a test")
    assert plan_halved(limit(streamed, 2**30), 8) == plan_memory(limit(streamed, 2**30))
    with pytest.raises(UsageError, match="even layer by layer"):
        plan_halved(limit(large, 100), 8)


def test_experts_that_are_joined_are_in_memory_twice_while_they_load(tmp_path: Path) -> None:
    """The zoo's mixtral: 2 layers of 4 experts, each of three matrices of 32 x 48."""
    zoo.save("mixtral", tmp_path / "m", num_local_experts=4, intermediate_size=48)
    with workload(tmp_path / "m", tmp_path, batches=()) as work:
        inside = memory_plan.whole_bytes(work)
    del inside["weights"]
    assert sum(inside.values()) == 4 * (2 * 4 * 3 + 1) * 32 * 48


def test_a_limit_that_is_too_small_names_the_smallest_that_works(work: Workload) -> None:
    with pytest.raises(UsageError, match="even layer by layer") as caught:
        stream(work, 50 * 2**20)
    named = caught.value.hint.split("use --memory ")[1].split(" ")[0]
    smallest = int(float(named) * 2**30)
    assert stream(work, smallest).is_streamed
    with pytest.raises(UsageError):
        stream(work, smallest - 2**26)


def test_a_gpu_holds_two_layers_and_the_hidden_states_where_they_fit(work: Workload) -> None:
    """Else the hidden states are on the host, and then one layer alone is on the GPU."""
    device, seen = 2**30, []
    for copies_ahead, on_gpu in ((True, STATES), (True, 0), (False, 0)):
        plan = stream(work, 2**30, device=device)
        assert plan.is_streamed
        assert (plan.copies_ahead, plan.hidden_gpu_bytes) == (
            copies_ahead,
            on_gpu,
        )
        assert plan.device_peak["layers"] == (2 if copies_ahead else 1) * LAYER
        assert plan.device_peak.get("hidden states", 0) == on_gpu
        assert plan.peak.keys() == {"process", "layers", "hidden states"}
        assert plan.peak["layers"] == LAYER
        assert plan.peak["hidden states"] == STATES - on_gpu
        assert plan.scratch_bytes == 0
        assert "on the GPU it needs" in "\n".join(plan.describe())
        seen.append(plan.as_json()["device_peak_bytes"])
        device = seen[-1] - 1
    needed = seen[-1]
    assert seen == [needed + LAYER + STATES, needed + LAYER, needed]
    with pytest.raises(UsageError, match="on the GPU"):
        stream(work, 2**30, device=needed - 1)
    with pytest.raises(UsageError, match="on the GPU"):
        stream(work, 2**30, device=LAYER)


def test_smaller_batches_are_planned_where_a_gpu_then_has_room_for_two_layers(
    work: Workload,
) -> None:
    ids = torch.arange(8 * 20).view(8, 20) % 60
    large = replace(
        work,
        batches=[Batch(input_ids=ids, lengths=(20,) * 8, first=0)],
        device="cuda:0",
        always_streams="asked for by a test",
    )
    whole = plan_halved(limit(large, 2**30, device=2**30), 8)
    assert whole == plan_memory(limit(large, 2**30, device=2**30))
    large = limit(large, 2**30, device=sum(whole.device_peak.values()) - 1)
    kept = plan_memory(large)
    smaller = plan_halved(large, 8)
    assert kept.hidden_gpu_bytes == 0 < smaller.hidden_gpu_bytes
    assert smaller.device_peak["micro-batch"] < kept.device_peak["micro-batch"]


def test_the_host_keeps_what_restores_changed_weights_beside_the_next_layer(
    work: Workload,
) -> None:
    """A cast layer takes its result too, until it is on the GPU."""
    changing = replace(work, changes_weights=True)
    assert stream(changing, 2**30, device=2**30).peak["layers"] == 2 * LAYER
    assert peak_of_pairs([5, 6], [7, 8]) == 5 + 8
    assert peak_of_pairs([0, 0], [9, 7]) == 9


def test_a_full_disk_is_refused_before_the_run(
    work: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = sum(stream(work, 2**30).peak.values()) - STATES
    usage = type("Usage", (), {"free": STATES - 1})()
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(ExportError, match="are needed and"):
        stream(work, bare)


OTHERS = sorted(families.FAMILIES.keys() - zoo.MIXED)


@pytest.mark.parametrize("family", [*zoo.KINDS, *zoo.MIXED, *in_minutes(*OTHERS)])
def test_every_architecture_gives_the_same_file(family: str, tmp_path: Path) -> None:
    """Batches are padded, hidden states wait in a file, and the ninth row is in the histograms."""
    zoo.save(family, tmp_path / "model")
    plan = make_plan(draw([7, 20, 13, 3, 20, 9, 20, 4, 11], seed=9), packed=False)
    whole, streamed = (
        run_calibration(
            tmp_path / "model", plan, batch_size=5, streamed=is_streamed, hidden_ram_bytes=0
        )[1]
        for is_streamed in (False, True)
    )
    assert as_bytes(whole, tmp_path) == as_bytes(streamed, tmp_path)


def limit_memory(subject: Subject, error: Exception, *, sequences: int, layer: int = -1) -> Any:
    """Let a layer fail in batches of more sequences, as when memory runs out."""
    last = subject.prepared.model.get_submodule(subject.prepared.geometry.layers[layer].module)

    def check(_module: object, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> None:
        if len(args[0] if args else kwargs["hidden_states"]) > sequences:
            raise error

    return last.mlp.down_proj.register_forward_pre_hook(check, with_kwargs=True)


@pytest.mark.parametrize(
    ("error", "sequences", "says"),
    [
        (MemoryError("std::bad_alloc"), 0, "out of memory at sample 0, with 1 sequences"),
        (RuntimeError("shapes differ"), 2, "shapes differ"),  # of the type of torch's own
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_what_a_smaller_batch_does_not_help_is_an_error(
    tmp_path: Path, error: Exception, sequences: int, says: str, streamed: bool
) -> None:
    zoo.save("llama", tmp_path / "model")
    with opened(tmp_path / "model", streamed=streamed) as subject:
        limit_memory(subject, error, sequences=sequences)
        with pytest.raises(CalibrationError, match=says):
            subject.calibrate(batch_size=4)
