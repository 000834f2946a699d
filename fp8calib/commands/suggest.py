"""Spell the command that helps most after a verification."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fp8calib.calibration.origin import STATS_NAME, is_stats_file
from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.commands.verify import VerifyRequest
from fp8calib.engines.registry import find_emulated
from fp8calib.numerics.formats import E5M2
from fp8calib.verification.judge.decide import has_kv_only
from fp8calib.verification.judge.gates import Gate
from fp8calib.verification.report import VerifyReport


def suggest_command(report: VerifyReport, request: VerifyRequest, gates: Mapping[str, Gate]) -> str:
    """Spell the command that helps most; empty where none does. `gates` are by name."""
    model, candidate = request.spell_model(report.model), Path(report.decision.candidate)
    # for commands that run no code of the model
    stored = replace(request, trust_remote_code=False).spell_model(report.model)
    named = shlex.quote(report.decision.candidate)
    stats = candidate / STATS_NAME if candidate.is_dir() else candidate
    if report.decision.remedy == "scale-query" and not is_stats_file(stats):
        stats = candidate.parent / STATS_NAME  # beside the overlay that calibrate wrote
    command = ""
    match report.decision.remedy:
        # the text of calibrate is another one: what judges scales must not have made them
        case "calibrate":
            command = f"fp8calib calibrate {model}"
        case "scale-query" if is_stats_file(stats):
            target = f"--model {stored} --out {named}-query"
            options = f"--format kv-overlay --query-scale yes {target}"
            command = f"fp8calib export {shlex.quote(str(stats))} {options}"
        case "scale-query":
            command = f"fp8calib calibrate {model} --query-scale yes"
        case "check" if candidate.is_dir():
            measured = shlex.quote(f"{candidate.name}-measured")
            command = f"fp8calib calibrate {model} --out {measured}; "
            command += f"fp8calib check {named} --stats {measured}"
        case "find-layers":
            command = _plan(report, request, gates)
        case "use" if request.scheme is not None:
            out = shlex.quote(f"{Path(report.model).name}-{request.scheme}")
            options = f" --stats {shlex.quote(str(stats))}" if is_stats_file(stats) else ""
            command = f"fp8calib quantize {stored} --scheme {request.scheme}{options} --out {out}"
        case "serve":
            command = spell_server(report.model, request, revision=request.revision)
        case "use":  # a checkpoint, or calibrate's overlay
            folders = (candidate / "kv-overlay", candidate)
            found = next((folder for folder in folders if (folder / CONFIG_NAME).is_file()), None)
            rows = report.list_rows(report.decision.candidate)
            has_kv = any(row.role == "k" for row in rows)
            command = "" if found is None else spell_server(str(found), request, has_kv=has_kv)
    return command


def _plan(report: VerifyReport, request: VerifyRequest, gates: Mapping[str, Gate]) -> str:
    """Spell the plan that leaves as much in 16 bits as the gate asks for."""
    failed = next(each for each in report.candidates if each.name == report.decision.candidate)
    gate = gates[failed.gate]
    parts = "--scheme none" if has_kv_only(failed.name, report.layers) else ""
    if request.scheme is not None and request.trust_remote_code:
        return ""  # no engine is known to load the weights of a model with code of its own
    if request.scheme is not None:
        parts = f"--scheme {request.scheme} --kv-tokens 0"
    limit = f"--max-ratio {gate.pass_at:g}"
    if gate.kld_fail_above:
        limit = f"--max-kld {gate.kld_fail_above:g}"
    words = ["fp8calib plan", request.spell_model(report.model), parts, limit]
    given = [] if request.data is None else request.data
    given = [given] if isinstance(given, str | Path) else list(given)
    if all(isinstance(spec, str | Path) for spec in given):  # a command line can give the text
        text = [word for spec in given for word in ("--data", str(spec))]
        if request.text_column is not None:
            text += ["--text-column", request.text_column]
        if request.samples != VerifyRequest.samples:
            text += ["--samples", str(request.samples)]
        if request.seq_len is not None:
            text += ["--seq-len", str(request.seq_len)]
        words += [shlex.join(text + ["--no-pack"] * (not request.pack))]
    return " ".join(filter(None, words))


def spell_server(
    model: str, request: VerifyRequest, *, has_kv: bool = True, revision: str | None = None
) -> str:
    """Spell the command that serves a model in the engine of a run; empty if there is none."""
    engine, _ = find_emulated(request.engine)
    if request.fp8_dtype == E5M2.name:
        engine = replace(engine, kv_flag=f"{engine.kv_flag.partition(' ')[0]} fp8_e5m2")
    return engine.spell_launch(
        model,
        has_kv=has_kv,
        revision=revision,
        trusts_code=request.trust_remote_code,
        plain_caches=request.kv_cache_dtype_skip_layers or (),
    )
