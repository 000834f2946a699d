"""Replay the loading rules of engines on what a path holds, after refusing what is neither."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8calib.calibration.fingerprint import fingerprint_model
from fp8calib.calibration.origin import (
    REPORT_NAME,
    STATS_NAME,
    CalibrationOrigin,
    is_stats_file,
    spell_export,
)
from fp8calib.calibration.progress import Progress
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.hub import find_folder
from fp8calib.checkpoint.json_files import is_result
from fp8calib.checkpoint.locations import SCALES_SUFFIXES, find_lone_file, require_path
from fp8calib.checkpoint.model_config import CONFIG_NAME, list_inner_checkpoints
from fp8calib.checkpoint.weight_index import GGUF_HINT, lacks_weights
from fp8calib.commands.check import CheckRequest
from fp8calib.commands.options import Stats
from fp8calib.commands.request import PythonReporter
from fp8calib.engines.check import check_folder, doubt_configs
from fp8calib.engines.registry import DEFAULT_ENGINES, find_replayed
from fp8calib.engines.replay.folder import ScaleFolder, make_stand_in_geometry, open_folder
from fp8calib.engines.replay.verdicts import Reports, add_fingerprint
from fp8calib.engines.weights.stored import list_opened_files
from fp8calib.errors import ModelError, NotUnderstoodError, UsageError, shorten
from fp8calib.formats.fp8.weights import WEIGHT_FORMATS
from fp8calib.formats.metadata import read_file_origin
from fp8calib.model.geometry import ModelGeometry
from fp8calib.model.geometry_from_config import read_geometry

if TYPE_CHECKING:  # only named
    from fp8calib.calibration.calibration_stats import RunStats


def check_path(request: CheckRequest, progress: Progress | None = None) -> Reports:
    """Check a path that a user names: `replay_path`, with the fingerprint of what is loaded."""
    path = Path(request.path)
    require_path(path, hint="name a checkpoint folder or a JSON file")
    path = find_lone_file(path)
    _refuse_other(path)
    reports = replay_path(replace(request, path=path), progress)
    return {key: add_fingerprint(each, request.tp) for key, each in reports.items()}


def replay_path(request: CheckRequest, progress: Progress | None = None) -> Reports:
    """Report what each engine does with a checkpoint folder or a file of scales.

    `progress` shows how much of the weights was read.
    """
    path, model, stats = Path(request.path), request.model, request.stats
    named = [request.engine] if isinstance(request.engine, str) else request.engine
    names = (part.strip() for each in named or DEFAULT_ENGINES for part in each.split(","))
    engines = {find_replayed(name).key: name for name in names}  # each release once
    folder = open_folder(path) if path.is_dir() else None
    base = _open_model(path, folder, model)
    try:
        geometry = read_geometry(base.path, base.config)
    except NotUnderstoodError as error:
        if folder is None or model is not None or stats is not None:
            raise
        # nothing of it will be judged
        base = replace(base, unread=f"its layers are not understood: {error.message}")
        folder, geometry = base, make_stand_in_geometry(base)
    measured = None if stats is None else _read_stats(stats, base, geometry, folder or base)
    asked = (geometry, tuple(engines.values()), request.tp)
    more: dict[str, Any] = {"model": base, "stats": measured, "reads_weights": request.read_weights}
    if folder is not None:
        for file in list_opened_files(folder, prefers_single=True):  # in all engines
            if (fault := folder.faults.get(file)) is not None:
                raise ModelError(fault, hint="download or copy the file again")
        reports = check_folder(folder, *asked, requires_kv=request.require_kv, **more)
    else:
        from fp8calib.formats.read import require_kv_scales  # few checks read scales

        require_kv_scales(path)
        if (origin := read_file_origin(path)) is not None:
            _refuse_other_origin(str(path), origin, base)
        reports = check_folder(base, *asked, file=path, **more)
    if request.read_weights:
        from fp8calib.engines.weight_values import amend_for_values  # imports torch

        reports = amend_for_values(reports, folder or base, progress or PythonReporter(None))
        if measured is not None and folder is not None and not lacks_weights(path):
            from fp8calib.quantization.attachment import compare_weights  # imports torch

            with Checkpoint.open(path) as checkpoint:
                why, _ = compare_weights(measured.origin.unquantized, checkpoint)
            if why:
                other = f"weights: not those that were calibrated, or with other scales: {why}"
                reports = {key: each.add(suspicious=[other]) for key, each in reports.items()}
    reports = doubt_configs(reports, base, geometry)
    if request.allow_suspicious:
        reports = {key: each.allow_suspicious() for key, each in reports.items()}
    return reports


def _refuse_other(path: Path) -> None:
    """Refuse what no engine loads, and say what to name in its place."""
    if path.is_dir():
        fault, hint = "", ""
        if inner := list_inner_checkpoints(path):
            fault = "a folder with checkpoints in it"
            hint = f"name what an engine loads, such as {inner[0]}"
        elif (path / STATS_NAME).exists() and (path / REPORT_NAME).exists():
            fault = "the output folder of calibrate"
            hint = f"name what {spell_export(path / STATS_NAME)} writes"
        if fault and (inner or not (path / CONFIG_NAME).exists()):
            raise UsageError(f"{path}: {fault}, not a checkpoint", hint=hint)
    elif is_result(path):
        from fp8calib.formats.read import refuse_result

        raise refuse_result(path)
    elif is_stats_file(path) or path.suffix not in SCALES_SUFFIXES or not path.is_file():
        hint = "name a checkpoint folder, or a file of scales"
        if is_stats_file(path):
            hint = f"name what {spell_export(path)} writes"
        elif path.suffix == ".gguf":
            hint = GGUF_HINT
        raise ModelError(f"{path}: neither a checkpoint folder nor a file of scales", hint=hint)


def _open_model(path: Path, folder: ScaleFolder | None, model: str | Path | None) -> ScaleFolder:
    """Open the folder of the model that the scales are for."""
    if model is not None:
        place = find_folder(str(model), files=("*.json",))
        if not place.is_dir():
            raise UsageError(f"--model {model}: this is a file, not a model folder")
        return open_folder(place)
    if folder is None:
        hint = "add --model MODEL: the file does not name the layers that have attention"
        raise UsageError(f"{path}: --model is needed to check a file", hint=hint)
    return folder


def _read_stats(
    given: Stats, model: ScaleFolder, geometry: ModelGeometry, scales: ScaleFolder
) -> RunStats:
    """Read the statistics; refuse another model's, where the model or the scales show it."""
    from fp8calib.commands.stats import read_stats  # imports torch
    from fp8calib.formats.read import check_origin

    stats = read_stats(given)[0]
    name = str(given) if isinstance(given, str | Path) else "statistics"
    measured, here = (
        [attention.checkpoint_module for _, attention in each.attentions()]
        for each in (stats.geometry, geometry)
    )
    if measured != here:
        first, first_here = (shorten(each[0]) if each else "none" for each in (measured, here))
        raise ModelError(
            f"{name}: these are statistics of another model: {len(measured)} layers with attention "
            f"({first}), here {len(here)} ({first_here})",
            hint="pass the statistics of this model",
        )
    origin = CalibrationOrigin(model=stats.header.model_fingerprint)
    _refuse_other_origin(name, origin, model)
    for path in (scales.path / file for file in scales.tensors if scales.scales.get(file)):
        check_origin(str(path), read_file_origin(path), origin.model)
    return stats


def _refuse_other_origin(name: str, origin: CalibrationOrigin, model: ScaleFolder) -> None:
    """Refuse scales or statistics that record another model, as `verify` does.

    Of a folder without weights the config alone is compared. A quantized model is not compared:
    the record is of the unquantized one.
    """
    entries = (entry for held in model.tensors.values() for entry in held.values())
    is_fp8 = any(entry.dtype in WEIGHT_FORMATS for entry in entries)  # without a config too
    if model.config.get("quantization_config") is not None or model.modelopt or is_fp8:
        return
    from fp8calib.formats.read import check_origin

    try:
        opened = Checkpoint.open(model.path)
    except ModelError:
        half = len(origin.model) // 2
        bare = Checkpoint(model.path)
        known = fingerprint_model(model.config, bare)[:half]
        check_origin(name, origin, known + origin.model[half:])
        return
    with opened as checkpoint:
        check_origin(name, origin, fingerprint_model(model.config, checkpoint))
