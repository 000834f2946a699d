"""Calibrate with the text run by vLLM."""

from __future__ import annotations

from functools import partial

from fp8calib.commands import calibrate as core
from fp8calib.commands.calibrate import CalibrateResult
from fp8calib.commands.job import CalibrationJob
from fp8calib.commands.request import Reporter, as_function
from fp8calib.commands.result import RunPlan
from fp8calib.errors import UsageError
from fp8calib.formats.registry import find_dialect
from fp8calib.machine import ALONE, ProcessRank
from fp8calib.plugins.vllm.commands.calibrate.request import VllmCalibrateRequest
from fp8calib.plugins.vllm.engine import EngineSettings, check_options


def run(
    request: VllmCalibrateRequest, reporter: Reporter, process_rank: ProcessRank = ALONE
) -> CalibrateResult | RunPlan | None:
    """Calibrate a model that vLLM loads and runs.

    Raises:
        UsageError: an option is invalid, or vLLM is not installed.
        CalibrationError: vLLM cannot load or run the model, or gave NaN or infinity.
        Fp8CalibError: as `fp8calib.calibrate`.
    """
    check_engine(request, process_rank)
    return core.run(request, reporter, make_engine=partial(_make_settings, request))


def check_engine(request: VllmCalibrateRequest, process_rank: ProcessRank) -> None:
    """Refuse options that vLLM does not follow.

    Raises:
        UsageError: naming the option.
    """
    others = {
        "--device": request.device != "auto",
        "--device-map": request.device_map is not None,
        "--memory": request.memory is not None,
    }
    if given := next((name for name, is_given in others.items() if is_given), None):
        raise UsageError(f"{given}: vLLM places the model itself", hint="use --engine-option")
    if not isinstance(request.model, str) and not hasattr(request.model, "__fspath__"):
        raise UsageError("the model is in memory already", hint="pass its checkpoint")
    if process_rank.size > 1:
        raise UsageError(
            f"vLLM starts its own processes; torchrun starts {process_rank.size} more",
            hint="use --tensor-parallel-size, or --shard I/N in each of them",
        )
    check_options(request.engine_option or {})


def _make_settings(request: VllmCalibrateRequest, job: CalibrationJob) -> EngineSettings:
    """Make the settings of vLLM for a job."""
    return EngineSettings(
        dtype=job.model.dtype,
        trust_remote_code=request.trust_remote_code,
        tensor_parallel_size=request.tensor_parallel_size,
        pipeline_parallel_size=request.pipeline_parallel_size,
        options=request.engine_option or {},
        needs_inputs=_find_what_needs_inputs(job),
    )


def _find_what_needs_inputs(job: CalibrationJob) -> str:
    for name in job.recipe.formats:
        if find_dialect(name).has_linears:
            return f"format {name}"
    schemes = () if job.quantization is None else job.quantization.schemes
    return next((f"scheme {each.name}" for each in schemes if each.has_static_inputs), "")


calibrate = as_function("calibrate", VllmCalibrateRequest, run)
