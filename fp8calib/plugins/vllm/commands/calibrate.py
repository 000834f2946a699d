"""Calibrate with the text run by vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from functools import partial
from typing import TYPE_CHECKING, Any

import yaml

from fp8calib.commands import calibrate as core
from fp8calib.commands.calibrate import CalibrateRequest, CalibrateResult
from fp8calib.commands.command_line import slow_imports
from fp8calib.commands.request import Reporter, as_function, option, request_class
from fp8calib.commands.result import RunPlan
from fp8calib.errors import UsageError
from fp8calib.formats.registry import find_dialect
from fp8calib.machine import ALONE, ProcessRank

if TYPE_CHECKING:
    from fp8calib.calibration.job import ObserveText, RunModel
    from fp8calib.commands.recipe import Recipe

describe = core.describe


def parse_engine_options(texts: Sequence[str] | None) -> dict[str, Any] | None:
    """Read KEY=VALUE; a value is read as YAML, so that 0.8, true and {a: 1} are what they say."""
    if not texts:
        return None
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UsageError(f"--engine-option {text}: not KEY=VALUE")
        try:
            found[key.replace("-", "_")] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UsageError(f"--engine-option {text}: {value} is not a value") from error
    return found


@request_class
class VllmCalibrateRequest(CalibrateRequest):
    """Run the text of a calibration inside vLLM, which is installed here.

    Example: fp8calib vllm calibrate MODEL --data calib.jsonl --tensor-parallel-size 8
    """

    _: KW_ONLY
    tensor_parallel_size: int = option(
        "--tensor-parallel-size N", "Tensor-parallel ranks of vLLM.", least=1, default=1
    )
    pipeline_parallel_size: int = option(
        "--pipeline-parallel-size N", "Pipeline stages of vLLM.", least=1, default=1
    )
    engine_option: Mapping[str, Any] | None = option(
        "--engine-option KEY=VALUE",
        "Another argument of vLLM; repeat for more.",
        reads=list[str],
        collect=parse_engine_options,
        default=None,
    )


def run(
    request: VllmCalibrateRequest, reporter: Reporter, process_rank: ProcessRank = ALONE
) -> CalibrateResult | RunPlan | None:
    """Calibrate a model that vLLM loads and runs.

    Raises:
        UsageError: an option is invalid, or vLLM is not installed.
        CalibrationError: vLLM cannot load or run the model, or gave NaN or infinity.
        Fp8CalibError: as `fp8calib.calibrate`.
    """
    with slow_imports():
        from fp8calib.commands import calibrate_run
        from fp8calib.plugins.vllm.engine import check_options
    check_engine(request, process_rank)
    check_options(request.engine_option or {})
    return calibrate_run.run(request, reporter, make_engine=partial(_make_engine, request))


def check_engine(request: VllmCalibrateRequest, process_rank: ProcessRank) -> None:
    """Refuse options that vLLM does not follow."""
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


def _make_engine(
    request: VllmCalibrateRequest, model: RunModel, recipe: Recipe
) -> tuple[str, ObserveText]:
    from fp8calib.plugins.vllm.engine import EngineSettings

    asked = recipe.quantize
    schemes = () if asked is None else asked.make_settings().schemes
    needs = [f"format {each}" for each in recipe.formats if find_dialect(each).has_linears]
    needs += (f"scheme {each.name}" for each in schemes if each.has_static_inputs)
    engine = EngineSettings(
        dtype=model.dtype,
        trust_remote_code=request.trust_remote_code,
        tensor_parallel_size=request.tensor_parallel_size,
        pipeline_parallel_size=request.pipeline_parallel_size,
        options=request.engine_option or {},
        needs_inputs=next(iter(needs), ""),
    )
    return engine.describe(), engine.observe


calibrate = as_function("calibrate", VllmCalibrateRequest, run)
