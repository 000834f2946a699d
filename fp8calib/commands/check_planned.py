"""Plan a checkpoint, and ask what engines will do with it, before its weights are written."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.model_config import find_class
from fp8calib.checkpoint.output import explained
from fp8calib.engines.check import check_folder
from fp8calib.engines.engine import Engine
from fp8calib.engines.registry import DEFAULT_ENGINES
from fp8calib.engines.replay.folder import open_folder
from fp8calib.engines.replay.verdicts import EngineReport, Reports
from fp8calib.engines.weights.parameters import find_first_fault
from fp8calib.errors import ExportError, ModelError, UnusableConfigError, shorten
from fp8calib.model.drafters import find_drafter_class
from fp8calib.model.geometry import ModelGeometry
from fp8calib.model.geometry_from_config import read_geometry
from fp8calib.numerics.rules import PLAIN_RULES, ScaleRules
from fp8calib.numerics.schemes import name_mixed
from fp8calib.quantization.plan import NO_SCALES, QuantizePlan, make_plan, select_linears
from fp8calib.quantization.select import check_unquantized
from fp8calib.quantization.settings import PlanSettings
from fp8calib.quantization.write import write_outline

if TYPE_CHECKING:  # only named
    from fp8calib.calibration.calibration_stats import RunStats

_HEADLESS = re.compile("Classification|QuestionAnswering|Reward")
"""What the names of classes without an `lm_head` have."""
_CONFIG_HINT = "use the config.json that its weights were saved with"
_FORCE_HINT = "--allow-unservable writes the checkpoint as it is"
_NOT_CHECKED = "whether an engine can load the output is not checked: {}"


def plan_checkpoint(
    checkpoint: Checkpoint,
    settings: PlanSettings,
    stats: RunStats | None,
    rules: ScaleRules = PLAIN_RULES,
) -> QuantizePlan:
    """Plan a checkpoint with the scales of statistics."""
    check_unquantized(checkpoint)
    selection = select_linears(checkpoint, settings)
    scales = NO_SCALES
    if stats is not None:
        from fp8calib.quantization.calibrated_scales import (  # few have some
            check_stats_model,
            find_scales,
        )

        check_stats_model(stats, checkpoint)
        scales = find_scales(stats, checkpoint, settings, selection, rules)
    return make_plan(checkpoint, settings, selection, scales=scales)


def require_servable(plan: QuantizePlan, source: Path) -> tuple[str, ModelGeometry | None]:
    """Refuse a checkpoint that no engine of the default list can load.

    Of a model whose shape `check` does not know, a note says that this was not checked.

    Returns:
        The note, also where only one engine can load it, empty if there is nothing to note; and the
        shape of the model.
    """
    reports, unchecked, geometry = _replay_plan(plan, source, DEFAULT_ENGINES)
    if unchecked:
        return unchecked, geometry
    able = [engine for engine, report in reports.items() if not report.load_fault]
    names = ", ".join(reports)
    scheme = name_mixed(plan.settings.scheme.name, is_mixed=bool(plan.settings.by_pattern))
    what = f"{scheme} of this model in this format"
    if not able:
        listed = "; ".join(f"{engine}: {report.load_fault}" for engine, report in reports.items())
        raise ExportError(
            f"none of {names} can load {what}: {listed}",
            hint=f"use another --scheme or --format; {_FORCE_HINT}",
        )
    is_last = len(able) == 1 < len(reports)
    return (f"of {names}, only {able[0]} can load {what}" if is_last else ""), geometry


def replay_settings(
    folder: Path, asked: PlanSettings, stats: RunStats | None, engines: Sequence[Engine]
) -> tuple[QuantizePlan, Mapping[str, EngineReport], str]:
    """Plan the checkpoint of a folder, and report what each engine would do with it.

    Returns:
        The plan; the report of each engine; and why nothing was checked, else empty.
    """
    with Checkpoint.open(folder) as checkpoint:
        plan = plan_checkpoint(checkpoint, asked, stats)
        reports, unchecked, _ = _replay_plan(plan, folder, [engine.key for engine in engines])
        return plan, reports, unchecked


def _replay_plan(
    plan: QuantizePlan, source: Path, engines: Sequence[str]
) -> tuple[Mapping[str, EngineReport], str, ModelGeometry | None]:
    """Report what each engine would do with a checkpoint, or say why that is not known.

    What `check` reads is written to a temporary folder: configs, headers and scales. Scales of
    weights are 1.0, and other data are holes in the files.
    """
    with TemporaryDirectory(prefix="fp8calib-") as name:
        folder = Path(name)
        with explained(folder):
            write_outline(plan, folder)
        opened = open_folder(folder)
        try:
            geometry = read_geometry(opened.path, opened.config)
        except UnusableConfigError as error:
            message = error.message.replace(str(folder), str(source))
            raise ModelError(message, hint=f"{_CONFIG_HINT}; {_FORCE_HINT}") from error
        except ModelError as error:
            return {}, _NOT_CHECKED.format(error.message.replace(str(folder), str(source))), None
        if drafter := find_drafter_class(opened.config):
            why = _NOT_CHECKED.format(f"it is a drafter (class {shorten(drafter)})")
            return {}, why, geometry
        if headless := find_class(opened.config, _HEADLESS):
            why = f"it has no output layer of tokens (class {shorten(headless)})"
            return {}, _NOT_CHECKED.format(why), geometry
        tensors = {name: entry for held in opened.tensors.values() for name, entry in held.items()}
        reports: Reports = {}
        fault = find_first_fault(geometry, tensors, has_linears=False)
        if not fault:
            reports = check_folder(opened, geometry, engines, 1)
    if not all(report.load_fault for report in reports.values()):
        fault = find_first_fault(geometry, tensors, has_linears=True)
    if fault:
        hint = f"download the model again, or {_CONFIG_HINT}; {_FORCE_HINT}"
        raise ModelError(f"{source}: {fault}", hint=hint)
    return reports, "", geometry
