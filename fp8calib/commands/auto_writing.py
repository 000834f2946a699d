"""What `auto` writes, read back: verified on the text that was held out, and checked."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from fp8calib.commands.check import run as check
from fp8calib.commands.export import run as export
from fp8calib.commands.quantize import run as quantize
from fp8calib.engines.registry import find_replayed, list_defaults
from fp8calib.jobs.auto import decide
from fp8calib.jobs.auto.decide import KV_AND_Q_SCALES, KV_SCALES, Combination
from fp8calib.jobs.auto.measure import (
    OVERLAY,
    Measured,
)
from fp8calib.jobs.quantization.servable import find_fault
from fp8calib.jobs.stats import drop_kv
from fp8calib.recipe import Quantize
from fp8calib.requests.auto import AutoRequest
from fp8calib.requests.check import CheckRequest
from fp8calib.requests.export import ExportRequest
from fp8calib.requests.quantize import QuantizeRequest
from fp8calib.results.auto import Attempt, Checked, Outcome, WrittenResult
from fp8calib.verification.report import Verdict


def write_combination(measured: Measured, folder: Path, choice: Combination) -> Outcome:
    """Write one combination, read it back, verify and check it; remove it if it does not pass."""
    name = choice.scheme or OVERLAY
    has_query = choice.kv == KV_AND_Q_SCALES
    model = str(measured.opened.model.source.folder)
    if choice.scheme is not None:
        stats = measured.stats if choice.kv == KV_SCALES else drop_kv(measured.stats)
        out = folder / choice.scheme
        planned = choice.planned or Quantize(scheme=choice.scheme)
        request = QuantizeRequest(
            model,
            choice.scheme,
            out,
            stats=stats,
            ignore=planned.ignore,
            layer_schemes=planned.layer_schemes,
        )
        quantize(request, measured.reporter)
    if choice.scheme is None or has_query:
        source = model if choice.scheme is None else folder / choice.scheme
        written = folder / "scales"
        query = "yes" if has_query else "no"
        export(
            ExportRequest(measured.stats, OVERLAY, written, model=source, query_scale=query),
            measured.reporter,
        )
        if choice.scheme is not None:
            _remove(folder / choice.scheme)
        (written / OVERLAY).rename(folder / name)
        written.rmdir()
    left = choice.left
    verified = measured.read_back(folder / name, left)
    checked = dict(_check_written(measured, folder / name))
    served = checked[measured.task.engine]
    attempt = Attempt(
        name=str(choice),
        verdict=verified.verdict.value if served.ok else "not loaded",
        why=verified.verdict_why if served.ok else served.why,
    )
    if not decide.passes(verified) or not served.ok:
        _remove(folder / name)
        return Outcome(
            closest=f"{attempt.name}: {attempt.verdict} ({attempt.why})",
            is_unknown=served.ok and verified.verdict is Verdict.CANNOT_TELL,
            tried=(attempt,),
            checked=checked,
            verified=verified,
        )
    return Outcome(
        written=WrittenResult(
            name=name,
            scheme=choice.scheme,
            has_kv_scales=choice.kv is not None,
            has_query_scales=has_query,
            unquantized_layers=choice.left,
            unquantized=() if choice.planned is None else choice.planned.ignore,
            layer_schemes={} if choice.planned is None else choice.planned.layer_schemes,
            serve_options=(options := measured.opened.numerics.spell_skip(left)),
        ),
        tried=(attempt,),
        verified=verified,
        checked=checked,
        serve=_spell_serve(measured.task, name, options, has_kv=choice.kv is not None),
    )


def _check_written(measured: Measured, path: Path) -> Iterator[tuple[str, Checked]]:
    """Replay the engine that was asked for, and those that `check` asks by itself."""
    asked = dict.fromkeys([measured.task.engine, *list_defaults()])
    # The scales follow from the statistics of this very run.
    request = CheckRequest(path, engine=list(asked), allow_suspicious=True)
    report = check(request, measured.reporter)
    for name, key in zip(asked, report.engines, strict=True):
        found = report.engines[key]
        yield name, Checked(version=found.version, ok=found.ok, why=find_fault(found))


def _spell_serve(task: AutoRequest, name: str, options: str, *, has_kv: bool) -> str:
    """Spell the command that serves what was written; empty where the engine has none."""
    engine = find_replayed(task.engine)
    if engine.launch is None:
        return ""
    return (
        f"{engine.launch.spell(str(Path(str(task.out)) / name), has_kv=has_kv)} {options}".strip()
    )


def _remove(folder: Path) -> None:
    shutil.rmtree(folder)
