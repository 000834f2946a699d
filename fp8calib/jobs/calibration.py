"""A calibration, decided before a weight is loaded, and run in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fp8calib.calibration import calibrate
from fp8calib.data.sequences import DataPlan
from fp8calib.data.shares import Share, select_batches
from fp8calib.errors import ModelError
from fp8calib.jobs.models import RunModel, open_run_model
from fp8calib.machine.progress import Progress
from fp8calib.model.dtype import DTYPES
from fp8calib.recipe import Recipe
from fp8calib.requests.plan import PlanRequest
from fp8calib.run.memory_plan import MemoryPlan, Workload, find_limits, plan_memory
from fp8calib.run.processes import LONE, ProcessGroup
from fp8calib.stats.calibration_stats import CalibrationStats
from fp8calib.stats.statistic import stats_bytes

IF_QUANTIZED = (
    "its activations have quantization errors already: calibrate the unquantized model it was made "
    "from"
)


def run_calibration(
    model: RunModel, recipe: Recipe, plan: DataPlan | None, progress: Progress
) -> CalibrationStats:
    """Run the text through an opened model in this process, without checkpoints of the run.

    Raises:
        UsageError: the model fits into memory in no way.
        CalibrationError: the forward pass failed, or gave NaN or infinity.
    """
    mode = choose_mode(model, recipe, plan, scratch=Path.cwd())
    return calibrate(
        model.load(mode, progress),
        plan,
        model.source,
        model.checkpoint,
        recipe=recipe,
        progress=progress,
        streaming=mode.streaming,
    )


@contextmanager
def open_unquantized(request: PlanRequest, recipe: Recipe) -> Iterator[RunModel]:
    """Open a model to calibrate and to quantize.

    Raises:
        ModelError: the model cannot be read or run, or is quantized.
    """
    with open_run_model(request, if_quantized=IF_QUANTIZED, recipe=recipe) as model:
        if model.checkpoint.form:
            raise ModelError(
                f"{request.model} is quantized already: {model.checkpoint.form}",
                hint="name the unquantized model that it was made from",
            )
        yield model


def choose_mode(
    model: RunModel,
    recipe: Recipe,
    plan: DataPlan | None,
    *,
    scratch: Path,
    shard: Share | None = None,
    group: ProcessGroup = LONE,
    extra_bytes: Mapping[str, int] | None = None,
    always_streams: str = "",
) -> MemoryPlan:
    """Choose between a model in memory whole and one that is streamed.

    Args:
        model: the model.
        recipe: what is observed.
        plan: the text; None for a recipe that runs none.
        scratch: the folder of hidden states that do not fit into memory.
        shard: the part of the text.
        group: the processes that divide it.
        extra_bytes: further memory, by what needs it.
        always_streams: why the model has to be streamed; empty where it need not.

    Raises:
        UsageError: it fits in neither way.
    """
    if model.is_placed:
        return MemoryPlan(prepared=model.prepared)
    observe = recipe.observe
    # those that an interrupted run has done are among them
    batches = [] if plan is None else select_batches(plan, recipe.data.batch_size, shard)
    sharers = group.process_rank.local_size
    statistics = stats_bytes(
        model.prepared.geometry, inputs=observe.inputs, weights=observe.weights
    )
    return plan_memory(
        Workload(
            source=model.source,
            prepared=model.prepared,
            checkpoint=model.checkpoint,
            dtype=DTYPES[model.dtype],
            device=model.device,
            batches=group.share_of(batches),
            scratch=scratch,
            sharers=sharers,
            extra={"statistics": statistics, **(extra_bytes or {})},
            least_read_bytes=model.checkpoint.total_size_bytes if observe.weights else 0,
            always_streams=always_streams,
        ),
        find_limits(model.device, model.memory, sharers=sharers),
    )
