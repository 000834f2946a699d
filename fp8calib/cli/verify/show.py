"""The report of a verification as text."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8calib.api.verify.job import VerifyJob
from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.cli.console import print_table, print_text, prints_json, say
from fp8calib.engines.registry import find_emulated
from fp8calib.requests.verify import VerifyRequest
from fp8calib.run.planning.whole_or_streamed import MemoryMode
from fp8calib.stats.calibration_stats import STATS_NAME, is_stats_file
from fp8calib.verification.report import (
    SCALE_ONE,
    DiagnosisResult,
    LayerResult,
    PairedResult,
    Remedy,
    TaskResult,
    VerifyReport,
    format_db,
    format_difference,
    format_error,
    format_kld,
)

_SHOWN_SITES = 8


def describe_verification_plan(job: VerifyJob, mode: MemoryMode) -> dict[str, Any]:
    """Describe the planned run: the JSON output of --dry-run."""
    expected_s = None if mode.plan is None else mode.plan.expected_s
    num_models = 2 + len(job.opened)  # the unquantized one, and scale 1.0
    return {
        "plan": {
            "model": job.name,
            "architecture": job.target.geometry.architecture,
            "layers": len(job.target.geometry.layers),
            "weights_size_bytes": job.checkpoint.total_size_bytes,
            "engine": job.options.numerics.name,
            "candidates": [*(opened.name for opened in job.opened), SCALE_ONE],
            "dtype": job.dtype,
            "dtype_why": job.dtype_why,
            "device": job.device,
            "sequences": len(job.plan.sequences),
            "tokens": job.plan.num_tokens,
            "data": list(job.plan.sources),
            "tasks": list(job.options.tasks),
            **mode.as_json(),
            "expected_fitted_s": None if expected_s is None else expected_s * 2 / num_models,
        }
    }


def describe_report(report: VerifyReport, settings: VerifyRequest) -> dict[str, Any]:
    """Describe the results: the JSON output."""
    return {
        "passed": report.find_failure(strict=settings.strict) is None,
        "next": suggest_command(report, settings),
        "advice": report.advice,
        **report.model_dump(mode="json", exclude={"histograms"}),
    }


def suggest_command(report: VerifyReport, settings: VerifyRequest) -> str:
    """Spell the command that helps most; empty where none does."""
    model, candidate = shlex.quote(report.model), Path(report.decision.candidate)
    named = shlex.quote(report.decision.candidate)
    stats = candidate / STATS_NAME if candidate.is_dir() else candidate
    if report.decision.remedy is Remedy.SCALE_QUERY and not is_stats_file(stats):
        stats = candidate.parent / STATS_NAME  # beside the overlay that calibrate wrote
    command = ""
    match report.decision.remedy:
        case Remedy.CALIBRATE:
            command = f"fp8calib calibrate {model}"
        case Remedy.SCALE_QUERY if is_stats_file(stats):
            options = f"--format kv-overlay --query-scale yes --model {model}"
            command = f"fp8calib export {shlex.quote(str(stats))} {options} --out {named}-query"
        case Remedy.SCALE_QUERY:
            command = f"fp8calib calibrate {model} --query-scale yes"
        case Remedy.FIND_LAYERS if report.sensitivity is not None:
            command = _skip_layers(report, settings, stats)
        case Remedy.FIND_LAYERS:
            scheme = "" if settings.scheme is None else f" --scheme {settings.scheme}"
            scales = f" --scales {named}" if report.decision.candidate in settings.scales else ""
            command = f"fp8calib verify {model}{scheme}{scales} --sensitivity"
        case Remedy.USE if settings.scheme is not None:
            command = _quantize(report, settings.scheme, stats)
        case Remedy.SERVE | Remedy.USE:
            command = _serve(report, settings)
    return command


def _skip_layers(report: VerifyReport, settings: VerifyRequest, stats: Path) -> str:
    """Spell the command that leaves out the layers that stand out; empty where there is none."""
    found = report.sensitivity
    if found is None or not found.flag or found.candidate != report.decision.candidate:
        return ""
    if settings.scheme is not None:
        return f"{_quantize(report, settings.scheme, stats)} {found.flag}"
    served = "" if found.flag.startswith("--ignore") else _serve(report, settings)
    return f"{served} {found.flag}" if served else ""


def _quantize(report: VerifyReport, scheme: str, stats: Path) -> str:
    options = f" --stats {shlex.quote(str(stats))}" if is_stats_file(stats) else ""
    out = shlex.quote(f"{Path(report.model).name}-{scheme}")
    return f"fp8calib quantize {shlex.quote(report.model)} --scheme {scheme}{options} --out {out}"


def _serve(report: VerifyReport, settings: VerifyRequest) -> str:
    """Spell the command that serves the model, a checkpoint, or calibrate's overlay.

    The KV cache is served in FP8, but for a checkpoint of which none was emulated.
    """
    launch = find_emulated(settings.engine)[0].launch
    if report.decision.remedy is Remedy.SERVE:
        return "" if launch is None else launch.spell(report.model)
    candidate = Path(report.decision.candidate)
    folders = (candidate / "kv-overlay", candidate)
    found = next((folder for folder in folders if (folder / CONFIG_NAME).is_file()), None)
    roles = {row.role for row in report.layers if row.candidate == report.decision.candidate}
    if launch is None or found is None:
        return ""
    return launch.spell(str(found), has_kv="k" in roles)


def show_verification(report: VerifyReport, settings: VerifyRequest) -> None:
    """Print the report as text, its answer first and last; with --json, the answer, on stderr."""
    command = suggest_command(report, settings)
    answer = "\n".join([*([f"next: {command}"] if command else []), report.decision.headline])
    if prints_json():
        say(answer)
        return
    print_text(report.decision.headline)
    if report.decision.details:
        print_text(report.decision.details)
    print_text("")
    _show_candidates(report)
    _show_server(report)
    _show_sites(report)
    if report.diagnosis_of or not (settings.scheme or settings.scales):
        _show_diagnosis(report)
    _show_sensitivity(report)
    _show_rules(report)
    _show_tasks(report)
    print_text("")
    print_text(answer)


def _show_candidates(report: VerifyReport) -> None:
    title = (
        f"{report.engine} ({report.engine_version}), {report.tokens:,} tokens in "
        f"{report.sequences} sequences, {report.dtype}: unquantized perplexity "
        f"{report.reference.ppl:.4f}"
    )
    columns = ["candidate", "KLD mean ± se", "p99", "ratio ± se", "top-1", "verdict"]
    rows = [
        [
            candidate.name,
            format_kld(candidate.kld_mean, candidate.kld_se),
            format_kld(candidate.kld_p99),
            f"{candidate.ppl_ratio:.4f} ± {format_error(candidate.ppl_ratio_se)}",
            _format_share(candidate.top1_agreement),
            candidate.verdict.value,
        ]
        for candidate in report.candidates
    ]
    print_table(title, columns, rows)
    for candidate in report.candidates:
        print_text(f"  {candidate.name}: {candidate.description}")
        print_text(
            f"    {candidate.verdict.value} ({candidate.gate} gate): {candidate.verdict_why}"
        )
        for pair in report.comparisons:
            if pair.candidate == candidate.name and _is_shown(pair, report):
                print_text(f"    against {pair.base}: {_describe_pair(pair)}")


def _is_shown(pair: PairedResult, report: VerifyReport) -> bool:
    """Whether a comparison is with scale 1.0, or with the best candidate of its kind."""
    bases = {each.base for each in report.comparisons if each.candidate == pair.candidate}
    klds = {one.name: one.kld_mean or 0.0 for one in report.candidates}
    best = min(bases, key=lambda name: klds[name])
    return pair.base == (SCALE_ONE if SCALE_ONE in bases else best)


def _describe_pair(pair: PairedResult) -> str:
    answer = pair.answer.value.replace("-", " ")
    more = "" if pair.tokens_to_tell is None else f"; about {pair.tokens_to_tell:,} tokens would"
    return f"KLD {format_difference(pair)}: {answer}{more}"


def _show_server(report: VerifyReport) -> None:
    found = report.server
    if found is None:
        return
    print_text("")
    title = (
        f"what explains the server's changes, {found.change_rms:.4f} nats (root mean square; "
        f"{found.noise_rms:.2g} from one scoring to the next)"
    )
    rows = [
        [
            each.candidate,
            "-" if each.correlation is None else f"{each.correlation:.3f}",
            f"{each.residual_rms:.4f}",
        ]
        for each in found.explanations
    ]
    if rows:
        print_table(title, ["candidate", "correlation", "left, nats"], rows)
    for name, estimate in (
        ("KLD of the server, low variance (q/p - 1 - log q/p)", found.kld_low_variance),
        ("KLD of the server, log p/q", found.kld_log_ratio),
        ("KLD of the server, from its most likely tokens", found.kld_top),
        ("KLD of the server, at least", found.kld_at_least),
    ):
        if estimate is not None:
            print_text(f"  {name}: {format_kld(estimate.value)} ± {format_kld(estimate.se)}")
    if found.engine is not None and found.engine.change_rms is not None:
        print_text(
            f"  the unquantized {found.engine.kind} server differs from the model here by "
            f"{found.engine.change_rms:.4f} nats, perplexity ratio {found.engine.ppl_ratio:.4f}"
        )
    if found.repeated_requests:
        print_text(
            f"  requests sent again, as a server was slow or busy: {found.repeated_requests}"
        )


def _show_sites(report: VerifyReport) -> None:
    for candidate in report.candidates:
        rows = [row for row in report.layers if row.candidate == candidate.name]
        if rows:
            print_text("")
            title = f"{candidate.name}: the {min(_SHOWN_SITES, len(rows))} sites of lowest SQNR"
            columns = ["site", "SQNR dB", "clipped", "flushed", "amax", "scale"]
            print_table(title, columns, [_site_row(row) for row in rows[:_SHOWN_SITES]])


def _site_row(row: LayerResult) -> Sequence[str]:
    return [
        row.site,
        format_db(row.sqnr_db),
        f"{row.clipped:.2%}",
        f"{row.flushed:.2%}",
        f"{row.amax:.4g}",
        _format_scale(row),
    ]


def _format_scale(row: LayerResult) -> str:
    if row.scale is None:
        return f"dynamic, per {row.scale_per}"
    if row.smallest_scale is None:
        return f"{row.scale:.4g}"
    return f"{row.smallest_scale:.3g} to {row.scale:.3g} per {row.scale_per}"


def _show_diagnosis(report: VerifyReport) -> None:
    """Print the K and V sites that calibrated scales improve most."""
    rows = sorted(report.diagnosis, key=_unscaled_loss_db, reverse=True)[:_SHOWN_SITES]
    if not rows:
        return
    print_text("")
    columns = {
        "site": [row.site for row in rows],
        "SQNR at 1.0": [format_db(row.unscaled_db) for row in rows],
        "per tensor": [format_db(row.scaled_db) for row in rows],
        "per head": [format_db(row.per_head_db) for row in rows],
        "fitted": [format_db(row.fitted_db) for row in rows],
        "clipped at 1.0": [f"{row.unscaled_clipped:.2%}" for row in rows],
        "clipped in calibration": [_format_share(row.calibration_clipped) for row in rows],
    }
    known = {name: cells for name, cells in columns.items() if any(cell != "-" for cell in cells)}
    of = f" and with the scales of {report.diagnosis_of}" if report.diagnosis_of else ""
    title = f"K, V and q at scale 1.0{of}: SQNR in dB of the {len(rows)} that lose most"
    print_table(title, list(known), list(zip(*known.values(), strict=True)))


def _format_share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _unscaled_loss_db(row: DiagnosisResult) -> tuple[float, float]:
    """Rank by the clipped share, then by what a head loses against a fitted scale."""
    return (row.unscaled_clipped, row.unscaled_loss_db)


def _show_sensitivity(report: VerifyReport) -> None:
    found = report.sensitivity
    if found is None:
        return
    print_text("")
    title = f"{found.candidate}: one layer at a time, on {found.sequences} sequences"
    rows = [
        [
            str(layer.layer),
            format_kld(layer.kld_mean, layer.kld_se),
            f"{layer.ppl_ratio:.4f}",
        ]
        for layer in found.layers[:_SHOWN_SITES]
    ]
    print_table(title, ["layer", "KLD mean ± se", "ratio"], rows)
    if found.skip_layers:
        named = ", ".join(map(str, found.skip_layers))
        print_text(f"layers worth leaving unquantized: {named}  {found.flag}".rstrip())
    else:
        print_text("no layer is worth leaving unquantized: none stands out")


def _show_rules(report: VerifyReport) -> None:
    if not report.rules:
        return
    print_text("")
    rows = [
        [
            rule.rule,
            format_kld(rule.kld_mean, rule.kld_se),
            "-" if rule.against_best is None else _describe_pair(rule.against_best),
            f"{rule.ppl_ratio:.4f} ± {format_error(rule.ppl_ratio_se)}",
        ]
        for rule in report.rules
    ]
    title = f"{report.rules[0].candidate}: scale rules on this text, best first"
    print_table(title, ["rule", "KLD mean ± se", "against the first", "ratio ± se"], rows)


def _show_tasks(report: VerifyReport) -> None:
    setup = report.task_setup
    if setup is None:
        return
    bos = f"add_bos_token=True ({setup.bos_token} before every text)"
    if not setup.add_bos_token:
        bos = "no BOS before texts: the tokenizer adds none"
    limit = "" if setup.limit is None else f", --limit {setup.limit}"
    print_text("")
    columns = ["candidate", "task", "metric", "docs", "reference", "± se", "value", "± se"]
    title = f"lm-evaluation-harness {setup.harness_version}, {bos}{limit}"
    print_table(title, [*columns, "recovery %"], [_task_row(row) for row in report.tasks])


def _task_row(row: TaskResult) -> Sequence[str]:
    numbers = (row.reference, row.reference_se, row.value, row.value_se)
    return [
        row.candidate,
        row.task,
        row.metric,
        "-" if row.num_documents is None else str(row.num_documents),
        *("-" if number is None else f"{number:.4f}" for number in numbers),
        "-" if row.recovery_percent is None else f"{row.recovery_percent:.2f}",
    ]
