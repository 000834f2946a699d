"""Whether the emulated engine loads a candidate at all, found by replaying its loader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from fp8calib.api.check import read_replayed_geometry
from fp8calib.api.models import RunModel
from fp8calib.api.quantize.servable import find_load_fault, write_outline
from fp8calib.api.verify.job import VerifyOptions
from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.dialects.fp8.registry import find_written
from fp8calib.engines.check import check_folder
from fp8calib.engines.engine import Engine
from fp8calib.engines.replay.folder import open_folder
from fp8calib.errors import Fp8CalibError, ModelError
from fp8calib.fp8.schemes import Scheme
from fp8calib.quantization.plan import PlanSettings, make_plan
from fp8calib.selection.layer_schemes import LayerSchemes
from fp8calib.selection.select import find_selection
from fp8calib.verification.candidates import OpenedCandidate, find_candidate
from fp8calib.verification.report import SCALE_ONE


def find_refusals(
    options: VerifyOptions, model: RunModel, opened: Sequence[OpenedCandidate]
) -> dict[str, str]:
    """Find the candidates that the emulated engine cannot load, by name, and say why."""
    engine = options.engine
    if engine.replay_folder is None:
        return {}
    folders = {
        each.name: find_candidate(each.name)
        for each in opened
        if each.stats is None and Path(each.name).is_dir()
    }
    is_unquantized = not model.is_live and not model.checkpoint.form
    if is_unquantized:
        folders[SCALE_ONE] = model.source.folder
    faults = {name: _find_fault(path, engine) for name, path in folders.items()}
    if options.scheme is not None and is_unquantized:
        fault = _find_scheme_fault(model, options.scheme, engine)
        faults |= dict.fromkeys([each.name for each in opened] or [options.scheme.name], fault)
    return {name: why for name, why in faults.items() if why}


def warn_of_refusals(options: VerifyOptions, refused: Mapping[str, str]) -> Iterator[str]:
    """Warn of candidates that the emulated engine cannot load.

    The first warning is of an engine whose version is another than that of the rules.
    """
    engine = options.engine
    if engine.note:
        yield f"{engine.title}: {engine.note}"
    for name, why in refused.items():
        shown = "the unquantized model" if name == SCALE_ONE else name
        yield (
            f"{shown}: {engine.release} cannot load it ({why}); the figures are those of its "
            "arithmetic alone"
        )


def _find_fault(folder: Path, engine: Engine) -> str:
    if not (folder / CONFIG_NAME).is_file():
        return ""
    found = open_folder(folder)
    try:
        geometry, _ = read_replayed_geometry(found)
    except ModelError:
        return ""
    return find_load_fault(check_folder(found, geometry, [engine.key], 1).engines[engine.key])


def _find_scheme_fault(model: RunModel, scheme: Scheme, engine: Engine) -> str:
    """Replay the checkpoint that `quantize` would write; empty where it would need statistics."""
    if scheme.has_static_inputs:
        return ""
    dialect = find_written("compressed-tensors", scheme)
    settings = PlanSettings(schemes=LayerSchemes(scheme), dialect=dialect)
    try:
        plan = make_plan(model.checkpoint, settings, find_selection(model.checkpoint))
    except Fp8CalibError:  # verify names what it cannot emulate itself
        return ""
    with TemporaryDirectory(prefix="fp8calib-") as name:
        write_outline(plan, Path(name))
        return _find_fault(Path(name), engine)
