"""The model in each scheme, rounded by GPTQ: where the groups of a plan take their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fp8calib.fp8.schemes import GPTQ
from fp8calib.jobs.planning.opened import OpenedPlan
from fp8calib.jobs.quantization.gptq import open_gptq, run_gptq
from fp8calib.jobs.quantization.planned import QuantizeTask, resolve_recipe
from fp8calib.jobs.reporter import Reporter
from fp8calib.jobs.stats import drop_kv
from fp8calib.recipe import Quantize
from fp8calib.requests.quantize import QuantizeRequest
from fp8calib.stats.calibration_stats import CalibrationStats

ROUNDED_NAME = "rounded"
"""The folder of these checkpoints, inside that of the plan; a finished plan has none."""


def round_schemes(
    opened: OpenedPlan,
    ignored: Mapping[str, Sequence[str]],
    stats: CalibrationStats,
    folder: Path,
    reporter: Reporter,
) -> dict[str, Path]:
    """Write the model in each scheme, rounded on the text of the calibration.

    GPTQ rounds each linear by the inputs of the unquantized model, so that the weights of a group
    are those that it has in any plan.

    Args:
        opened: the model and the text.
        ignored: the linears that stay in 16 bits, by scheme.
        stats: of the model, for static scales of inputs.
        folder: gets a folder for each scheme.
        reporter: gets the progress.

    Raises:
        CalibrationError: a forward pass failed.
        ExportError: the disk cannot hold them.
    """
    asked = opened.request
    made = {}
    for number, (name, left) in enumerate(ignored.items(), start=1):
        reporter.say(f"{number} of {len(ignored)}: round {name} by GPTQ")
        request = QuantizeRequest(
            asked.model,
            name,
            folder / name,
            ignore=left or None,
            rounding=GPTQ,
            batch_size=asked.batch_size,
            device=asked.device,
            dtype=asked.dtype,
            memory=asked.memory,
            revision=asked.revision,
            trust_remote_code=asked.trust_remote_code,
            resume=asked.resume and folder.exists(),
            allow_unservable=True,
        )
        task = QuantizeTask(
            request=request,
            model=str(asked.model),
            asked=resolve_recipe(Quantize(scheme=name, ignore=tuple(left), rounding=GPTQ)),
            stats=drop_kv(stats),
            inputs=(),
            reporter=reporter,
        )
        with open_gptq(task, opened.calibration) as job:
            run_gptq(job)
        made[name] = folder / name
    return made
