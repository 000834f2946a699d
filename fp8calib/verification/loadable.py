"""Whether the emulated engine loads a candidate and uses its KV scales: its loader is replayed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from fp8calib.calibration.run_model import RunModel
from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.engines.check import check_file, check_folder
from fp8calib.engines.engine import Engine
from fp8calib.engines.replay.folder import open_folder
from fp8calib.engines.replay.geometry import read_replayed_geometry
from fp8calib.engines.replay.verdicts import EngineReport
from fp8calib.engines.status import Status
from fp8calib.errors import Fp8CalibError, ModelError, shorten
from fp8calib.numerics.schemes import Scheme, find_scheme
from fp8calib.quantization.plan import make_plan
from fp8calib.quantization.select import find_selection
from fp8calib.quantization.settings import make_settings
from fp8calib.quantization.write import write_outline
from fp8calib.verification.candidates import (
    OpenedCandidate,
    find_candidate,
    list_defaulted,
)
from fp8calib.verification.report import SCALE_ONE


def note_version(engine: Engine) -> list[str]:
    """Note that an engine has another version than that of the rules."""
    return [f"{engine.title}: {engine.note}"] if engine.note else []


def judge_loading(
    engine: Engine, model: RunModel, opened: Sequence[OpenedCandidate], scheme: str | None
) -> tuple[list[str], list[str]]:
    """Find the candidates that the engine cannot load, or whose KV scales it does not use.

    Returns:
        Their names, and warnings of them and of those that it may not load.
    """
    if engine.replay_folder is None:
        return [], note_version(engine)
    folders = {
        each.name: find_candidate(each.name)
        for each in opened
        if each.stats is None and Path(each.name).is_dir()
    }
    has_folder = not model.is_live and model.checkpoint.has_weights
    is_unquantized = has_folder and not model.checkpoint.form
    if is_unquantized:
        folders[SCALE_ONE] = model.source.folder
    reports = {name: _replay(path, engine) for name, path in folders.items()}
    if scheme is not None and is_unquantized:
        report = _replay_scheme(model, find_scheme(scheme), engine)
        reports |= dict.fromkeys([each.name for each in opened] or [scheme], report)
    known = {name: report for name, report in reports.items() if report is not None}
    faults = {name: report.load_fault for name, report in known.items()}
    unused = {each.name: _find_unused(each, known.get(each.name), model, engine) for each in opened}
    refused = {name: why for name, why in faults.items() if why}
    unused = {name: why for name, why in unused.items() if why and not faults.get(name)}
    doubts = {
        n: report.unknown[0] for n, report in known.items() if report.unknown and not faults[n]
    }
    warnings = note_version(engine)
    for name, why in refused.items():
        warnings.append(
            f"{_name(name)}: {engine.release} cannot load it ({why}); the figures are those of its "
            "arithmetic alone"
        )
    for name, why in unused.items():
        warnings.append(
            f"{_name(name)}: {engine.release} does not use its KV scales ({why}); the figures are "
            "those of its arithmetic with them"
        )
    for name, why in doubts.items():
        warnings.append(f"{_name(name)}: whether {engine.release} loads it is unknown ({why})")
    return [*refused, *unused], warnings


def _name(candidate: str) -> str:
    return "the unquantized model" if candidate == SCALE_ONE else candidate


def _find_unused(
    opened: OpenedCandidate, report: EngineReport | None, model: RunModel, engine: Engine
) -> str:
    """Say why an engine does not use KV scales; empty where it does, or where there are none.

    What it does with those of latents, and with a checkpoint's that it misreads, is emulated.
    """
    found, path = opened.found, Path(opened.name)
    if found is None or found.table.geometry.has_latent_attention or model.is_live:
        return ""
    unused = {Status.DROPPED, Status.DEFAULTED}
    if path.suffix == ".json":
        unused |= {Status.MISREAD, Status.REFUSED}
        folder, ranks = open_folder(model.source.folder), found.table.tp
        checked = check_file(path, found.table.geometry, [engine.key], ranks, model=folder)
        report = checked.engines[engine.key]
    emulated = list_defaulted(found.table)
    layers = (
        [] if report is None else [each for each in report.layers if each.layer not in emulated]
    )
    verdicts = (verdict for layer in layers for verdict in (layer.k, layer.v))
    return next((shorten(each.why) for each in verdicts if each.status in unused), "")


def _replay(folder: Path, engine: Engine) -> EngineReport | None:
    """Replay the loader; None for what is no checkpoint, or of a model that is not known."""
    if not (folder / CONFIG_NAME).is_file():
        return None
    found = open_folder(folder)
    try:
        geometry = read_replayed_geometry(found)
    except ModelError:
        return None
    return check_folder(found, geometry, [engine.key], 1).engines[engine.key]


def _replay_scheme(model: RunModel, scheme: Scheme, engine: Engine) -> EngineReport | None:
    """Replay the checkpoint that `quantize` would write; None where it would need statistics."""
    if scheme.has_static_inputs:
        return None
    try:
        plan = make_plan(
            model.checkpoint, make_settings(scheme.name), find_selection(model.checkpoint)
        )
    except Fp8CalibError:  # verify names what it cannot emulate itself
        return None
    with TemporaryDirectory(prefix="fp8calib-") as name:
        write_outline(plan, Path(name))
        return _replay(Path(name), engine)
