"""Run `fp8calib quantize --rounding gptq`, or print its plan."""

from __future__ import annotations

import os

from fp8calib.cli.calibrate.processes import choose_rank_device
from fp8calib.cli.calibrate.report import describe_calibration_plan
from fp8calib.cli.console import Bar, prints_json, say, warn
from fp8calib.cli.plan_table import show_plan
from fp8calib.cli.setup import quiet_libraries
from fp8calib.fp8.schemes import GPTQ
from fp8calib.jobs.models import Placement
from fp8calib.jobs.quantization.gptq import GptqJob, GptqTask, open_gptq, run_gptq
from fp8calib.jobs.quantization.report import QuantizationOutcome, list_layer_schemes
from fp8calib.jobs.recipe_options import make_data_options
from fp8calib.jobs.resumable.memory import choose_calibration_mode
from fp8calib.jobs.resumable.rounding import count_code_bytes
from fp8calib.machine.launch import find_process_rank
from fp8calib.quantization.plan import PlanSettings
from fp8calib.requests.quantize import QuantizeRequest
from fp8calib.run.distributed.group import open_process_group
from fp8calib.stats.calibration_stats import load_stats


def round_by_gptq(settings: QuantizeRequest, asked: PlanSettings) -> QuantizationOutcome | None:
    """Quantize a checkpoint with weights rounded by GPTQ; None where nothing is to be printed."""
    quiet_libraries()
    rank = find_process_rank(os.environ)
    task = GptqTask(
        model=settings.model,
        out=settings.out,
        asked=asked,
        stats=None if settings.stats is None else load_stats(settings.stats),
        inputs=[] if settings.stats is None else [settings.stats],
        data=make_data_options(
            sources=settings.data,
            text_column=settings.text_column,
            samples=settings.samples,
            seq_len=settings.seq_len,
            batch_size=settings.batch_size,
            pack=not settings.no_pack,
        ),
        placement=Placement(
            device=choose_rank_device(settings.device, rank),
            dtype=settings.dtype,
            memory=settings.memory,
        ),
        revision=settings.revision,
        trust_remote_code=settings.trust_remote_code,
        allow_unservable=settings.allow_unservable,
        resume=settings.resume,
        force=settings.force,
        expects_duration=settings.dry_run,
        say=say,
        warn=warn,
    )
    with open_process_group(rank) as group, open_gptq(task) as opened:
        if settings.dry_run:
            _show_plan(opened, settings)
            return None
        with Bar() as bar:
            return run_gptq(opened, bar, group)


def _show_plan(opened: GptqJob, settings: QuantizeRequest) -> None:
    job, expected = opened.job, opened.expected
    described = describe_calibration_plan(job, choose_calibration_mode(job))["plan"]
    plan = {
        **described,
        "out": str(settings.out),
        "writes": sorted(expected.names),
        "scheme": expected.settings.schemes.default.name,
        **({"layer_schemes": mixed} if (mixed := list_layer_schemes(expected)) else {}),
        "rounding": GPTQ,
        "linears": len(expected.selection.quantized),
        "output_size_bytes": expected.size_bytes,
        "work_disk_bytes": count_code_bytes(expected.selection.quantized),
    }
    title = "plan (nothing was run or written)"
    show_plan({"plan": plan}, title, as_json=prints_json(), text=job.plan)
