"""Measure a model, decide from the figures, write, verify and check: one call for all of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from fp8calib.checkpoint.atomic import check_output_file, write_file_atomic
from fp8calib.checkpoint.json_files import encode_json, load_json_object
from fp8calib.checkpoint.resumable_folder import ResumableFolder
from fp8calib.commands.auto_writing import write_combination
from fp8calib.engines.facts.gpus import find_gpu
from fp8calib.engines.registry import (
    find_emulated,
    find_replayed,
    list_emulated_and_replayed,
)
from fp8calib.errors import ModelError, UsageError, format_count
from fp8calib.fp8.schemes import CONSIDERED, SCHEMES
from fp8calib.jobs.auto import decide
from fp8calib.jobs.auto.decide import Combination, KvChoice
from fp8calib.jobs.auto.measure import (
    OVERLAY,
    Measured,
    find_unused_kv,
    list_candidates,
    list_considered,
    list_refused,
    list_text_scaled,
    require_usable,
)
from fp8calib.jobs.auto.partial import count_left_passes, plan_left
from fp8calib.jobs.calibration import (
    choose_mode,
    open_unquantized,
    run_calibration,
)
from fp8calib.jobs.function import as_function
from fp8calib.jobs.planning.opened import OpenedPlan, describe_opened
from fp8calib.jobs.planning.runs import MEASURED_NAME
from fp8calib.jobs.receipt.make import encode_receipt, make_receipt
from fp8calib.jobs.recipe_options import open_recipe
from fp8calib.jobs.reporter import Reporter
from fp8calib.jobs.stats import drop_kv
from fp8calib.jobs.text import plan_texts, warn_of_few
from fp8calib.jobs.verification.options import require_known
from fp8calib.machine.command_line import spell_command
from fp8calib.model.load import find_folder
from fp8calib.requests.auto import AutoRequest
from fp8calib.requests.plan import PlanRequest
from fp8calib.requests.verify import VerifyRequest
from fp8calib.results.auto import AnsweredQuestion, AutoResult, Outcome
from fp8calib.results.run_plan import RunPlan
from fp8calib.scales.compute import list_unfit_queries
from fp8calib.stats.calibration_stats import (
    REPORT_NAME,
    STATS_NAME,
    CalibrationStats,
    load_stats,
    save_stats,
)
from fp8calib.verification.judge import gates
from fp8calib.verification.judge.decide import explain_broken
from fp8calib.verification.report import CandidateResult, VerifyReport

_TAG = "fp8calib auto"
"""Marks the folder of a run that was killed, which the next one replaces."""
GATES = ("w8a8", "kv")
_OWNED = frozenset({STATS_NAME, REPORT_NAME, MEASURED_NAME, OVERLAY, *SCHEMES})
"""Names of what may be in the output folder."""


def run(request: AutoRequest, reporter: Reporter) -> AutoResult | RunPlan:
    """Measure, decide, write, verify and check.

    The output folder gets the statistics, `report.json` with every decision, and the checkpoint,
    if it passes.

    Raises:
        UsageError: an option is invalid, or the folder is in use.
        ModelError: the model cannot be read or run, or its weights cannot be quantized (`w8a8`).
        DataError: the data cannot be read, or is one sequence.
        CalibrationError: a forward pass failed.
        ExportError: the output cannot be written.
        VerificationError: the engine can load no scheme, or uses no KV scales of this model.
    """
    out = request.out or f"{Path(request.model).resolve().name}-fp8"
    task = replace(request, model=str(request.model), out=Path(out))
    if request.dry_run:
        return _plan(task)
    if request.resume and not request.force and (_find_out(task) / REPORT_NAME).exists():
        finished = _read_finished(task)
        reporter.say(f"{out} is finished already")
        _write_receipt(task, finished, reporter)
        return finished
    with (
        _open_auto(task) as opened,
        ResumableFolder(
            _find_out(task),
            owned=_OWNED,
            force=task.force,
            tag=_spell_tag(opened),
            resume=task.resume,
        ) as folder,
    ):
        stats = _calibrate(task, opened, folder, reporter)
        measured = Measured(task=task, opened=opened, stats=stats, reporter=reporter)
        report = _decide(measured, folder)
        (folder / MEASURED_NAME).unlink(missing_ok=True)
        texts = (*opened.calibration.warnings, *warn_of_few(report.tokens), *report.warnings)
        report = report.model_copy(
            update={
                "data": opened.calibration.sources,
                "calibration_tokens": opened.calibration.num_tokens,
                "warnings": tuple(dict.fromkeys(texts)),
                "command": spell_command(),
            }
        )
        (folder / REPORT_NAME).write_bytes(encode_json(report.to_json()))
    for text in report.warnings:
        reporter.warn(text)
    _write_receipt(task, report, reporter)
    return report


def _write_receipt(task: AutoRequest, report: AutoResult, reporter: Reporter) -> None:
    """Write the receipt of what was written, if it is asked for.

    Raises:
        ExportError: the file cannot be written.
    """
    if task.receipt is None:
        return
    if report.written is None or report.verified is None:
        reporter.warn("no receipt: nothing passed, so nothing is written")
        return
    place = str(_find_out(task) / report.written.name)
    request = VerifyRequest(
        task.model,
        [place],
        task.data,
        text_column=task.text_column,
        engine=task.engine,
        gpu=task.gpu,
        samples=task.samples,
        seq_len=task.seq_len,
        batch_size=task.batch_size,
        pack=task.pack,
        kv_cache_dtype_skip_layers=report.written.unquantized_layers,
    )
    row = report.verified.model_copy(update={"name": place})
    folder = find_folder(str(task.model), task.revision)
    reporter.say("hashing the files for the receipt")
    receipt = make_receipt(report, [row], request, folder, part="auto")
    write_file_atomic(Path(task.receipt), encode_receipt(receipt))
    reporter.say(f"receipt written to {task.receipt}")


def _find_out(task: AutoRequest) -> Path:
    """Give the output folder, which `run` has set."""
    assert task.out is not None  # noqa: S101
    return Path(task.out)


def _read_finished(task: AutoRequest) -> AutoResult:
    """Read the result of a run that ended, which has its exit code too.

    Raises:
        UsageError: it is of another model, engine or gate, or cannot be read.
    """
    path = _find_out(task) / REPORT_NAME
    try:
        finished = AutoResult.from_json(load_json_object(path))
    except (ModelError, ValidationError):
        finished = None
    asked = (task.model, task.engine, task.gate, task.gpu or "")
    if finished is None or asked != (finished.model, finished.engine, finished.gate, finished.gpu):
        raise UsageError(
            f"{path.parent} is finished already, by another run",
            hint="use --force instead of --resume to replace it, or another --out",
        )
    return finished


def _plan(task: AutoRequest) -> RunPlan:
    """Plan a run without running text.

    Raises:
        UsageError, ModelError, DataError, VerificationError: as `auto`, before text is run.
    """
    with _open_auto(task) as opened:
        model, held_out = opened.model, opened.held_out.num_tokens
        mode = choose_mode(
            model, opened.recipe, opened.calibration, scratch=Path.cwd(), expects_duration=True
        )
        pass_s = None if mode.plan is None else mode.plan.expected_s
        candidates = 1 + len(list_considered(task))
        compared, read_back = _NUM_BESIDE + candidates, _NUM_BESIDE + 1
        tokens, steps = opened.calibration.num_tokens, _count_steps(task)
        left = _count_left_tokens(task, opened)
        return RunPlan(
            plan={
                "model": task.model,
                "engine": task.engine,
                "gate": task.gate,
                "dtype": model.dtype,
                "device": model.device,
                "steps": [
                    f"1 of {steps}: calibrate on {tokens:,} tokens",
                    f"2 of {steps}: compare {format_count(candidates, 'candidate')} on "
                    f"{held_out:,} tokens",
                    f"3 of {steps}: write the best, as {task.out}",
                    f"4 of {steps}: read it back, verify and check it; if it does not pass as a "
                    "whole, write the next best",
                    *(
                        [f"5 of {steps}: if {_UNLESS[task.gate]}, {_describe_left(task)}"]
                        if left
                        else []
                    ),
                ],
                "data": list(opened.calibration.sources),
                "out": str(task.out),
                **mode.as_json(),
                "expected_s": None
                if pass_s is None
                else pass_s * (1 + (compared + read_back) * held_out / max(tokens, 1)),
                "expected_layers_s": None
                if pass_s is None or not left
                else pass_s * left / max(tokens, 1),
            }
        )


def _count_left_tokens(task: AutoRequest, opened: OpenedPlan) -> float:
    """Count the tokens that are run to plan, and to read the result back."""
    if not _can_leave_layers(task):
        return 0
    schemes = list(filter(decide.has_fp8_inputs, list_considered(task)))
    searched = opened.search.num_tokens * count_left_passes(opened, schemes)
    return searched + opened.held_out.num_tokens * (_NUM_BESIDE + 1)


_UNLESS = {"w8a8": "no scheme with FP8 inputs passes", "kv": "it does not pass"}
_NUM_BESIDE = 2
"""What each comparison runs beside its candidates: the unquantized model and scale 1.0."""


@contextmanager
def _open_auto(task: AutoRequest) -> Iterator[OpenedPlan]:
    """Open the model and its texts, as for a plan that mixes what does not pass whole."""
    _check_task(task)
    with open_unquantized(task, open_recipe("kv")) as model:
        require_usable(task, model)
        request = PlanRequest(
            task.model,
            max_ratio=gates.GATES[task.gate].pass_at,
            engine=task.engine,
            gpu=task.gpu,
            points=0,
            batch_size=task.batch_size,
        )
        yield describe_opened(request, model, *plan_texts(task, model.source))


def _spell_tag(opened: OpenedPlan) -> str:
    """Spell what two runs have in common that calibrate the same."""
    texts = (opened.calibration.fingerprint, opened.held_out.fingerprint)
    parts = (opened.target.fingerprint, *texts, opened.model.dtype)
    return " ".join([_TAG, *parts, str(opened.request.batch_size)])


def _calibrate(
    task: AutoRequest, opened: OpenedPlan, folder: Path, reporter: Reporter
) -> CalibrationStats:
    """Calibrate, or take the statistics of the run that is resumed; remove what it wrote after."""
    for name in (OVERLAY, "scales", *SCHEMES):
        shutil.rmtree(folder / name, ignore_errors=True)
    path, steps = folder / STATS_NAME, _count_steps(task)
    if path.exists():
        reporter.say(f"step 1 of {steps}: calibrated before the interruption")
        return load_stats(path)
    reporter.say(f"step 1 of {steps}: calibrate on {opened.calibration.num_tokens:,} tokens")
    stats = run_calibration(opened.model, opened.recipe, opened.calibration, reporter)
    save_stats(stats, path)
    return stats


def _check_task(task: AutoRequest) -> None:
    """Refuse unknown gates and engines, one sample and unprintable paths, before a model is read.

    Raises:
        UsageError: naming it.
    """
    if task.gate not in GATES:
        raise UsageError(f"--gate {task.gate}: must be {' or '.join(GATES)}")
    if task.mxfp8 and task.gate == "kv":
        raise UsageError("--mxfp8 --gate kv: MXFP8 is for weights", hint="drop one of them")
    known = list_emulated_and_replayed()
    if task.engine.partition("==")[0] not in known:
        raise UsageError(
            f"--engine {task.engine}: auto needs one whose loading and arithmetic are both known",
            hint=f"choose one of {', '.join(known)}",
        )
    if task.receipt is not None:
        check_output_file(Path(task.receipt), force=task.force)
    engine, _ = find_emulated(task.engine)
    find_replayed(task.engine)
    if task.gpu is not None:
        require_known(find_gpu(task.gpu), engine)
    if task.samples < 2:
        hint = "some are held out from calibration: use 2 or more"
        raise UsageError(f"--samples {task.samples}: auto needs two sequences", hint=hint)
    if not str(_find_out(task).absolute()).isprintable():
        raise UsageError(f"--out {str(task.out)!r}: must be a path of printable characters")


def _decide(measured: Measured, folder: Path) -> AutoResult:
    """Measure the candidates, decide, and write the first combination that passes as a whole."""
    task, model, reporter = measured.task, measured.opened.model, measured.reporter
    unused = find_unused_kv(task, model)
    stats = drop_kv(measured.stats) if unused else measured.stats
    schemes = list_considered(task)
    refused = dict(list_refused(task, model, stats, schemes))
    # a scheme of MXFP8 that is refused may have no blocks to emulate
    compared = [each for each in schemes if each in CONSIDERED or each not in refused]
    steps = _count_steps(task)
    reporter.say(
        f"step 2 of {steps}: compare candidates on {measured.opened.held_out.num_tokens:,} tokens"
    )
    found = measured.compare(
        lambda *both: list(list_candidates(measured, *both, schemes=compared)),
        make_text_scaled=lambda *both: list_text_scaled(measured, *both, schemes=compared),
        with_types=task.gpu is not None,
        with_noise=task.receipt is not None,
    )
    decisions: list[AnsweredQuestion] = []

    def note(*made: AnsweredQuestion) -> None:
        for decision in made:
            reporter.say(f"{decision.question} {decision.answer}")
        decisions.extend(made)

    kv = decide.choose_kv(found, list_unfit_queries(measured.stats), unused)
    note(*kv.decisions, *decide.list_media(found))
    if kv.left_out is not None and task.gate == "w8a8":
        note(kv.left_out)
    if task.gpu is not None:
        note(decide.describe_cache_type(found))
    ranked = decide.rank_schemes(found, refused)
    tried: list[Outcome] = []
    for choice in _list_choices(measured, found, refused, ranked, kv, note, folder):
        reporter.say(f"step 3 of {steps}: write {choice}")
        outcome = write_combination(measured, folder, choice)
        tried.append(outcome)
        last = outcome.tried[0]
        reporter.say(f"step 4 of {steps}: read back: {last.verdict} ({last.why})")
        if outcome.written is not None:
            break
    written = tried[-1].written if tried else None
    if kv.left_out is not None and task.gate == "kv" and written is None:
        note(kv.left_out)
    if written is not None and written.has_kv_scales:
        decisions[0] = decide.explain_written(decisions[0])
    if task.gate == "w8a8":
        note(_describe_scheme(found, refused, ranked, tried))
    return _make_report(measured, found, tuple(decisions), _join(tried, found, refused, kv, task))


def _list_choices(
    measured: Measured,
    found: VerifyReport,
    refused: Mapping[str, str],
    ranked: Sequence[CandidateResult],
    kv: KvChoice,
    note: Callable[[AnsweredQuestion], None],
    folder: Path,
) -> Iterator[Combination]:
    """List what to write: schemes with FP8 inputs, whole or as planned, then the others.

    Of the KV cache alone: each kind of scales, then those of fewer layers. Plans are made only when
    what came before did not pass.
    """
    gate = measured.task.gate
    multiplying = [each for each in ranked if decide.has_fp8_inputs(each.name)]
    yield from decide.list_combinations(multiplying, kv, gate)
    fallbacks = [] if gate == "kv" else decide.list_fallbacks(found, refused)
    is_unknown = kv.is_unknown if gate == "kv" else decide.find_closest(found, refused)[1]
    is_possible = bool(fallbacks) or (gate == "kv" and _can_leave_layers(measured.task))
    if is_possible and not is_unknown:
        steps = _count_steps(measured.task)
        measured.reporter.say(f"step {steps} of {steps}: {_describe_left(measured.task)}")
        for planned, decision in plan_left(measured, fallbacks, folder):
            note(decision)
            if gate == "kv":
                yield Combination(scheme=None, kv=kv.wanted, left=planned.plain_caches)
            elif planned.quantize is not None:
                scheme = planned.quantize.scheme
                for cache in dict.fromkeys((kv.name, None)):
                    yield Combination(scheme=scheme, kv=cache, planned=planned.quantize)
    if gate == "w8a8":
        others = [each for each in ranked if each not in multiplying]
        yield from decide.list_combinations(others, kv, gate)


def _can_leave_layers(task: AutoRequest) -> bool:
    """Whether layers can stay in 16 bits: of the KV cache alone, if the engine has an option."""
    return task.gate == "w8a8" or bool(find_emulated(task.engine)[1].kv_skip_flag)


def _count_steps(task: AutoRequest) -> int:
    return 4 + _can_leave_layers(task)


def _describe_left(task: AutoRequest) -> str:
    what = "the KV cache of the most sensitive layers" if task.gate == "kv" else "sensitive linears"
    return f"plan to leave {what} in 16 bits"


def _describe_scheme(
    found: VerifyReport,
    refused: Mapping[str, str],
    ranked: Sequence[CandidateResult],
    tried: Sequence[Outcome],
) -> AnsweredQuestion:
    written = tried[-1].written if tried else None
    answer = "none" if written is None or written.scheme is None else written.scheme
    reasons = [decide.describe_schemes(found, refused)]
    if answer != "none" and not decide.has_fp8_inputs(answer):
        reasons.insert(0, "no scheme with FP8 inputs passes, so products stay in 16 bits")
    elif answer != "none" and ranked and not decide.has_fp8_inputs(ranked[-1].name):
        reasons.insert(0, "schemes with FP8 inputs come first, as only these multiply in FP8")
    failed = [f"{each.tried[0].name} ({each.tried[0].verdict})" for each in tried[:-1]]
    if failed:
        reasons.insert(0, f"tried before, and not passing as a whole: {'; '.join(failed)}")
    question = "which scheme is written?"
    return AnsweredQuestion(question=question, answer=answer, why="; ".join(reasons))


def _join(
    tried: Sequence[Outcome],
    found: VerifyReport,
    refused: Mapping[str, str],
    kv: KvChoice,
    task: AutoRequest,
) -> Outcome:
    """Join the attempts to what `auto` answers: the last one, or why there is none."""
    attempts = tuple(each for outcome in tried for each in outcome.tried)
    if tried and tried[-1].written is not None:
        return tried[-1].model_copy(update={"tried": attempts})
    if tried:
        # Of attempts that failed, the first is the most useful one.
        is_unknown = all(outcome.is_unknown for outcome in tried)
        return tried[0].model_copy(update={"tried": attempts, "is_unknown": is_unknown})
    if task.gate == "kv":
        return Outcome(closest=kv.closest, is_unknown=kv.is_unknown)
    closest, is_unknown = decide.find_closest(found, refused)
    return Outcome(closest=closest, is_unknown=is_unknown)


def _make_report(
    measured: Measured,
    found: VerifyReport,
    decisions: tuple[AnsweredQuestion, ...],
    outcome: Outcome,
) -> AutoResult:
    task = measured.task
    return AutoResult(
        model=str(task.model),
        out=str(task.out),
        gate=task.gate,
        engine=task.engine,
        engine_version=found.engine_version,
        gpu=task.gpu or "",
        dtype=found.dtype,
        device=found.device,
        noise=found.noise,
        seq_len=found.seq_len,
        tokens=found.tokens,
        sequences=found.sequences,
        reference=found.reference,
        candidates=found.candidates,
        decisions=decisions,
        provenance=found.provenance,
        broken=explain_broken(
            found.reference.ppl, int(measured.opened.model.source.text_config.vocab_size)
        ),
        warnings=found.warnings,
        **dict(outcome),
    )


auto = as_function("auto", AutoRequest, run)
