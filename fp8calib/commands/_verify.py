"""Compare a model, on a path or in memory, with its FP8 emulation on the same text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from platform import python_version
from typing import Any, ClassVar

import torch
from pydantic import BaseModel

from fp8calib.calibration.calibration_stats import CalibrationStats
from fp8calib.calibration.fingerprint import versions
from fp8calib.calibration.memory_plan import MemoryPlan
from fp8calib.calibration.run_model import RunModel
from fp8calib.checkpoint.atomic import check_output_file
from fp8calib.checkpoint.header import read_header
from fp8calib.checkpoint.tensor_file import save_tensors
from fp8calib.commands.command_line import spell_command
from fp8calib.commands.function import Reporter, as_function
from fp8calib.commands.hashes import hash_run
from fp8calib.commands.model import open_run_model, plan_text, read_settings
from fp8calib.commands.options import SKIP_LAYERS, Stats
from fp8calib.commands.recipe import Data
from fp8calib.commands.result import Overview, Result, RunHashes
from fp8calib.commands.run_plan import RunPlan
from fp8calib.commands.suggest import suggest_command
from fp8calib.commands.verify import VerifyRequest
from fp8calib.data.rows import Row
from fp8calib.data.sequences import FEW_TOKENS, DataPlan, list_other_warnings
from fp8calib.data.sources import split_data
from fp8calib.data.specs import Specs
from fp8calib.engines.registry import REFERENCE, find_emulated
from fp8calib.errors import CANNOT_TELL, ModelError, UsageError, VerificationError
from fp8calib.machine import PeakMemory
from fp8calib.model.load import ModelSource
from fp8calib.model.stored_parameters import list_leftovers
from fp8calib.numerics.formats import FP8_FORMATS
from fp8calib.numerics.rules import Rule, parse_rule
from fp8calib.numerics.schemes import find_scheme
from fp8calib.text import Answer, Block, Line, Table
from fp8calib.verification.candidates import find_candidate
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.figures import format_db, format_share
from fp8calib.verification.judge.decide import is_unfit
from fp8calib.verification.judge.gates import GATES, Gate, load_gate
from fp8calib.verification.loadable import judge_loading
from fp8calib.verification.memory import open_scored, plan_verification
from fp8calib.verification.opened import (
    CandidateMaker,
    Scales,
    require_head,
    warn_of_ignored_kv,
    warn_of_overlap,
    warn_of_tiles,
)
from fp8calib.verification.page.page import is_page, write_page
from fp8calib.verification.report import (
    SCALE_ONE,
    CandidateResult,
    RefusedCandidate,
    Remedy,
    RunProvenance,
    Verdict,
    VerifyReport,
    candidates_table,
    describe_pair,
)
from fp8calib.verification.tables import list_shown_pairs, rules_table, sites_table
from fp8calib.verification.verify import Verification, Verified, list_histograms
from fp8calib.verification.verify import verify as compare


class VerifyResult(VerifyReport, Result):
    """The report of a verification, and the command that it asks for."""

    first_keys: ClassVar = ("next", "advice")
    next: str = ""
    """The command that helps most; empty where none does."""
    gates: tuple[Gate, ...] = ()
    """The thresholds of the candidates' gates."""
    hashes: RunHashes | None = None
    """None where only a server and an unquantized one or a dump are compared."""

    @property
    def passed(self) -> bool:
        """Whether no verdict on a candidate that was asked for is a failure, and none is refused.

        A verdict that cannot be given is one; a warning is one where the gate is strict.
        """
        return self._failure is None and not self.refused

    @property
    def exit_code(self) -> int:
        """8 for a refused candidate or where the gate fails, 9 where it cannot tell; else 0."""
        if self.refused:
            return VerificationError.exit_code
        if not self.has_gate or self._failure is None:
            return 0
        is_unknown = self._failure is Verdict.CANNOT_TELL
        return CANNOT_TELL if is_unknown else VerificationError.exit_code

    @property
    def exit_why(self) -> str:
        """Why the exit code is not 0; empty where it is."""
        if not self.exit_code:
            return ""
        why, names = "refused", [each.name for each in self.refused]
        if not self.refused:
            why = "the gate cannot tell" if self.exit_code == CANNOT_TELL else "the gate fails"
            names = [each.name for each in self._judged if each.verdict is self._failure]
        return f"exit code {self.exit_code}: {why}: {', '.join(names)}"

    @property
    def _judged(self) -> Sequence[CandidateResult]:
        """The candidates that were asked for; without any, scale 1.0."""
        asked = [each for each in self.candidates if each.name != SCALE_ONE]
        return asked or self.candidates

    @property
    def _failure(self) -> Verdict | None:
        """The worst verdict that a gate does not let pass; None without one."""
        failing = (Verdict.FAIL, *([Verdict.WARN] if self.is_strict else []), Verdict.CANNOT_TELL)
        verdicts = {each.verdict for each in self._judged}
        return next((verdict for verdict in failing if verdict in verdicts), None)

    def overview(self) -> Overview:
        """Give the figures of each candidate, the conclusion and the warnings."""
        table = candidates_table(self.candidates, self.refused).without("KLD p99")
        return Overview(
            f"{type(self).__name__} of {self.model}: {self.tokens:,} tokens, emulating "
            f"{self.engine_version}",
            table.columns,
            table.texts,
            [*self.advice.splitlines(), *(f"warning: {text}" for text in self.warnings)],
        )


_SETTINGS = (
    *("engine", "scheme", "rules", "fp8_dtype", "kv_cache_dtype_skip_layers"),
    *("samples", "seq_len", "batch_size", "pack", "text_column"),
)


_RESERVED_NAMES = frozenset({"reference", SCALE_ONE, "server", "__metadata__"})
"""Names in the file of --dump; a plug-in adds the server."""


def run(
    request: VerifyRequest,
    reporter: Reporter,
    make_candidates: Callable[[Verification], Sequence[Candidate]] | None = None,
) -> VerifyResult | RunPlan:
    """Verify a model, and write the files that are asked for.

    `make_candidates` makes further candidates, for a plug-in.

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
    check_outputs(request, reporter)
    check_request(request)
    specs, rows = split_data(request.data, text_column=request.text_column)
    with open_run_model(request, if_quantized=if_quantized(str(request.model))) as model:
        settings = read_settings(request, specs)
        asked = open_verification(
            request,
            model,
            lambda: plan_verified(model.source, settings, rows, request.tokenizer),
        )
        if make_candidates is not None:
            more = make_candidates(asked)
            asked = replace(asked, candidates=(*more, *asked.candidates))
        for note in asked.warnings:
            reporter.warn(note)
        mode = plan_verification(asked, model, find_scratch(request))
        if request.dry_run:
            return describe_plan(asked, model, mode)
        announce(mode, model, reporter)
        hashes = hash_inputs(asked, request, model, specs)
        with PeakMemory() as peak, open_scored(asked, model, mode, reporter) as scored:
            verified = compare(asked, scored, reporter, measures_noise=True)
    report = complete_report(verified, request, mode, peak)
    for note in report.warnings:
        if note not in asked.warnings:
            reporter.warn(note)
    return finish(request, asked, report, verified.logprobs, reporter, hashes)


def check_request(request: VerifyRequest) -> None:
    """Check the options that need no model.

    Raises:
        UsageError: an option is invalid, or names something unknown.
        ModelError: a candidate's folder links to files outside of it.
    """
    if request.strict and request.gate is None:
        raise UsageError("--strict has no effect without --gate", hint="add --gate kv or w8a8")
    if request.gate is not None:
        load_gate(request.gate)
    engine, _ = find_emulated(request.engine)
    for name in (str(each) for each in list_scales(request.scales) if isinstance(each, str | Path)):
        if not name or not name.isprintable():
            raise UsageError(f"--scales {name!r}: must be a path of printable characters")
        if name in _RESERVED_NAMES:
            raise UsageError(f"--scales {name}: this name is reserved", hint=f"write ./{name}")
        find_candidate(name)
    if request.scheme is not None:
        find_scheme(request.scheme)
    if read_rules(request) and request.scheme is not None:
        raise UsageError(
            "--rules compares scales of the KV cache, and --scheme quantizes weights and inputs",
            hint="run the command twice, once with each option",
        )
    skips = engine is REFERENCE or engine.can_skip_caches or request.scheme is not None
    if request.kv_cache_dtype_skip_layers and not skips:
        raise UsageError(
            f"{SKIP_LAYERS}: {engine.release} quantizes the KV cache of all layers or of none",
            hint="use --engine vllm, or reference",
        )


def read_rules(request: VerifyRequest) -> list[Rule]:
    """Read the rules to compare.

    Raises:
        UsageError: a name is empty or unknown.
    """
    names = request.rules or ()
    if not all(names):
        raise UsageError("--rules: empty name", hint="give rules as NAME,NAME")
    return list(dict.fromkeys(map(parse_rule, names)))


def list_scales(scales: Stats | Iterable[Stats]) -> tuple[Scales, ...]:
    """List the candidates; a single one may be given without a list.

    Raises:
        UsageError: one is neither statistics nor a path.
    """
    is_list = isinstance(scales, Iterable) and not isinstance(scales, str | BaseModel)
    given: Any = scales if is_list else [scales]
    found = [getattr(each, "stats", each) for each in given]  # of the result of `calibrate`
    for each in found:
        if not isinstance(each, Scales):
            raise UsageError(
                f"scales: must be statistics or a path, or a list of them, found {each!r}",
                hint="leave scales out to compare scale 1.0 alone",
            )
    named: dict[str | int, Scales] = {}  # the same twice is compared once
    for each in found:
        key = id(each) if isinstance(each, CalibrationStats) else str(Path(each).absolute())
        named.setdefault(key, each)
    return tuple(named.values())


def if_quantized(name: str) -> str:
    """Say what to do instead of verifying a quantized model that cannot be decoded."""
    return f"pass the model it was made from as MODEL, and this one as --scales {name}"


def plan_verified(
    source: ModelSource, data: Data, rows: Iterable[Row] | None, tokenizer: Any
) -> DataPlan:
    """Plan the text of a verification; the warnings are about figures, not about scales.

    Raises:
        UsageError: the length is above the model's maximum, or a data spec is invalid.
        DataError: the data cannot be read.
    """
    plan = plan_text(source, data, rows=rows, part="verify", tokenizer=tokenizer)
    few = f"only {plan.num_tokens} tokens, fewer than {FEW_TOKENS}: the figures are imprecise"
    is_few = plan.num_tokens < FEW_TOKENS
    return replace(plan, warnings=(*list_other_warnings(plan), *((few,) if is_few else ())))


def open_verification(
    request: VerifyRequest, model: RunModel, read_text: Callable[[], DataPlan]
) -> Verification:
    """Read the candidates, and refuse what cannot be emulated before a weight is loaded.

    One that cannot be read or emulated is left out while another is left. The text is read after
    the candidates, which take less time.

    Raises:
        UsageError: options contradict each other.
        ModelError: a candidate cannot be read or emulated, or belongs to another model.
        DataError: the text cannot be read.
        VerificationError: a weight would be quantized in part.
    """
    require_head(model)
    engine, numerics = find_emulated(request.engine)
    fmt, scheme = FP8_FORMATS[request.fp8_dtype], request.scheme
    maker = CandidateMaker(
        *(model, numerics, fmt),
        scheme=scheme,
        plain_caches=request.kv_cache_dtype_skip_layers or (),
    )
    opened, candidates, faults = maker.make_all(list_scales(request.scales))
    plan = read_text()
    refused = tuple(
        RefusedCandidate(name=name, why=error.message, hint=error.hint)
        for name, error in faults.items()
    )
    scaled = (each for each in opened if each.stats is not None or each.found is not None)
    diagnosed = None if scheme is not None else next(scaled, None)
    unusable, loading = judge_loading(engine, model, opened, scheme)
    names = ", ".join(list_leftovers(model.prepared.weights))
    leftovers = [f"{model.name}: not parameters of the model, so not loaded: {names}"] * bool(names)
    geometry = model.prepared.geometry
    return Verification(
        model=model.name,
        fingerprint=maker.target.fingerprint,
        geometry=geometry,
        numerics=numerics,
        candidates=tuple(candidates),
        plan=plan,
        batch_size=request.batch_size,
        engine=engine.key,
        engine_version=engine.release,
        dtype=model.dtype,
        device=model.device,
        rules=maker.make_rules(read_rules(request), opened),
        opened=tuple(opened),
        fmt=fmt,
        diagnosis_of="" if diagnosed is None else diagnosed.name,
        gate=None if request.gate is None else load_gate(request.gate),
        is_strict=request.strict,
        unusable=unusable,
        refused=refused,
        warnings=(
            *plan.warnings,
            *map(str, refused),
            *model.describe_decoded(),
            *leftovers,
            *warn_of_overlap(plan, opened),
            *(() if scheme is None else warn_of_ignored_kv(opened)),
            *loading,
            *(warn_of_tiles(engine, numerics, fmt, geometry) if scheme is None else ()),
            *(f"{each.name}: {note}" for each in candidates for note in each.notes),
        ),
    )


def find_scratch(request: VerifyRequest) -> Path:
    """Find the folder of hidden states that do not fit into memory."""
    outputs = [path for path in (request.dump, request.report) if path is not None]
    return Path(outputs[0]).absolute().parent if outputs else Path.cwd()


def announce(mode: MemoryPlan, model: RunModel, reporter: Reporter) -> None:
    """Say how the model is held in memory, and how it computes."""
    for note in mode.describe():
        reporter.say(note)
    reporter.say(f"computing in {model.dtype} on {model.device} ({model.dtype_why})")


def hash_inputs(
    asked: Verification, request: VerifyRequest, model: RunModel, specs: Sequence[str]
) -> RunHashes:
    """Hash the files of the model, of the text and of what is compared with it.

    Raises:
        ModelError: one cannot be read.
    """
    scales = (str(each) for each in list_scales(request.scales) if isinstance(each, str | Path))
    try:
        used = {each.name for each in asked.opened}
        places = {name: find_candidate(name) for name in scales if name in used}
        return hash_run(None if model.is_live else model.source.folder, specs, places)
    except OSError as error:
        raise ModelError(f"{error.filename}: cannot be read: {error.strerror}") from error


def describe_plan(asked: Verification, model: RunModel, mode: MemoryPlan) -> RunPlan:
    """Describe the planned run."""
    return RunPlan(
        plan={
            "model": model.name,
            "architecture": asked.geometry.architecture,
            "layers": len(asked.geometry.layers),
            "weights_size_bytes": model.checkpoint.total_size_bytes,
            "engine": asked.engine,
            "candidates": [each.name for each in asked.candidates],
            "dtype": model.dtype,
            "dtype_why": model.dtype_why,
            "device": model.device,
            "sequences": len(asked.plan.sequences),
            "tokens": asked.plan.num_tokens,
            "data": list(asked.plan.sources),
            **mode.as_json(),
        }
    )


def complete_report(
    verified: Verified, request: VerifyRequest, mode: MemoryPlan, peak: PeakMemory
) -> VerifyReport:
    """Add to a report what it was made from, and what the page alone shows."""
    asked = verified.verification
    provenance = RunProvenance(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=spell_command(),
        model_hash=asked.fingerprint,
        data_hash=asked.plan.fingerprint,
        versions={**versions(asked.plan.tokens_by_modality), "python": python_version()},
        settings={name: getattr(request, name) for name in _SETTINGS},
        numerics=asked.numerics.list_differences(),
    )
    return verified.report.model_copy(
        update={
            "histograms": () if request.report is None else tuple(list_histograms(asked)),
            "memory": {**mode.as_json(), "peak_measured_bytes": peak.peak_bytes},
            "provenance": provenance,
        }
    )


def finish(
    request: VerifyRequest,
    asked: Verification,
    report: VerifyReport,
    logprobs: Mapping[str, torch.Tensor],
    reporter: Reporter,
    hashes: RunHashes | None = None,
) -> VerifyResult:
    """Write the output files; an error carries the result, which may have cost hours.

    `logprobs` are what --dump writes.

    Raises:
        ExportError: a file cannot be written.
    """
    gates = GATES if asked.gate is None else {asked.gate.name: asked.gate}
    used = dict.fromkeys(each.gate for each in report.candidates)
    result = VerifyResult(
        **dict(report),
        gates=tuple(gates[name] for name in used),
        hashes=hashes,
        next=suggest_command(report, request, gates),
    )
    try:
        if request.dump is not None:
            metadata = {"format": "pt", "data": asked.plan.fingerprint}
            save_tensors(Path(request.dump), dict(logprobs), metadata=metadata)
            reporter.say(f"log-probabilities of {len(logprobs)} models written to {request.dump}")
        if request.report is not None:
            write_page(result, Path(request.report), command=result.next)
            reporter.say(f"report written to {request.report}")
    except Exception as error:
        error.result = result  # type: ignore[attr-defined]
        raise
    return result


def check_outputs(request: VerifyRequest, reporter: Reporter) -> None:
    """Refuse outputs that cannot be written or would replace an input, before hours of work.

    Raises:
        UsageError: naming the path.
    """
    kinds = (
        *([(Path(request.report), is_page, "no page")] if request.report else []),
        *([(Path(request.dump), _is_dump, "no dump")] if request.dump else []),
    )
    outputs = [path for path, _, _ in kinds]
    if request.force and not outputs:
        reporter.warn("--force has no effect without --report or --dump")
    for path, is_ours, other in kinds:
        if not path.absolute().parent.is_dir():
            raise UsageError(f"{path}: no such folder: {path.parent}")
        check_output_file(path, force=request.force)
        for source in _list_inputs(request):
            _refuse_input(path, source)
        if path.exists() and path.stat().st_size and not is_ours(path):
            raise UsageError(f"{path}: exists, and is {other} of verify", hint="name another file")
    if len({path.resolve() for path in outputs}) < len(outputs):
        raise UsageError(f"--report and --dump are both {outputs[0]}")


def _is_dump(path: Path) -> bool:
    """Whether a file is one that --dump wrote."""
    try:
        header = read_header(path)
    except ModelError:
        return False
    return "reference" in header.tensors and "data" in header.metadata


def _refuse_input(path: Path, source: Path) -> None:
    try:
        is_inside = source.exists() and path.resolve().is_relative_to(source.resolve())
    except (OSError, ValueError):
        return
    if is_inside and (path.exists() or source.is_file()):
        raise UsageError(f"{path} would replace an input", hint="name another file")


def _list_inputs(request: VerifyRequest) -> Iterator[Path]:
    """List the inputs that are paths."""
    data = request.data
    specs = data if isinstance(data, Specs) else [data]
    for each in (request.model, *list_scales(request.scales), *specs):
        if isinstance(each, str | Path):
            yield Path(each)


_SHOWN_ROWS = 8


def describe(
    result: VerifyResult, request: VerifyRequest, more: Iterable[Block] = ()
) -> Iterator[Block]:
    """Describe the report, with `more` after its candidates: tables only of what is lost."""
    decision, kv = result.decision, result.kv
    yield Answer(decision.headline)
    for line in decision.details.splitlines():
        yield Line(line)
    yield Line(
        f"Emulated {result.engine_version or result.engine}: {result.tokens:,} tokens in "
        f"{result.sequences} sequences, {result.dtype}."
    )
    yield from _describe_candidates(result, is_full=request.everything)
    yield from more
    is_needed = kv is not None and kv.answer != "no"
    is_diagnosed = bool(result.diagnosis) and (request.everything or is_needed)
    for candidate in result.candidates:
        name = candidate.name
        rows = [row for row in result.layers if row.candidate == name]
        is_told = name == SCALE_ONE and is_diagnosed  # by the table that follows
        if rows and (request.everything or (is_unfit(name, result) and not is_told)):
            yield Line()
            title = f"{name}: the {min(_SHOWN_ROWS, len(rows))} tensors of lowest SQNR"
            yield sites_table(rows[:_SHOWN_ROWS], title=title)
    if is_diagnosed:
        yield Line()
        yield _tabulate_diagnosis(result)
    if result.rules:
        yield Line()
        yield rules_table(result.rules)
    last = (result.exit_why, result.next and f"next: {result.next}")
    if any(last):
        yield Line()
        yield Answer("\n".join(filter(None, last)))


def _describe_candidates(report: VerifyReport, *, is_full: bool) -> Iterator[Block]:
    """Show a line for each of several candidates; the gate's reasons where it decides."""
    if is_full or len(report.candidates) + len(report.refused) > 1:
        yield Line()
        is_choice = report.decision.remedy is Remedy.USE and len(report.candidates) > 2
        best = report.decision.candidate if is_choice else ""
        table = candidates_table(report.candidates, report.refused, best=best)
        yield table if is_full else table.without("KLD p99")
    for candidate in report.candidates:
        name = candidate.name
        if is_full:
            yield Line(f"  {name}: {candidate.description}")
        if is_full or report.has_gate or candidate.verdict is Verdict.CANNOT_TELL:
            why = f"{candidate.verdict} ({candidate.gate} gate): {candidate.verdict_why}"
            yield Line(f"  {name}: {why}")
        for pair in list_shown_pairs(report) if is_full else ():
            if pair.candidate == name:
                yield Line(f"  {name} against {pair.base}: {describe_pair(pair)}")
    for refused in report.refused:
        yield Line(f"  {refused}")


def _tabulate_diagnosis(report: VerifyReport) -> Table:
    """List the sites that calibrated scales improve most: those that clip, then by their loss."""
    ranked = sorted(
        report.diagnosis, key=lambda row: (-row.unscaled_clipped, -row.unscaled_loss_db)
    )
    rows = ranked[:_SHOWN_ROWS]
    columns = {
        "tensor": [row.site for row in rows],
        "SQNR at 1.0": [format_db(row.unscaled_db) for row in rows],
        "per tensor": [format_db(row.scaled_db) for row in rows],
        "per head": [format_db(row.per_head_db) for row in rows],
        "fitted": [format_db(row.fitted_db) for row in rows],
        "clipped at 1.0": [f"{row.unscaled_clipped:.2%}" for row in rows],
        "clipped in calibration": [format_share(row.calibration_clipped) for row in rows],
    }
    known = {name: cells for name, cells in columns.items() if any(cell != "-" for cell in cells)}
    of = f" and with the scales of {report.diagnosis_of}" if report.diagnosis_of else ""
    title = f"K, V and q at scale 1.0{of}: SQNR in dB of the {len(rows)} that lose most"
    return Table(title=title, columns=list(known), rows=list(zip(*known.values(), strict=True)))


verify = as_function("verify", VerifyRequest, run)
