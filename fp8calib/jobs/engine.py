"""An engine that runs the text of a calibration in place of transformers."""

from __future__ import annotations

from fp8calib.dialects.registry import find_dialect
from fp8calib.errors import UsageError
from fp8calib.inside.vllm_calibration import EngineSettings, check_options
from fp8calib.jobs.resumable.job import ResumableJob
from fp8calib.machine.process_rank import ProcessRank
from fp8calib.requests.calibrate import CalibrateRequest


def check_engine(request: CalibrateRequest, process_rank: ProcessRank) -> None:
    """Refuse options of an engine without one, and with one those that it does not follow.

    Raises:
        UsageError: naming the option.
    """
    of_engine = {
        "--tensor-parallel-size": request.tensor_parallel_size != 1,
        "--pipeline-parallel-size": request.pipeline_parallel_size != 1,
        "--engine-option": bool(request.engine_option),
    }
    others = {
        "--device": request.device != "auto",
        "--device-map": request.device_map is not None,
        "--memory": request.memory is not None,
    }
    if request.engine is None:
        if given := next((name for name, is_given in of_engine.items() if is_given), None):
            raise UsageError(f"{given}: is for an engine", hint="add --engine vllm")
        return
    if given := next((name for name, is_given in others.items() if is_given), None):
        raise UsageError(
            f"{given}: {request.engine} places the model itself", hint="use --engine-option"
        )
    if not isinstance(request.model, str) and not hasattr(request.model, "__fspath__"):
        raise UsageError("--engine: the model is in memory already", hint="pass its checkpoint")
    if process_rank.size > 1:
        raise UsageError(
            f"--engine {request.engine}: starts its own processes; torchrun starts "
            f"{process_rank.size} more",
            hint="use --tensor-parallel-size, or --shard I/N in each of them",
        )
    if request.towers:
        raise UsageError(
            f"--towers --engine {request.engine}: towers are observed by transformers alone",
            hint="leave one of them out",
        )
    check_options(request.engine_option or {})


def make_engine_settings(request: CalibrateRequest, job: ResumableJob) -> EngineSettings:
    """Make the settings of the engine of a request, for a job.

    Raises:
        UsageError: the job also rounds weights.
    """
    if job.rounding is not None:
        raise UsageError(
            f"--engine: recipe {job.recipe.name} rounds weights layer by layer, which "
            "transformers does",
            hint="leave out --engine",
        )
    return EngineSettings(
        dtype=job.dtype,
        trust_remote_code=request.trust_remote_code,
        tensor_parallel_size=request.tensor_parallel_size,
        pipeline_parallel_size=request.pipeline_parallel_size,
        options=request.engine_option or {},
        needs_inputs=_find_what_needs_inputs(job),
    )


def _find_what_needs_inputs(job: ResumableJob) -> str:
    for name in job.recipe.formats:
        if find_dialect(name).has_linears:
            return f"format {name}"
    schemes = () if job.quantization is None else job.quantization.schemes.all
    return next((f"scheme {each.name}" for each in schemes if each.has_static_inputs), "")
