"""Whether the emulated engine loads a candidate and uses its KV scales: its loader is replayed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from fp8calib.verification.candidates import find_candidate, list_defaulted
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.report import SCALE_ONE


def judge_loading(
    engine: Engine, model: RunModel, opened: Sequence[Candidate], scheme: str | None
) -> tuple[list[str], list[str]]:
    """Find the candidates that the engine cannot load, or whose KV scales it does not use.

    Returns:
        Their names, and warnings: of them, of those that it may not load, and of a version of the
        engine that the rules are not of.
    """
    warnings = [f"{engine.title}: {engine.note}"] if engine.note else []
    if engine.replay_folder is None:
        return [], warnings
    reports = dict(_replay_all(engine, model, opened, scheme))
    unusable = {
        name: f"{engine.release} cannot load it ({report.load_fault}); the figures are those of "
        "its arithmetic alone"
        for name, report in reports.items()
        if report.load_fault
    }
    unusable |= {
        each.name: f"{engine.release} does not use its KV scales ({why}); the figures are those of "
        "its arithmetic with them"
        for each in opened
        if each.name not in unusable
        and (why := _find_unused(each, reports.get(each.name), model, engine))
    }
    doubts = {
        name: f"whether {engine.release} loads it is unknown ({report.unknown[0]})"
        for name, report in reports.items()
        if report.unknown and not report.load_fault
    }
    for name, text in (*unusable.items(), *doubts.items()):
        warnings.append(f"{'the unquantized model' if name == SCALE_ONE else name}: {text}")
    return list(unusable), warnings


def _replay_all(
    engine: Engine, model: RunModel, opened: Sequence[Candidate], scheme: str | None
) -> Iterator[tuple[str, EngineReport]]:
    """Replay the loader on the folders of candidates and the model, and on what a scheme writes."""
    places = {
        each.name: find_candidate(each.name)
        for each in opened
        if each.stats is None and Path(each.name).is_dir()
    }
    has_folder = not model.is_live and model.checkpoint.has_weights
    if is_unquantized := has_folder and not model.checkpoint.form:
        places[SCALE_ONE] = model.source.folder
    for name, path in places.items():
        if (report := _replay(path, engine)) is not None:
            yield name, report
    if scheme is not None and is_unquantized:
        report = _replay_scheme(model, find_scheme(scheme), engine)
        if report is not None:
            yield from dict.fromkeys([each.name for each in opened] or [scheme], report).items()


def _find_unused(
    opened: Candidate, report: EngineReport | None, model: RunModel, engine: Engine
) -> str:
    """Say why an engine does not use KV scales; empty where it does, or where there are none.

    What it does with those of latents, and with a checkpoint's that it misreads, is emulated.
    """
    table, path = opened.table, Path(opened.name)
    if table is None or opened.stats is not None or model.is_live:
        return ""
    if table.geometry.has_latent_attention:
        return ""
    unused = {Status.DROPPED, Status.DEFAULTED}
    if path.suffix == ".json":
        unused |= {Status.MISREAD, Status.BAD, Status.REFUSED}
        folder = open_folder(model.source.folder)
        reports = check_file(path, table.geometry, [engine.key], table.tp, model=folder)
        report = reports[engine.key]
    emulated = list_defaulted(table)
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
    return check_folder(found, geometry, [engine.key], 1)[engine.key]


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
