"""Whether the emulated engine loads a candidate and uses its KV scales: its loader is replayed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from fp8calib.calibration.run_model import RunModel
from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.checkpoint.torch_dtypes import TORCH_DTYPES
from fp8calib.engines.engine import Engine
from fp8calib.engines.status import Status
from fp8calib.errors import Fp8CalibError, ModelError, shorten
from fp8calib.model.device import DTYPES
from fp8calib.model.geometry_from_config import is_plain, read_geometry
from fp8calib.numerics.schemes import find_scheme
from fp8calib.verification.candidates import list_defaulted
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.open_candidates import find_candidate
from fp8calib.verification.report import SCALE_ONE

if TYPE_CHECKING:  # statistics for a common model need no replay
    from fp8calib.engines.replay.verdicts import EngineReport


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
    figures, doubts = "the figures are those of its arithmetic", {}
    unusable: dict[str, str] = {}
    reports = dict(_replay_all(engine, model, opened, scheme))
    for name, report in reports.items():
        if report.load_fault:
            unusable[name] = f"cannot load it ({report.load_fault}); {figures} alone"
        elif report.unknown:
            doubts[name] = f"whether {engine.release} loads it is unknown ({report.unknown[0]})"
    for each in (each for each in opened if each.name not in unusable):
        if why := _find_unused(each, reports.get(each.name), model, engine):
            unusable[each.name] = f"does not use its KV scales ({why}); {figures} with them"
    told = [(name, f"{engine.release} {text}") for name, text in unusable.items()]
    for name, text in (*told, *doubts.items()):
        warnings.append(f"{'the unquantized model' if name == SCALE_ONE else name}: {text}")
    return list(unusable), warnings


def _replay_all(
    engine: Engine, model: RunModel, opened: Sequence[Candidate], scheme: str | None
) -> Iterator[tuple[str, EngineReport]]:
    """Replay the loader on the folders of candidates and the model, and on what a scheme writes.

    What is no checkpoint, or of a model that is not known, is left out.
    """
    places = {each.name: find_candidate(each.name) for each in opened if each.stats is None}
    has_folder = not model.is_live and model.checkpoint.has_weights
    is_unquantized = has_folder and not model.checkpoint.form
    if is_unquantized and (engine.name_rules is None or not is_common(model)):
        places[SCALE_ONE] = model.source.folder
    for name, path in places.items():
        if (report := _replay(path, engine)) is not None:
            yield name, report
    if scheme is None or not is_unquantized or find_scheme(scheme).has_static_inputs:
        return  # static scales would need statistics
    # most candidates have no scheme
    from fp8calib.quantization.plan import make_plan  # noqa: PLC0415
    from fp8calib.quantization.select import find_selection  # noqa: PLC0415
    from fp8calib.quantization.settings import make_settings  # noqa: PLC0415
    from fp8calib.quantization.write import write_outline  # noqa: PLC0415

    try:
        selection = find_selection(model.checkpoint)
        plan = make_plan(model.checkpoint, make_settings(scheme), selection)
    except Fp8CalibError:  # verify names what it cannot emulate itself
        return
    with TemporaryDirectory(prefix="fp8calib-") as folder:
        write_outline(plan, Path(folder))
        if (report := _replay(Path(folder), engine)) is not None:
            yield from dict.fromkeys([each.name for each in opened] or [scheme], report).items()


def is_common(model: RunModel) -> bool:
    """Whether vLLM and SGLang load a folder as transformers does, in all of their releases.

    It is of a common class, its config has no odd setting, and its files hold the parameters of
    this class in 16 or 32 bits, and nothing else.
    """
    folder, stored = model.source.folder, model.checkpoint
    return (
        is_plain(folder, model.source.raw_config)
        and stored.tensors.keys() == {name for name, _ in model.prepared.model.named_parameters()}
        and all(TORCH_DTYPES.get(each.dtype) in DTYPES.values() for each in stored.tensors.values())
        and {each.path for each in stored.files} == set(folder.rglob("*.safetensors"))
        and not stored.unlisted
    )


def _replay(folder: Path, engine: Engine) -> EngineReport | None:
    from fp8calib.engines.check import check_folder  # noqa: PLC0415 -- most of the code
    from fp8calib.engines.replay.folder import open_folder  # noqa: PLC0415

    if not (folder / CONFIG_NAME).is_file():
        return None
    found = open_folder(folder)
    try:
        geometry = read_geometry(found.path, found.config)
    except ModelError:
        return None
    return check_folder(found, geometry, [engine.key], 1)[engine.key]


def _find_unused(
    opened: Candidate, report: EngineReport | None, model: RunModel, engine: Engine
) -> str:
    """Say why an engine does not use KV scales; empty if it does, or if there are none.

    What it does with those of latents, and with a checkpoint's that it misreads, is emulated.
    """
    table, path = opened.table, Path(opened.name)
    if table is None or opened.stats is not None or model.is_live:
        return ""
    if table.geometry.has_latent_attention:
        return ""
    unused = {Status.DROPPED, Status.DEFAULTED}
    if path.suffix == ".json":
        from fp8calib.engines.check import check_file  # noqa: PLC0415 -- most of the code
        from fp8calib.engines.replay.folder import open_folder  # noqa: PLC0415

        unused |= {Status.MISREAD, Status.BAD, Status.REFUSED}
        folder = open_folder(model.source.folder)
        checked = check_file(path, table.geometry, [engine.key], table.tp, model=folder)
        report = checked[engine.key]
    emulated = list_defaulted(table)
    layers = () if report is None else report.layers
    verdicts = (v for each in layers if each.layer not in emulated for v in (each.k, each.v))
    return next((shorten(each.why) for each in verdicts if each.status in unused), "")
