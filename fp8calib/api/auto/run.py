"""Measure a model, decide from the figures, write, verify and check: one call for all of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from fp8calib.api.arguments import checked
from fp8calib.api.auto import decide
from fp8calib.api.auto.decide import Choice
from fp8calib.api.auto.measure import (
    AutoTask,
    Measured,
    drop_kv,
    find_unused_kv,
    leave_layers,
    list_candidates,
    list_refused,
    plan_texts,
    require_usable,
    warn_of_few,
)
from fp8calib.api.auto.report import AutoReport, Decision, Outcome
from fp8calib.api.auto.writing import write_choice
from fp8calib.api.calibrate import IF_QUANTIZED, run_calibration
from fp8calib.api.models import Placement, open_run_model
from fp8calib.api.progress import CallbackProgress, ProgressCallback, warn_each
from fp8calib.api.recipe_options import override_recipe
from fp8calib.calibration import Progress
from fp8calib.checkpoint.json_files import encode_json
from fp8calib.checkpoint.resumable_folder import ResumableFolder
from fp8calib.engines.registry import (
    find_emulated,
    find_replayed,
    list_emulated_and_replayed,
)
from fp8calib.errors import ModelError, UsageError
from fp8calib.fp8.schemes import SCHEMES
from fp8calib.scales.compute import list_unfit_queries
from fp8calib.stats.calibration_stats import REPORT_NAME, STATS_NAME, save_stats
from fp8calib.verification.report import VerifyReport

_TAG = "fp8calib auto"
"""Marks the folder of a run that was killed, which the next one replaces."""
GATES = ("w8a8", "kv")


@checked
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
        ModelError: the model cannot be read or run, or its weights cannot be quantized (`w8a8`).
        DataError: the data cannot be read, or is one sequence.
        CalibrationError: a forward pass failed.
        ExportError: the output cannot be written.
        VerificationError: the engine can load no scheme, or uses no KV scales of this model.
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


def run_auto(
    task: AutoTask, progress: Progress, tell: Callable[[str], None], *, command: str = ""
) -> AutoReport:
    """Run `auto`; `tell` gets each decision when it is made."""
    _check_task(task)
    with (
        ResumableFolder(
            task.out, owned=task.owned, force=task.force, tag=_TAG, resume=False, kept_after=()
        ) as folder,
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
        require_usable(task, model)
        calibration, held_out = plan_texts(task, model)
        recipe = recipe.model_copy(
            update={"data": recipe.data.model_copy(update={"batch_size": task.batch_size})}
        )
        stats = run_calibration(model, recipe, calibration, progress)
        save_stats(stats, folder / STATS_NAME)
        measured = Measured(
            task=task,
            model=model,
            stats=stats,
            held_out=held_out,
            progress=progress,
        )
        report = _decide(measured, folder, tell)
        report = report.model_copy(
            update={
                "data": calibration.sources,
                "calibration_tokens": calibration.num_tokens,
                "warnings": tuple(
                    dict.fromkeys(
                        (*calibration.warnings, *warn_of_few(report.tokens), *report.warnings)
                    )
                ),
                "command": command,
            }
        )
        (folder / REPORT_NAME).write_bytes(encode_json(report.to_json()))
    return report


def _check_task(task: AutoTask) -> None:
    """Refuse unknown gates and engines, one sample and unprintable paths, before a model is read.

    Raises:
        UsageError: naming it.
    """
    if task.gate not in GATES:
        raise UsageError(f"--gate {task.gate}: must be {' or '.join(GATES)}")
    known = list_emulated_and_replayed()
    if task.engine.partition("==")[0] not in known:
        raise UsageError(
            f"--engine {task.engine}: auto needs one whose loading and arithmetic are both known",
            hint=f"choose one of {', '.join(known)}",
        )
    find_emulated(task.engine)
    find_replayed(task.engine)
    if task.samples < 2:
        hint = "some are held out from calibration: use 2 or more"
        raise UsageError(f"--samples {task.samples}: auto needs two sequences", hint=hint)
    if not str(task.out.absolute()).isprintable():
        raise UsageError(f"--out {str(task.out)!r}: must be a path of printable characters")


def _decide(measured: Measured, folder: Path, tell: Callable[[str], None]) -> AutoReport:
    """Measure the candidates, decide, and write what was decided."""
    task, model = measured.task, measured.model
    unused = find_unused_kv(task, model)
    stats = drop_kv(measured.stats) if unused else measured.stats
    refused = dict(list_refused(task, model, stats, SCHEMES)) if task.gate == "w8a8" else {}
    found = measured.compare(lambda *both: list(list_candidates(measured, *both)))
    decisions: list[Decision] = []

    def note(made: Sequence[Decision]) -> None:
        for decision in made:
            tell(f"{decision.question} {decision.answer}")
        decisions.extend(made)

    def finish(outcome: Outcome) -> AutoReport:
        return _make_report(measured, found, tuple(decisions), outcome)

    kv = decide.choose_kv(found, list_unfit_queries(measured.stats), unused)
    note(kv.decisions)
    if task.gate == "kv":
        if kv.name is None:
            return finish(Outcome(closest=kv.closest, is_unknown=kv.is_unknown))
        return finish(write_choice(measured, folder, scheme=None, left=(), kv=kv))
    scheme = decide.choose_scheme(found, refused)
    left: tuple[int, ...] = ()
    fallback = decide.choose_fallback(found, refused)
    needs_layers = scheme.name is None or not decide.has_fp8_inputs(scheme.name)
    if needs_layers and fallback is not None and not scheme.is_unknown:
        chosen = leave_layers(measured, fallback)
        if chosen is not None:
            left, decision = chosen
            scheme = Choice(name=fallback, decisions=(*scheme.decisions, decision))
    note(scheme.decisions)
    if scheme.name is None:
        return finish(Outcome(closest=scheme.closest, is_unknown=scheme.is_unknown))
    return finish(write_choice(measured, folder, scheme=scheme.name, left=left, kv=kv))


def _make_report(
    measured: Measured, found: VerifyReport, decisions: tuple[Decision, ...], outcome: Outcome
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
        **dict(outcome),
    )
