"""Spell the command that helps most after a verification."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.engines.registry import find_emulated
from fp8calib.kv_types.cache_types import E5M2_CACHE
from fp8calib.numerics.formats import E5M2, NVFP4_CACHE
from fp8calib.requests.shared import SKIP_LAYERS
from fp8calib.requests.verify import VerifyRequest
from fp8calib.stats.calibration_stats import STATS_NAME, is_stats_file
from fp8calib.verification.judge.decide import has_kv_only
from fp8calib.verification.judge.gates import GATES, load_gate
from fp8calib.verification.report import CandidateResult, Remedy, VerifyReport


def suggest_command(report: VerifyReport, request: VerifyRequest) -> str:
    """Spell the command that helps most; empty where none does."""
    own = _find_own_type(report)
    if own is not None and has_kv_only(report.decision.candidate or own.name, report.layers):
        return _serve_type(report, request, own)
    model, candidate = shlex.quote(report.model), Path(report.decision.candidate)
    named = shlex.quote(report.decision.candidate)
    stats = _find_stats(candidate)
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
        case Remedy.FIND_LAYERS:
            command = _plan(report, request)
        case Remedy.USE if request.scheme is not None:
            command = _quantize(report, request.scheme, stats)
        case Remedy.SERVE | Remedy.USE:
            command = _serve(report, request)
    return command


def _find_own_type(report: VerifyReport) -> CandidateResult | None:
    """Find the candidate whose type of the KV cache is recommended, where that is not FP8."""
    named = (each for each in report.candidates if each.name == report.decision.kv_cache)
    return next((each for each in named if each.has_own_type), None)


def _serve_type(report: VerifyReport, request: VerifyRequest, own: CandidateResult) -> str:
    """Spell the command that serves the model with a type, or writes the scales that it takes."""
    assert own.kv_cache is not None  # noqa: S101 -- it has a type
    launch, dtype = find_emulated(request.engine)[0].launch, own.kv_cache.dtype
    plain = _spell_plain_caches(request)
    scales = own.name.removeprefix(f"{dtype} with ")
    if scales == own.name:
        return "" if launch is None else launch.spell(report.model, cache_type=dtype) + plain
    stats = _find_stats(Path(scales))
    if is_stats_file(stats) and dtype != E5M2_CACHE:
        model, out = shlex.quote(report.model), shlex.quote(f"{Path(report.model).name}-{dtype}")
        options = f"--format kv-overlay --kv-cache-dtype {NVFP4_CACHE} --model {model}"
        return f"fp8calib export {shlex.quote(str(stats))} {options} --out {out}"
    folder = _find_folder(Path(scales))
    if launch is None or folder is None:
        return ""
    return launch.spell(str(folder), cache_type=dtype) + plain


def _find_stats(candidate: Path) -> Path:
    """Name the statistics of a candidate: the file itself, or the one in its folder."""
    return candidate / STATS_NAME if candidate.is_dir() else candidate


def _find_folder(candidate: Path) -> Path | None:
    """Find what an engine serves of a candidate: itself, or the overlay that calibrate wrote."""
    folders = (candidate / "kv-overlay", candidate)
    return next((folder for folder in folders if (folder / CONFIG_NAME).is_file()), None)


def _plan(report: VerifyReport, request: VerifyRequest) -> str:
    """Spell the plan that leaves as much in 16 bits as the gate asks for."""
    failed = next(each for each in report.candidates if each.name == report.decision.candidate)
    gate = GATES[failed.gate] if request.gate is None else load_gate(request.gate)
    parts = "--scheme none" if has_kv_only(failed.name, report.layers) else ""
    if request.scheme is not None:
        parts = f"--scheme {request.scheme} --kv-tokens 0"
    limit = f"--max-ratio {gate.pass_at:g}"
    if gate.kld_fail_above:
        limit = f"--max-kld {gate.kld_fail_above:g}"
    return " ".join(filter(None, ("fp8calib plan", shlex.quote(report.model), parts, limit)))


def _quantize(report: VerifyReport, scheme: str, stats: Path) -> str:
    options = f" --stats {shlex.quote(str(stats))}" if is_stats_file(stats) else ""
    out = shlex.quote(f"{Path(report.model).name}-{scheme}")
    return f"fp8calib quantize {shlex.quote(report.model)} --scheme {scheme}{options} --out {out}"


def _serve(report: VerifyReport, request: VerifyRequest) -> str:
    """Spell the command that serves the model, a checkpoint, or calibrate's overlay.

    The KV cache is served in FP8, but for a checkpoint of which none was emulated.
    """
    launch = find_emulated(request.engine)[0].launch
    if launch is not None and request.fp8_dtype == E5M2.name:
        launch = replace(launch, kv_flag=f"{launch.kv_flag.partition(' ')[0]} {E5M2_CACHE}")
    if report.decision.remedy is Remedy.SERVE:
        spelled = "" if launch is None else launch.spell(report.model)
        return spelled and spelled + _spell_plain_caches(request)
    found = _find_folder(Path(report.decision.candidate))
    roles = {row.role for row in report.layers if row.candidate == report.decision.candidate}
    if launch is None or found is None:
        return ""
    own = _find_own_type(report)
    cache_type = "" if own is None or own.kv_cache is None else own.kv_cache.dtype
    has_kv = bool(own) or "k" in roles
    command = launch.spell(str(found), has_kv=has_kv, cache_type=cache_type)
    return command + _spell_plain_caches(request)


def _spell_plain_caches(request: VerifyRequest) -> str:
    layers = request.kv_cache_dtype_skip_layers
    return f" {SKIP_LAYERS} {' '.join(map(str, layers))}" if layers else ""
