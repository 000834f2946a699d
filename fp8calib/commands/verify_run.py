"""Compare a model, on a path or in memory, with its FP8 emulation on the same text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from platform import python_version
from typing import Any

import torch
from pydantic import BaseModel

from fp8calib.calibration.calibration_stats import RunStats
from fp8calib.calibration.fingerprint import fingerprint_model, versions
from fp8calib.calibration.job import RunModel
from fp8calib.calibration.memory_plan import MemoryPlan
from fp8calib.checkpoint.header import read_header
from fp8calib.checkpoint.output import check_output_file
from fp8calib.checkpoint.tensor_file import save_tensors
from fp8calib.commands.command_line import spell_command
from fp8calib.commands.hashes import hash_run
from fp8calib.commands.model import describe_run, open_run_model, plan_text, read_settings
from fp8calib.commands.options import SKIP_LAYERS, Stats
from fp8calib.commands.request import Reporter, as_function
from fp8calib.commands.result import Result, RunPlan
from fp8calib.commands.suggest import suggest_command
from fp8calib.commands.verify import VerifyRequest
from fp8calib.data.rows import ReadRow
from fp8calib.data.sequences import DataPlan
from fp8calib.data.sources import split_data
from fp8calib.engines.arithmetic import SPARSE_LATENTS
from fp8calib.engines.registry import REFERENCE, find_emulated
from fp8calib.errors import (
    CANNOT_TELL,
    ModelError,
    UsageError,
    VerificationError,
    fit_line,
    format_count,
)
from fp8calib.machine import PeakMemory
from fp8calib.model.geometry import Role
from fp8calib.model.load import load_tokenizer
from fp8calib.numerics.formats import E4M3FN, FP8_FORMATS
from fp8calib.numerics.rules import parse_rule
from fp8calib.numerics.schemes import find_scheme
from fp8calib.text import Answer, Block, Line
from fp8calib.verification.candidates import Target
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.judge.fits import list_unfit
from fp8calib.verification.judge.gates import GATES, Gate, load_gate
from fp8calib.verification.open_candidates import (
    Scales,
    find_candidate,
    judge_loading,
    make_candidates,
    make_rules,
    require_head,
)
from fp8calib.verification.report import SCALE_ONE, RunProvenance, Verdict, VerifyReport
from fp8calib.verification.score import Scores
from fp8calib.verification.tables import (
    candidates_table,
    describe_pair,
    join_readers,
    list_shown_pairs,
    rules_table,
    sites_table,
)
from fp8calib.verification.verify import (
    Verification,
    open_scored,
    plan_verification,
    run_verification,
)

_RESERVED_NAMES = frozenset({"reference", SCALE_ONE, "server", "__metadata__"})
"""Names in the file of --dump; a plug-in adds the server."""
_SETTINGS = (
    *("engine", "scheme", "rules", "fp8_dtype", "kv_cache_dtype_skip_layers"),
    *("samples", "seq_len", "batch_size", "pack", "text_column"),
)


class VerifyResult(VerifyReport, Result):
    """The report of a verification, and the command that it asks for."""

    next: str = ""
    """The command that helps most; empty where none does."""
    gates: tuple[Gate, ...] = ()
    """The thresholds of the candidates' gates."""
    hashes: dict[str, Any] | None = None
    """None where only a server and an unquantized one or a dump are compared."""

    @property
    def fault(self) -> tuple[int, str]:
        """The exit code of a gate, and why with the candidates that it is about; 0 if all pass.

        Without any candidate that was asked for, scale 1.0 is judged. A warning is a failure where
        the gate is strict; so is a verdict that cannot be given, with a code of its own.
        """
        asked = [each for each in self.candidates if each.name != SCALE_ONE] or self.candidates
        failing = {Verdict.FAIL, Verdict.WARN} if self.is_strict else {Verdict.FAIL}
        found = {
            "refused": [each.name for each in self.refused],
            "the engine cannot use it": [e.name for e in asked if e.name in self.unusable],
            "the gate fails": [each.name for each in asked if each.verdict in failing],
        }
        if self.refused and not self.has_gate:
            del found["the gate fails"]
        if why := "; ".join(f"{why}: {', '.join(each)}" for why, each in found.items() if each):
            return VerificationError.exit_code, why
        unknown = [each.name for each in asked if each.verdict is Verdict.CANNOT_TELL]
        return (CANNOT_TELL, f"the gate cannot tell: {', '.join(unknown)}") if unknown else (0, "")

    @property
    def answer(self) -> str:
        """What to serve or to do next."""
        return self.decision.headline

    @property
    def passed(self) -> bool:
        """Whether all candidates that were asked for pass, and the engine can use them."""
        return not self.fault[0]

    @property
    def exit_code(self) -> int:
        """8 if a candidate is refused, or fails the gate; 9 where the gate cannot tell; else 0."""
        return self.fault[0] if self.has_gate or self.refused else 0


def run(
    request: VerifyRequest,
    reporter: Reporter,
    make_more: Callable[[Verification], Sequence[Candidate]] | None = None,
) -> VerifyResult | RunPlan:
    """Verify a model, and write the files that are asked for.

    `make_more` makes further candidates, for a plug-in.

    A model in memory keeps its parameters, hooks, caches and modes. Where a candidate quantizes
    weights, they are replaced while it runs, and copied before that to the memory of the host.

    Raises:
        UsageError: an option is invalid.
        ModelError: the model or a candidate cannot be read, or do not belong together.
        DataError: the data cannot be read.
        CalibrationError: a forward pass failed.
        VerificationError: a model gives NaN or infinity.
        ExportError: a file cannot be written.
    """
    check_request(request)
    specs, rows = split_data(request.data, text_column=request.text_column)
    with open_run_model(request) as model:
        asked = open_verification(request, model, specs, rows)
        if make_more is not None:
            asked = replace(asked, candidates=(*make_more(asked), *asked.candidates))
        for note in asked.warnings:
            reporter.warn(note)
        output = Path(request.dump or request.report or "none").absolute()
        mode = plan_verification(asked, output.parent, may_share=True)
        if request.dry_run:
            return describe_plan(asked, mode)
        for note in (*mode.describe(), model.describe()):
            reporter.say(note)
        asked = replace(asked, shares_batch=mode.models_in_a_batch > 1)
        with PeakMemory() as peak, open_scored(asked, mode, reporter) as scored:
            done, report, scores = run_verification(asked, scored, reporter)
    report = complete_report(done, report, scores, request, model, mode, peak, specs)
    for note in report.warnings:
        reporter.warn(note)
    logprobs = {"reference": scores.reference.logprobs}
    logprobs |= {each.name: scores.candidates[each.name].logprobs for each in done.candidates}
    return finish(request, asked, report, logprobs, reporter)


# --- before the run -------------------------------------------------------------------------------


def check_request(request: VerifyRequest) -> None:
    """Check the options that need no model; refuse outputs that would replace other files."""
    outputs = [] if request.dump is None else [(Path(request.dump), _is_dump)]
    if request.report is not None:
        from fp8calib.verification.page.page import is_page

        outputs.insert(0, (Path(request.report), is_page))
    for path, is_ours in outputs:
        check_output_file(path)
        if path.exists() and path.stat().st_size and not is_ours(path):
            raise UsageError(f"{path}: not written by verify", hint="name another file")
        check_output_file(path, force=request.force)
    if len({path.resolve() for path, _ in outputs}) < len(outputs):
        raise UsageError(f"--report and --dump are both {outputs[0][0]}")
    if request.gate is not None:
        load_gate(request.gate)
    for name in _list_paths(request):
        if name in _RESERVED_NAMES:
            raise UsageError(f"--scales {name}: this name is reserved", hint=f"write ./{name}")
        find_candidate(name)
    if request.scheme is not None:
        find_scheme(request.scheme)
        return
    engine, _ = find_emulated(request.engine)
    if request.kv_cache_dtype_skip_layers and not (engine is REFERENCE or engine.skip_flag):
        raise UsageError(
            f"{SKIP_LAYERS}: {engine.release} quantizes the KV cache of all layers or of none",
            hint="use --engine vllm, or reference",
        )


def _is_dump(path: Path) -> bool:
    """Whether a file is one that --dump wrote."""
    try:
        tensors, metadata = read_header(path)
    except ModelError:
        return False
    return "reference" in tensors and "data" in metadata


def _list_scales(scales: Stats | Iterable[Stats]) -> tuple[Scales, ...]:
    """List the candidates; a single one may be given without a list."""
    is_list = isinstance(scales, Iterable) and not isinstance(scales, str | BaseModel)
    given: Any = scales if is_list else [scales]
    named: dict[str | int, Scales] = {}  # the same twice is compared once
    for item in given:
        each = getattr(item, "stats", item)  # of the result of `calibrate`
        key = id(each) if isinstance(each, RunStats) else str(Path(each).absolute())
        named.setdefault(key, each)
    return tuple(named.values())


def _list_paths(request: VerifyRequest) -> list[str]:
    """List the candidates that are files or folders."""
    return [str(each) for each in _list_scales(request.scales) if isinstance(each, str | Path)]


def open_verification(
    request: VerifyRequest,
    model: RunModel,
    specs: Sequence[str],
    rows: Iterable[ReadRow] | None,
    change_text: Callable[[DataPlan], DataPlan] = lambda text: text,
) -> Verification:
    """Read the candidates, and refuse what cannot be emulated before a weight is loaded.

    One that cannot be read or emulated is left out while another is left. The text is read after
    the candidates, which take less time; a plug-in may change it.
    """
    require_head(model)
    engine, numerics = find_emulated(request.engine)
    fmt, scheme = FP8_FORMATS[request.fp8_dtype], request.scheme
    geometry = model.prepared.geometry
    target = Target(
        prepared=model.prepared,
        fingerprint=fingerprint_model(model.source.raw_config, model.checkpoint.stored),
        numerics=numerics,
        fmt=fmt,
        plain_caches=request.kv_cache_dtype_skip_layers or (),
    )
    # they compare scales of the KV cache
    rules = [] if scheme else list(dict.fromkeys(map(parse_rule, request.rules or ())))
    scales = _list_scales(request.scales)
    opened, candidates, refused = make_candidates(target, scales, scheme)
    text = plan_text(
        *(model.source, read_settings(request, specs)),
        rows=rows,
        part="verify",
        tokenizer=request.tokenizer,
        few="the figures are imprecise",
    )
    plan = change_text(text)
    unusable, loading = judge_loading(engine, model, opened, scheme)
    tiles = []
    has_tiles = geometry.model_type in SPARSE_LATENTS and fmt is E4M3FN and scheme is None
    if has_tiles and (where := numerics.kv_sparse_in_tiles):
        tiles = [
            f"{engine.release} stores FP8 latents of sparse attention in tiles {where}: the scales "
            f"of {SCALE_ONE} and of files are not used there; `fp8calib kv-types ... --engine "
            "reference` emulates it"
        ]
    return Verification(
        model=model,
        fingerprint=target.fingerprint,
        engine=engine,
        numerics=numerics,
        candidates=tuple(candidates),
        plan=plan,
        batch_size=request.batch_size,
        rules=make_rules(target, rules, opened),
        opened=tuple(opened),
        gate=None if request.gate is None else load_gate(request.gate),
        is_strict=request.strict,
        unusable=unusable,
        refused=refused,
        warnings=(
            *plan.warnings,
            *map(str, refused),
            *model.list_warnings(),
            *_warn_of_candidates(opened, plan, has_scheme=scheme is not None),
            *loading,
            *tiles,
            *(f"{each.name}: {note}" for each in candidates for note in each.notes),
        ),
    )


def _warn_of_candidates(
    opened: Iterable[Candidate], text: DataPlan, *, has_scheme: bool
) -> Iterator[str]:
    """Warn of candidates that were calibrated on this text, and of KV scales beside a scheme."""
    for candidate in opened:
        if candidate.origin is not None and candidate.origin.text_start == text.start:
            yield (
                f"{candidate.name}: this text was used for calibration, so its figures may be too "
                "good"
            )
    for candidate in opened if has_scheme else ():
        if candidate.stats and any(site.role is Role.K for site in candidate.stats.sites):
            yield (
                f"{candidate.name}: its KV scales are ignored: a scheme quantizes weights and "
                "inputs; leave out --scheme to verify them"
            )


# --- the run and after it ------------------------------------------------------------------------


def describe_plan(asked: Verification, mode: MemoryPlan) -> RunPlan:
    """Describe the planned run."""
    names = [each.name for each in asked.candidates]
    return describe_run(asked.model, mode, asked.plan, engine=asked.engine.key, candidates=names)


def complete_report(
    asked: Verification,
    report: VerifyReport,
    scores: Scores,
    request: VerifyRequest,
    model: RunModel,
    mode: MemoryPlan,
    peak: PeakMemory,
    specs: Sequence[str],
) -> VerifyResult:
    """Add to a report what it was made from, and what the page alone shows."""
    used = {each.name for each in asked.opened}
    scales = {name: find_candidate(name) for name in _list_paths(request) if name in used}
    hashes = hash_run(None if model.is_live else model.source.folder, specs, scales)
    provenance = RunProvenance(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=spell_command(),
        model_hash=asked.fingerprint,
        data_hash=asked.plan.fingerprint,
        versions={**versions(asked.plan.tokens_by_modality), "python": python_version()},
        settings={name: getattr(request, name) for name in _SETTINGS},
        numerics=asked.numerics.list_differences(),
    )
    memory = {**mode.as_json(), "peak_measured_bytes": peak.peak_bytes}
    made = {**dict(report), "memory": memory, "provenance": provenance, "hashes": hashes}
    if request.report is None:
        return VerifyResult(**made)
    tokenizer = getattr(request.tokenizer, "tokenizer", request.tokenizer)  # of a processor
    if tokenizer is None:
        try:
            tokenizer = load_tokenizer(model.source)
        except ModelError:  # a text of token ids needs none, and is quoted as such
            tokenizer = None

    def decode(ids: list[int]) -> str:
        if tokenizer is None or not hasattr(tokenizer, "decode"):
            return " ".join(map(str, ids))
        text = tokenizer.decode(ids, skip_special_tokens=False)
        return fit_line(text.replace("\n", "↵"))

    from fp8calib.verification.page.page import list_shown_on_page

    return VerifyResult(**{**made, **list_shown_on_page(asked, report, scores, decode)})


def finish(
    request: VerifyRequest,
    asked: Verification,
    report: VerifyReport,
    logprobs: Mapping[str, torch.Tensor],
    reporter: Reporter,
) -> VerifyResult:
    """Write the output files; an error carries the result, which may have cost hours.

    `logprobs` are what --dump writes.
    """
    gates = GATES if asked.gate is None else {asked.gate.name: asked.gate}
    used = dict.fromkeys(each.gate for each in report.candidates)
    command = suggest_command(report, request, gates)
    added = {"gates": tuple(gates[name] for name in used), "next": command}
    result = VerifyResult(**{**dict(report), **added})
    try:
        if request.dump is not None:
            metadata = {"format": "pt", "data": asked.plan.fingerprint}
            save_tensors(Path(request.dump), dict(logprobs), metadata=metadata)
            reporter.say(f"log-probabilities of {len(logprobs)} models written to {request.dump}")
        if request.report is not None:
            from fp8calib.verification.page.page import write_page

            write_page(result, Path(request.report), command=result.next)
            reporter.say(f"report written to {request.report}")
    except Exception as error:
        error.result = result  # type: ignore[attr-defined]
        raise
    return result


_SHOWN_ROWS = 8


def describe(
    result: VerifyResult, request: VerifyRequest, more: Iterable[Block] = ()
) -> Iterator[Block]:
    """Describe the report, with `more` after its candidates: tables only of what is lost."""
    yield Answer(result.decision.headline)
    for line in result.decision.details.splitlines():
        yield Line(line)
    yield Line(
        f"Emulated {result.engine_version or result.engine}: {result.tokens:,} tokens in "
        f"{format_count(result.sequences, 'sequence')}, {result.dtype}."
    )
    yield from _describe_candidates(result, is_full=request.everything)
    yield from more
    for name in (candidate.name for candidate in result.candidates):
        rows, title = result.list_rows(name), "of lowest SQNR"
        if not request.everything:
            unfit, title = list_unfit(rows), "that lose most"
            rows = [each for each in rows if each in unfit]
        if rows:
            yield Line()
            yield sites_table(join_readers(rows)[:_SHOWN_ROWS], title=f"{name}: tensors {title}")
    if result.rules:
        yield Line()
        yield rules_table(result.rules)
    last = [f"exit code {result.exit_code}: {result.fault[1]}"] if result.exit_code else []
    last += [f"next: {result.next}"] if result.next else []
    if last:
        yield Line()
        yield Answer("\n".join(last))


def _describe_candidates(report: VerifyReport, *, is_full: bool) -> Iterator[Block]:
    """Show a line for each of several candidates; the gate's reasons where it decides."""
    shown = report if is_full else report.without_idle()
    if is_full or len(shown.candidates) + len(report.refused) > 1:
        yield Line()
        is_choice = report.decision.remedy == "use" and len(report.candidates) > 2
        best = report.decision.candidate if is_choice else ""
        table = candidates_table(shown, best=best)
        yield table if is_full else table.without("KLD p99")
    for candidate in shown.candidates:
        name = candidate.name
        if is_full:
            yield Line(f"  {name}: {candidate.description}")
        if report.has_gate:
            why = f"{candidate.verdict} ({candidate.gate} gate): {candidate.verdict_why}"
            yield Line(f"  {name}: {why}")
        elif candidate.verdict is Verdict.CANNOT_TELL:
            yield Line(f"  {name}: cannot tell: {candidate.verdict_why}")
        for pair in list_shown_pairs(report) if is_full else ():
            if pair.candidate == name:
                yield Line(f"  {name} against {pair.base}: {describe_pair(pair)}")
    for refused in report.refused:
        yield Line(f"  {refused}")


verify = as_function("verify", VerifyRequest, run)
