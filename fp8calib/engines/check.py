"""Replay how engines load a checkpoint folder or a file of scales, and report what they use."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from safetensors.numpy import save_file

from fp8calib.calibration.calibration_stats import CalibrationStats
from fp8calib.checkpoint.hub import find_ranged_file
from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.checkpoint.weight_index import INDEX_NAME, SINGLE_FILE_NAME
from fp8calib.engines.engine import Engine
from fp8calib.engines.odd_scales import mark_odd_scales, measure_reaches, suspect_odd_scales
from fp8calib.engines.registry import find_replayed
from fp8calib.engines.replay.dtypes import find_cache_flag
from fp8calib.engines.replay.folder import ScaleFolder, open_folder
from fp8calib.engines.replay.verdicts import (
    EngineReport,
    LoadVerdict,
    Refusal,
    Reports,
    UnrunRefusal,
    report_alike,
    report_refusal,
    report_unknown,
)
from fp8calib.engines.scale_mistakes import Reach, Slot
from fp8calib.engines.status import Status
from fp8calib.engines.weight_estimates import estimate_reaches
from fp8calib.engines.weight_replay import amend_weights
from fp8calib.engines.weights.parameters import are_elsewhere
from fp8calib.engines.weights.stored import OpenedWeights
from fp8calib.errors import UsageError, shorten
from fp8calib.formats.kv.kv_scales import name_scales
from fp8calib.formats.kv.overlay import UNLISTED_NAME, list_unlisted, make_quantization_config
from fp8calib.model.shapes import KV_ROLES, ModelGeometry
from fp8calib.model.tensor_parallel import check_cuts, check_heads

_SHARED_FIX = "give the layer the scales of layer {}, as calibrate and export do"
_OVERLAY_FIX = "write a kv-overlay, which carries the scales in the checkpoint"
_NO_OVERLAY_FIX = (
    "serve it with another engine, or without KV scales: {} uses none of {}, in any form"
)
_NEWER_FIX = "serve it with a release of the engine that demands a newer transformers"


def check_folder(
    folder: ScaleFolder,
    geometry: ModelGeometry,
    engines: Sequence[str],
    tp: int,
    *,
    requires_kv: bool = False,
    model: ScaleFolder | None = None,
    stats: CalibrationStats | None = None,
    reads_weights: bool = False,
) -> Reports:
    """Report what each engine does with the KV scales and the FP8 weights of a checkpoint.

    Args:
        folder: the checkpoint.
        geometry: the shape of the model.
        engines: their keys.
        tp: the number of ranks.
        requires_kv: whether KV scales have to be there, even if the config asks for none.
        model: the unquantized model's folder, if known.
        stats: of the unquantized model; scales that are far from it are bad.
        reads_weights: estimate by the weights what K and V reach, where no statistics tell.

    Raises:
        UsageError: an engine is unknown, or no replay says what it does with a folder.
    """
    opened: dict[tuple[object, ...], OpenedWeights] = {}

    def open_weights(folder: ScaleFolder) -> OpenedWeights:
        # once for engines that open the same files in the same order
        key = (*folder.files, folder.has_index)
        if key not in opened:
            opened[key] = OpenedWeights(folder, geometry, stats)
        return opened[key]

    odd_scales = open_weights(folder).odd_scales
    judge = _make_judge(
        *(model or folder, geometry, stats), reads_weights=reads_weights, odd_scales=odd_scales
    )
    asks_for_kv = requires_kv or folder.asks_for_kv

    def ask(engine: Engine) -> EngineReport:
        if engine.replay_folder is None:
            raise UsageError(f"--engine {engine.key}: {engine.no_folder}")
        if folder.unread:
            unread = report_unknown(
                geometry, f"{folder.unread}{engine.spell_run_hint(folder.config)}"
            )
            return unread.model_copy(update={"asks_for_kv": asks_for_kv})
        seen = folder
        try:
            seen = folder if engine.view is None else engine.view(folder)
            report = engine.replay_folder(seen, geometry, tp)
        except UnrunRefusal as refusal:
            return report_refusal(geometry, refusal)
        except Refusal as refusal:
            report = report_refusal(geometry, refusal)
        report = report.model_copy(update={"asks_for_kv": asks_for_kv})
        report = _judge_shared(report, geometry)
        report = _correct_fixes(engine, report, geometry, tp, folder)
        factor = engine.scale_factor if find_cache_flag(folder) else 1.0
        report = amend_weights(engine, judge(report, factor), open_weights(seen), tp)
        return _tell_preferred(engine, report, seen, geometry)

    return _ask_all(engines, geometry, tp, folder.config, ask)


def _ask_all(
    engines: Sequence[str],
    geometry: ModelGeometry,
    tp: int,
    config: Mapping[str, object],
    ask: Callable[[Engine], EngineReport],
) -> Reports:
    """Ask each engine that may start with this config on so many ranks."""
    misfit = _find_misfit(geometry, tp)
    reports = {}
    for engine in map(find_replayed, engines):
        if refusal := _find_refusal(engine, config, geometry.architecture, misfit):
            report = report_refusal(geometry, refusal)
        else:
            report = ask(engine)
            report = report.add_problems(engine.note) if engine.note else report
        named = {"engine": engine.key.partition("==")[0], "version": engine.version}
        reports[engine.key] = report.model_copy(update=named)
    return reports


def _judge_shared(report: EngineReport, geometry: ModelGeometry) -> EngineReport:
    """Mark a layer as misread that reads another layer's cache, but has other scales."""
    slots = report.slots
    changed = {}
    for layer, attention in geometry.attentions():
        index = attention.producer
        for role in KV_ROLES:
            mine, theirs = slots.get((layer.index, role)), slots.get((index or 0, role))
            if index is None or mine is None or theirs is None:
                continue
            if None not in (mine.value, theirs.value) and mine.value != theirs.value:
                why = (
                    f"it reads the cache of layer {index}, which is written with "
                    f"{theirs.value:.4g}, with {mine.value:.4g}"
                )
                update = {"status": Status.MISREAD, "why": why, "fix": _SHARED_FIX.format(index)}
                changed[layer.index, role] = mine.model_copy(update=update)
    return report.put(changed)


def _tell_preferred(
    engine: Engine, report: EngineReport, seen: ScaleFolder, geometry: ModelGeometry
) -> EngineReport:
    """Say what an engine opens instead of the other files; its names may be known to no class."""
    if not seen.preferred:
        return report
    tensors = {name: each for held in seen.tensors.values() for name, each in held.items()}
    if not are_elsewhere(geometry, tensors):
        return report.add_problems(seen.preferred)
    why = f"{seen.preferred}, and it has other names than the model's class"
    return report.doubt(f"{why}{engine.spell_run_hint(seen.config)}")


def check_file(
    path: Path,
    geometry: ModelGeometry,
    engines: Sequence[str],
    tp: int,
    *,
    model: ScaleFolder,
    stats: CalibrationStats | None = None,
    reads_weights: bool = False,
) -> Reports:
    """Report what each engine does with a file of scales beside a model.

    Args:
        path: a JSON file, or a file of tensors that is in no model's folder.
        geometry: the shape of the model.
        engines: their keys.
        tp: the number of ranks.
        model: the model's folder.
        stats: of the model; scales that are far from it are bad.
        reads_weights: as for a folder.

    Raises:
        UsageError: an engine is unknown, or nothing of it is replayed.
    """
    judge = _make_judge(model, geometry, stats, reads_weights=reads_weights)

    def ask(engine: Engine) -> EngineReport:
        report = judge(_replay_file(engine, path, geometry, tp, model), 1.0)
        return _correct_fixes(engine, report, geometry, tp, model)

    return _ask_all(engines, geometry, tp, model.config, ask)


def _make_judge(
    model: ScaleFolder,
    geometry: ModelGeometry,
    stats: CalibrationStats | None,
    *,
    reads_weights: bool,
    odd_scales: Collection[str] = (),
) -> Callable[[EngineReport, float], EngineReport]:
    """Make the test for odd scales, which an engine multiplies by a factor before it uses them.

    Weights are read once, if an engine uses a scale.
    """
    if stats is not None:
        return partial(mark_odd_scales, reaches=measure_reaches(stats))
    is_on_hub = any(find_ranged_file(model.path / file) for file in model.tensors)

    @cache
    def estimate() -> Mapping[Slot, Reach]:
        return estimate_reaches(model, geometry, odd_scales)

    def judge(report: EngineReport, factor: float) -> EngineReport:
        if not any(each.status is Status.USED for each in report.verdicts):
            return report
        if not reads_weights:
            alone = suspect_odd_scales(report, factor, estimates={})
            # A layer whose K or V is large has a large scale: the weights tell. Those of a model on
            # the Hub would have to be downloaded.
            if alone.suspicious == report.suspicious or is_on_hub:
                return alone
        return suspect_odd_scales(report, factor, estimates=estimate())

    return judge


def _correct_fixes(
    engine: Engine, report: EngineReport, geometry: ModelGeometry, tp: int, model: ScaleFolder
) -> EngineReport:
    """Replace the advice to write a kv-overlay where the engine uses no overlay of this model."""
    is_advised = any("kv-overlay" in verdict.fix for verdict in report.verdicts)
    if not is_advised or any(
        layer.ok for layer in replay_overlay(engine, geometry, tp, model).layers
    ):
        return report
    fix = _NO_OVERLAY_FIX.format(engine.title, shorten(geometry.model_type))

    def correct(verdict: LoadVerdict) -> LoadVerdict:
        is_wrong = "kv-overlay" in verdict.fix
        return verdict.model_copy(update={"fix": fix}) if is_wrong else verdict

    return report.change(correct)


def replay_overlay(
    engine: Engine, geometry: ModelGeometry, tp: int, model: ScaleFolder
) -> EngineReport:
    """Report what an engine does with the kv-overlay that fp8calib would write of a model."""
    if engine.replay_folder is None:
        return report_refusal(geometry, Refusal(engine.no_folder, fix=""))
    roles = itertools.product((each for _, each in geometry.attentions()), KV_ROLES)
    names = [name for attention, role in roles for name in name_scales(attention, role)]
    unlisted = list_unlisted(geometry, names)
    listed = [name for name in names if name not in unlisted]
    config = {**model.config, "quantization_config": make_quantization_config("tensor")}
    index = {"weight_map": dict.fromkeys(listed, SINGLE_FILE_NAME)}
    with TemporaryDirectory(prefix="fp8calib-") as place:
        folder = Path(place)
        for name, document in ((CONFIG_NAME, config), (INDEX_NAME, index)):
            (folder / name).write_text(json.dumps(document))
        for name, held in ((SINGLE_FILE_NAME, listed), (UNLISTED_NAME, unlisted)):
            scales = {each: np.ones(1, np.float32) for each in held}
            save_file(scales, folder / name, metadata={"format": "pt"})
        try:
            return engine.replay_folder(open_folder(folder), geometry, tp)
        except Refusal as refusal:
            return report_refusal(geometry, refusal)


def _replay_file(
    engine: Engine, path: Path, geometry: ModelGeometry, tp: int, model: ScaleFolder
) -> EngineReport:
    if path.suffix != ".json":
        why = "no engine reads a file of scales that is outside the model's folder"
    elif engine.replay_json is None:
        why = engine.no_json or f"{engine.title} reads no JSON of scales"
    else:
        try:
            return engine.replay_json(path, geometry, tp, model)
        except Refusal as refusal:
            return report_refusal(geometry, refusal)
    return report_alike(
        geometry,
        LoadVerdict(
            status=Status.DROPPED, value=1.0, why=f"{why}, so it uses 1.0", fix=_OVERLAY_FIX
        ),
    )


def _find_misfit(geometry: ModelGeometry, tp: int) -> Refusal | None:
    """Say why engines do not start on so many ranks; None where all heads can be distributed."""
    try:
        check_heads(geometry, tp)
        check_cuts(geometry, tp)
    except UsageError as error:
        return Refusal(f"{error.message}: the engine does not start", fix=error.hint)
    return None


def _find_refusal(
    engine: Engine, config: Mapping[str, object], architecture: str, misfit: Refusal | None
) -> Refusal | None:
    """Say why an engine does not start, whatever its files hold; None where it may."""
    if misfit is not None and engine.splits_heads:
        return misfit
    if "auto_map" in config:  # a config class of its own, which may know more
        return None
    if why := engine.explain_type(config.get("model_type")):
        return Refusal(why, fix=_NEWER_FIX)
    text = config.get("text_config")
    stored = {*config, *(text if isinstance(text, Mapping) else ())}
    lacking = [each for each in engine.list_read_fields(architecture) if each not in stored]
    if not lacking:
        return None
    names = ", ".join(lacking)
    why = f"config.json lacks {names}, without which {engine.title} does not load {architecture}"
    return Refusal(why, fix=f"add {names} as in the config.json of the model's authors")
