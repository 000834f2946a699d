"""Measure a model, decide from the figures, write, verify and check: one call for all of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fp8calib.api.auto import decide
from fp8calib.api.auto.decide import KV_AND_Q_SCALES, KV_SCALES, Choice
from fp8calib.api.auto.report import AutoReport, Checked, Decision, WrittenResult
from fp8calib.api.calibrate import IF_QUANTIZED, run_calibration
from fp8calib.api.check import check
from fp8calib.api.export.run import export
from fp8calib.api.models import Placement, RunModel, open_run_model
from fp8calib.api.progress import CallbackProgress, ProgressCallback, warn_each
from fp8calib.api.quantize.run import open_planned, quantize, resolve_plan
from fp8calib.api.quantize.servable import find_load_fault, require_servable
from fp8calib.api.recipe_options import override_recipe
from fp8calib.api.stats import CalibrationStats
from fp8calib.api.text import plan_text
from fp8calib.api.verify.job import VerifyOptions
from fp8calib.api.verify.memory import choose_verification_mode
from fp8calib.api.verify.run import (
    VerificationText,
    open_verify_job,
    resolve_options,
    run_verify_job,
)
from fp8calib.calibration import Progress
from fp8calib.checkpoint.atomic import OutputFolder
from fp8calib.checkpoint.json_files import encode_json
from fp8calib.data.plan import DataPlan, split_plan
from fp8calib.dialects.fp8.compressed_tensors import COMPRESSED_TENSORS
from fp8calib.engines.registry import find_emulated, find_replayed, list_defaults
from fp8calib.errors import ExportError, ModelError, UsageError
from fp8calib.fp8.formats import E4M3FN
from fp8calib.fp8.schemes import SCHEMES, find_scheme
from fp8calib.geometry.sites import KV_ROLES
from fp8calib.model.load import LoadedModel
from fp8calib.scales.compute import compute_kv_scales, list_unfit_queries
from fp8calib.stats.calibration_stats import REPORT_NAME, STATS_NAME, save_stats
from fp8calib.verification.candidates import (
    Candidate,
    Target,
    build_kv_candidate,
    build_scheme,
)
from fp8calib.verification.report import CandidateResult, VerifyReport

GATES = ("w8a8", "kv")
HELD_OUT = 0.2
"""The share of the data that the loss is measured on; the scales come from the rest."""
_OVERLAY = "kv-overlay"
_MOST_LEFT = 0.5
"""At most this share of the layers stays unquantized."""


def auto(
    model: str | Path,
    data: str | Sequence[str] | None = None,
    *,
    out: str | Path,
    gate: Literal["w8a8", "kv"] = "w8a8",
    engine: str = "vllm",
    samples: int = 512,
    seq_len: int | None = None,
    batch_size: int = 1,
    pack: bool = True,
    device: str = "auto",
    dtype: str = "auto",
    device_map: str | None = None,
    memory: float | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    force: bool = False,
    progress: ProgressCallback | None = None,
) -> AutoReport:
    """Choose how a model becomes FP8 from its figures, write it, verify and check what was written.

    `out` gets the statistics, `report.json` with every decision, and the checkpoint, if it passes.

    Args:
        model: a folder or Hub id.
        data: specs as for `--data`; the last fifth is held out to measure the loss. None is the
            built-in text.
        out: the output folder.
        gate: `w8a8` for weights, inputs and KV cache; `kv` for the KV cache alone.
        engine: the engine that has to serve it, and whose FP8 is emulated.
        samples: how many sequences, those that are held out included.
        seq_len: tokens of a sequence; None is 2048, or the model's maximum.
        batch_size: sequences of a forward pass.
        pack: whether rows are joined and cut into sequences.
        device: as for `calibrate`, like the following options.
        dtype: of the forward pass.
        device_map: `auto` spreads the model over all GPUs.
        memory: the most memory of the process, in GiB.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: run the Python code of the checkpoint.
        force: replace earlier output.
        progress: called with stage, steps done and all steps.

    Raises:
        UsageError: an option is invalid, or the folder is in use.
        ModelError: the model cannot be read or run.
        DataError: the data cannot be read, or is one sequence.
        CalibrationError: a forward pass failed.
        ExportError: the output cannot be written.
    """
    placement = Placement(device=device, dtype=dtype, device_map=device_map, memory=memory)
    task = AutoTask(
        model=str(model),
        out=Path(out),
        gate=gate,
        engine=engine,
        data=(data,) if isinstance(data, str) else tuple(data or ()),
        samples=samples,
        seq_len=seq_len,
        batch_size=batch_size,
        pack=pack,
        placement=placement,
        revision=revision,
        trust_remote_code=trust_remote_code,
        force=force,
    )
    report = run_auto(task, CallbackProgress(progress), lambda _text: None)
    warn_each(report.warnings)
    return report


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoTask:
    """The options of `auto`, resolved."""

    model: str
    out: Path
    gate: str
    engine: str
    data: tuple[str, ...]
    samples: int
    seq_len: int | None
    batch_size: int
    pack: bool
    placement: Placement
    revision: str | None
    trust_remote_code: bool
    force: bool

    @property
    def owned(self) -> frozenset[str]:
        """Names of what may be in the output folder."""
        return frozenset({STATS_NAME, REPORT_NAME, _OVERLAY, *SCHEMES})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """The model, its statistics, and the text that is held out."""

    task: AutoTask
    model: RunModel
    stats: CalibrationStats
    held_out: DataPlan
    options: VerifyOptions
    progress: Progress

    def compare(
        self, make: Callable[[LoadedModel, Target], Sequence[Candidate]], *, by_layer: bool = False
    ) -> VerifyReport:
        """Compare candidates with the model on the text that is held out."""
        options = replace(self.options, sensitivity=by_layer)
        text = VerificationText(specs=(), samples=0, seq_len=None, pack=True, planned=self.held_out)
        job = replace(open_verify_job(self.model, options, text), make_candidates=make)
        return run_verify_job(job, choose_verification_mode(job), self.progress).report


def run_auto(
    task: AutoTask, progress: Progress, tell: Callable[[str], None], *, command: str = ""
) -> AutoReport:
    """Run `auto`; `tell` gets each decision when it is made."""
    _check_task(task)
    with (
        OutputFolder(task.out, owned=task.owned, force=task.force) as folder,
        open_run_model(
            task.model,
            task.placement,
            revision=task.revision,
            trust_remote_code=task.trust_remote_code,
            if_quantized=IF_QUANTIZED,
            recipe=(recipe := override_recipe("kv", data={}, scales={}, top={})),
        ) as model,
    ):
        if model.checkpoint.form:
            raise ModelError(
                f"{task.model} is quantized already: {model.checkpoint.form}",
                hint="name the unquantized model that it was made from",
            )
        calibration, held_out = _plan_texts(task, model)
        recipe = recipe.model_copy(
            update={"data": recipe.data.model_copy(update={"batch_size": task.batch_size})}
        )
        stats = run_calibration(model, recipe, calibration, progress)
        save_stats(stats, folder / STATS_NAME)
        measured = _Measured(
            task=task,
            model=model,
            stats=stats,
            held_out=held_out,
            options=_resolve(task, ()),
            progress=progress,
        )
        report = _decide(measured, folder, tell)
        report = report.model_copy(
            update={
                "data": calibration.sources,
                "calibration_tokens": calibration.num_tokens,
                "warnings": tuple(dict.fromkeys((*calibration.warnings, *report.warnings))),
                "command": command,
            }
        )
        (folder / REPORT_NAME).write_bytes(encode_json(report.model_dump(mode="json")))
    return report


def _check_task(task: AutoTask) -> None:
    """Refuse a gate or an engine that is unknown, before a model is read.

    Raises:
        UsageError: naming it.
    """
    if task.gate not in GATES:
        raise UsageError(f"--gate {task.gate}: must be {' or '.join(GATES)}")
    find_emulated(task.engine)
    find_replayed(task.engine)


def _resolve(task: AutoTask, scales: Sequence[str]) -> VerifyOptions:
    return resolve_options(
        scales,
        engine=task.engine,
        scheme=None,
        rules=(),
        sensitivity=False,
        fp8_dtype=E4M3FN.name,
        batch_size=task.batch_size,
        gate=None,
        tasks=(),
        limit=None,
    )


def _plan_texts(task: AutoTask, model: RunModel) -> tuple[DataPlan, DataPlan]:
    """Plan the text of the calibration and the one that is held out."""

    def plan(part: Literal["calibrate", "verify"]) -> DataPlan:
        return plan_text(
            model.source,
            specs=task.data,
            samples=task.samples,
            seq_len=task.seq_len,
            pack=task.pack,
            seed=0,
            part=part,
        )

    return (
        split_plan(plan("calibrate"), HELD_OUT)
        if task.data
        else (
            plan("calibrate"),
            plan("verify"),
        )
    )


# --- decisions ------------------------------------------------------------------------------------


def _decide(measured: _Measured, folder: Path, tell: Callable[[str], None]) -> AutoReport:
    """Measure the candidates, decide, and write what was decided."""
    refused = dict(_list_refused(measured)) if measured.task.gate == "w8a8" else {}
    found = measured.compare(lambda *both: list(_list_candidates(measured, *both)))
    decisions: list[Decision] = []

    def note(made: Sequence[Decision]) -> None:
        for decision in made:
            tell(f"{decision.question} {decision.answer}: {decision.why}")
        decisions.extend(made)

    def finish(**fields: Any) -> AutoReport:
        return _make_report(measured, found, decisions=tuple(decisions), **fields)

    kv = decide.choose_kv(found, list_unfit_queries(measured.stats))
    note(kv.decisions)
    if measured.task.gate == "kv":
        if kv.name is None:
            return finish(closest=kv.closest, is_unknown=kv.is_unknown)
        return finish(**_write(measured, folder, scheme=None, left=(), kv=kv))
    scheme = decide.choose_scheme(found, refused, measured.task.engine)
    left: tuple[int, ...] = ()
    fallback = decide.choose_fallback(found, refused)
    needs_layers = scheme.name is None or not decide.has_fp8_inputs(scheme.name)
    if needs_layers and fallback is not None and not scheme.is_unknown:
        chosen = _leave_layers(measured, fallback)
        if chosen is not None:
            left, decision = chosen
            scheme = Choice(name=fallback, decisions=(*scheme.decisions, decision))
    note(scheme.decisions)
    if scheme.name is None:
        return finish(closest=scheme.closest, is_unknown=scheme.is_unknown)
    return finish(**_write(measured, folder, scheme=scheme.name, left=left, kv=kv))


def _list_candidates(
    measured: _Measured, model: LoadedModel, target: Target
) -> Iterator[Candidate]:
    stats, numerics = measured.stats, measured.options.numerics
    queries = list_unfit_queries(stats)
    for name in (KV_SCALES, *((KV_AND_Q_SCALES,) if queries else ())):
        table = compute_kv_scales(stats, E4M3FN, query=name == KV_AND_Q_SCALES)
        yield build_kv_candidate(name, table, numerics, origin="statistics, amax")
    for name in SCHEMES if measured.task.gate == "w8a8" else ():
        yield _build_scheme(measured, name, name, (), model, target)


def _build_scheme(
    measured: _Measured,
    name: str,
    scheme: str,
    ignore: Sequence[str],
    model: LoadedModel,
    target: Target,
) -> Candidate:
    return build_scheme(
        name,
        find_scheme(scheme),
        target,
        model,
        measured.options.numerics,
        fmt=E4M3FN,
        stats=measured.stats,
        ignore=ignore,
    )


def _list_refused(measured: _Measured) -> Iterator[tuple[str, str]]:
    """List the schemes that the engine cannot load of this model, with the reason."""
    engine = find_replayed(measured.task.engine).key
    for name in SCHEMES:
        asked = resolve_plan(
            name,
            COMPRESSED_TENSORS.name,
            ignore=(),
            power_of_two_scales=False,
            shared_scales=True,
            is_calibrated=True,
        )
        try:
            with open_planned(
                str(measured.model.source.folder),
                asked,
                measured.stats,
                revision=None,
                dequantize=False,
                allow_unservable=True,
            ) as planned:
                require_servable(planned.plan, planned.checkpoint.folder, [engine])
        except ExportError as error:
            yield name, error.message.partition(f"{engine}: ")[2] or error.message


def _leave_layers(measured: _Measured, scheme: str) -> tuple[tuple[int, ...], Decision] | None:
    """Find the fewest layers without which a scheme passes."""
    names = _name_layers(measured.stats)
    found = measured.compare(
        lambda *both: [_build_scheme(measured, scheme, scheme, (), *both)], by_layer=True
    )
    assert found.sensitivity is not None  # noqa: S101 -- it was asked for
    ranked = [each.layer for each in found.sensitivity.layers if each.layer in names]
    most = int(len(measured.stats.geometry.layers) * _MOST_LEFT)
    counts = [count for count in _doubling(most) if count <= len(ranked)]
    if not counts:
        return None

    def make(model: LoadedModel, target: Target) -> list[Candidate]:
        patterns = {count: [names[layer] for layer in ranked[:count]] for count in counts}
        return [
            _build_scheme(measured, str(count), scheme, ignore, model, target)
            for count, ignore in patterns.items()
        ]

    return decide.choose_left_layers(measured.compare(make), scheme, ranked, counts)


def _doubling(most: int) -> Iterator[int]:
    count = 1
    while count <= most:
        yield count
        count *= 2


def _name_layers(stats: CalibrationStats) -> dict[int, str]:
    named = {layer.index: decide.name_layer_in_checkpoint(layer) for layer in stats.geometry.layers}
    return {index: name for index, name in named.items() if name is not None}


# --- writing --------------------------------------------------------------------------------------


def _write(
    measured: _Measured, folder: Path, *, scheme: str | None, left: tuple[int, ...], kv: Choice
) -> Mapping[str, Any]:
    """Write what was decided, verify and check it; give the fields of the report."""
    name = scheme or _OVERLAY
    ignore = [_name_layers(measured.stats)[layer] for layer in left]
    query = "yes" if kv.name == KV_AND_Q_SCALES else "no"
    model = str(measured.model.source.folder)
    if scheme is not None:
        stats = measured.stats if kv.name == KV_SCALES else _without_kv(measured.stats)
        quantize(model, scheme, folder / scheme, stats=stats, ignore=ignore)
    if scheme is None or kv.name == KV_AND_Q_SCALES:
        source = model if scheme is None else folder / scheme
        written = folder / "scales"
        export(measured.stats, _OVERLAY, written, model=source, query_scale=query)
        if scheme is not None:
            _remove(folder / scheme)
        (written / _OVERLAY).rename(folder / name)
        written.rmdir()
    verified = _verify_written(measured, folder / name)
    checked = dict(_check_written(measured.task, folder / name))
    is_served = checked[measured.task.engine].ok
    if not decide.passes(verified) or not is_served:
        _remove(folder / name)
        why = f"{verified.verdict} ({verified.verdict_why})"
        closest = f"{name} as written: {why if is_served else checked[measured.task.engine].why}"
        return {"closest": closest, "checked": checked, "verified": verified}
    return {
        "written": WrittenResult(
            name=name,
            scheme=scheme,
            has_kv_scales=kv.name is not None,
            has_query_scales=kv.name == KV_AND_Q_SCALES,
            unquantized_layers=left,
        ),
        "verified": verified,
        "checked": checked,
        "serve": _spell_serve(measured.task, name, has_kv=kv.name is not None),
    }


def _without_kv(stats: CalibrationStats) -> CalibrationStats:
    """Leave out K and V, so that a checkpoint gets no scales of them."""
    kept = {site: seen for site, seen in stats.sites.items() if site.role not in KV_ROLES}
    return replace(stats, sites=kept)


def _verify_written(measured: _Measured, path: Path) -> CandidateResult:
    text = VerificationText(specs=(), samples=0, seq_len=None, pack=True, planned=measured.held_out)
    job = open_verify_job(measured.model, _resolve(measured.task, [str(path)]), text)
    verified = run_verify_job(job, choose_verification_mode(job), measured.progress)
    return verified.report.candidates[0].model_copy(update={"name": path.name})


def _check_written(task: AutoTask, path: Path) -> Iterator[tuple[str, Checked]]:
    """Replay the engine that was asked for, and those that `check` asks by itself."""
    asked = dict.fromkeys([task.engine, *list_defaults()])
    report = check(path, engine=list(asked))
    for name, key in zip(asked, report.engines, strict=True):
        found = report.engines[key]
        yield name, Checked(version=report.versions[key], ok=found.ok, why=find_load_fault(found))


def _spell_serve(task: AutoTask, name: str, *, has_kv: bool) -> str:
    """Spell the command that serves what was written; empty where the engine has none."""
    engine = find_replayed(task.engine)
    return "" if engine.launch is None else engine.launch.spell(str(task.out / name), has_kv=has_kv)


def _make_report(
    measured: _Measured, found: VerifyReport, *, decisions: tuple[Decision, ...], **fields: Any
) -> AutoReport:
    task = measured.task
    return AutoReport(
        model=task.model,
        out=str(task.out),
        gate=task.gate,
        engine=task.engine,
        engine_version=found.engine_version,
        dtype=found.dtype,
        device=found.device,
        seq_len=found.seq_len,
        tokens=found.tokens,
        sequences=found.sequences,
        reference=found.reference,
        candidates=found.candidates,
        decisions=decisions,
        provenance=found.provenance,
        warnings=found.warnings,
        **fields,
    )


def _remove(folder: Path) -> None:
    shutil.rmtree(folder)
