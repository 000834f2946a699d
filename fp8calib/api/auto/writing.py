"""What `auto` writes, read back: verified on the text that was held out, and checked."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from fp8calib.api.auto import decide
from fp8calib.api.auto.decide import KV_AND_Q_SCALES, KV_SCALES, Choice
from fp8calib.api.auto.measure import (
    OVERLAY,
    AutoTask,
    Measured,
    drop_kv,
    name_layers,
)
from fp8calib.api.auto.report import Checked, Outcome, WrittenResult
from fp8calib.api.check import check
from fp8calib.api.export.run import export
from fp8calib.api.quantize.run import quantize
from fp8calib.api.quantize.servable import find_fault
from fp8calib.engines.registry import find_replayed, list_defaults
from fp8calib.verification.report import CandidateResult


def write_choice(
    measured: Measured, folder: Path, *, scheme: str | None, left: tuple[int, ...], kv: Choice
) -> Outcome:
    """Write what was decided, verify and check it."""
    name = scheme or OVERLAY
    ignore = [name_layers(measured.stats)[layer] for layer in left]
    query = "yes" if kv.name == KV_AND_Q_SCALES else "no"
    model = str(measured.model.source.folder)
    if scheme is not None:
        stats = measured.stats if kv.name == KV_SCALES else drop_kv(measured.stats)
        quantize(model, scheme, folder / scheme, stats=stats, ignore=ignore)
    if scheme is None or kv.name == KV_AND_Q_SCALES:
        source = model if scheme is None else folder / scheme
        written = folder / "scales"
        export(measured.stats, OVERLAY, written, model=source, query_scale=query)
        if scheme is not None:
            _remove(folder / scheme)
        (written / OVERLAY).rename(folder / name)
        written.rmdir()
    verified = _verify_written(measured, folder / name)
    checked = dict(_check_written(measured.task, folder / name))
    is_served = checked[measured.task.engine].ok
    if not decide.passes(verified) or not is_served:
        _remove(folder / name)
        why = f"{verified.verdict} ({verified.verdict_why})"
        closest = f"{name} as written: {why if is_served else checked[measured.task.engine].why}"
        return Outcome(closest=closest, checked=checked, verified=verified)
    return Outcome(
        written=WrittenResult(
            name=name,
            scheme=scheme,
            has_kv_scales=kv.name is not None,
            has_query_scales=kv.name == KV_AND_Q_SCALES,
            unquantized_layers=left,
        ),
        verified=verified,
        checked=checked,
        serve=_spell_serve(measured.task, name, has_kv=kv.name is not None),
    )


def _verify_written(measured: Measured, path: Path) -> CandidateResult:
    found = measured.compare(scales=[str(path)])
    return found.candidates[0].model_copy(update={"name": path.name})


def _check_written(task: AutoTask, path: Path) -> Iterator[tuple[str, Checked]]:
    """Replay the engine that was asked for, and those that `check` asks by itself."""
    asked = dict.fromkeys([task.engine, *list_defaults()])
    report = check(path, engine=list(asked))
    for name, key in zip(asked, report.engines, strict=True):
        found = report.engines[key]
        yield name, Checked(version=report.versions[key], ok=found.ok, why=find_fault(found))


def _spell_serve(task: AutoTask, name: str, *, has_kv: bool) -> str:
    """Spell the command that serves what was written; empty where the engine has none."""
    engine = find_replayed(task.engine)
    return "" if engine.launch is None else engine.launch.spell(str(task.out / name), has_kv=has_kv)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder)
