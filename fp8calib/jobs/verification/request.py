"""The verification request of a job: its candidates, scale rules and diagnosis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from fp8calib.dialects.read import FoundScales
from fp8calib.engines.numerics import SPARSE_LATENTS
from fp8calib.errors import ModelError, UsageError, VerificationError
from fp8calib.geometry.sites import Site
from fp8calib.jobs.verification.job import VerifyJob
from fp8calib.model.load import LoadedModel
from fp8calib.numerics.formats import E4M3FN
from fp8calib.numerics.histogram import lower_edge
from fp8calib.numerics.rules import AMAX, Rule
from fp8calib.numerics.schemes import Scheme
from fp8calib.scales.compute import compute_kv_scales
from fp8calib.scales.scale_table import ScaleTable
from fp8calib.stats.calibration_stats import CalibrationStats
from fp8calib.verification.candidates import (
    OpenedCandidate,
    build_checkpoint,
    build_kv_candidate,
    build_scheme,
    build_unscaled,
    check_sites,
    drop_layers,
    leave_cache,
)
from fp8calib.verification.damage_rows import clipped_unscaled
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.fake_quantize import Quantizer
from fp8calib.verification.emulation.kv import emulate_kv
from fp8calib.verification.report import SCALE_ONE, HistogramResult
from fp8calib.verification.verify import VerificationRequest


def build_request(job: VerifyJob, model: LoadedModel) -> VerificationRequest:
    """Build the request of a job; `model` may be without weights.

    Raises:
        UsageError: options that contradict each other.
        ModelError: a candidate cannot be emulated.
    """
    asked, engine = job.options.request, job.options.engine
    plain = job.options.plain_caches
    candidates = tuple(
        leave_cache(each, plain, job.target.geometry) for each in _list_candidates(job, model)
    )
    for candidate in candidates:
        check_sites(candidate, job.target.geometry)
    rules_of = _find_rules_stats(job)
    first = _first_with_kv(job)
    notes = (note for candidate in candidates for note in candidate.notes)
    return VerificationRequest(
        numerics=job.options.numerics,
        engine=engine.key,
        engine_version=engine.release,
        candidates=candidates,
        rules=dict(_build_rules(job, rules_of)) if rules_of else {},
        rules_of=rules_of.name if rules_of else "",
        per_head=_build_per_head(job, first),
        diagnosis_of=first.name if first else "",
        is_diagnosed_per_head=bool(first and first.found and first.found.table.per_head),
        calibration_clipped=_find_calibration_clipped(job),
        gate=job.options.gate,
        is_strict=asked.strict,
        others={} if job.companion is None else job.companion.list_emulations(candidates),
        measures_noise=job.options.measures_noise,
        scores_decoding=asked.decode,
        refused=tuple(job.refused),
        opened=[each.name for each in job.opened],
        left_out=job.left_out,
        warnings=(
            *(*job.plan.warnings, *job.warnings),
            *(*_note_tiles(job), *notes),
        ),
    )


def find_fault(
    job: VerifyJob, opened: OpenedCandidate, model: LoadedModel
) -> ModelError | VerificationError | None:
    """Find why a candidate cannot be emulated; None if it can."""
    try:
        check_sites(_build_candidate(job, opened, model), job.target.geometry)
    except (ModelError, VerificationError) as error:
        return error
    return None


def _note_tiles(job: VerifyJob) -> Iterator[str]:
    """Say where an FP8 cache is another type than the candidates with scales have."""
    engine, numerics = job.options.engine, job.options.numerics
    has_fp8 = job.options.scheme is None and job.options.fmt is E4M3FN
    is_sparse = job.target.geometry.model_type in SPARSE_LATENTS
    if is_sparse and has_fp8 and (where := numerics.kv_sparse_in_tiles):
        yield (
            f"{engine.release} stores FP8 latents of sparse attention in tiles {where}: the scales "
            f"of {SCALE_ONE} and of files are not used there; `fp8calib kv-types` with --engine "
            "reference emulates it"
        )


def _list_candidates(job: VerifyJob, model: LoadedModel) -> Iterator[Candidate]:
    options, geometry = job.options, job.target.geometry
    if job.make_candidates is not None:
        yield from job.make_candidates(model, job.target)
    for opened in job.opened:
        yield _build_candidate(job, opened, model)
    if options.scheme is not None and not job.opened and job.make_candidates is None:
        yield _build_scheme(job, options.scheme, options.scheme.name, model, None)
    # A model without a KV cache has nothing that scale 1.0 could change.
    has_others = bool(job.opened or options.scheme or job.make_candidates)
    if geometry.kv_elements_per_token or not has_others:
        yield build_unscaled(SCALE_ONE, geometry, options.fmt, options.numerics)


def _build_candidate(job: VerifyJob, opened: OpenedCandidate, model: LoadedModel) -> Candidate:
    options = job.options
    if options.scheme is not None:
        if opened.stats is None:
            raise UsageError(
                f"--scheme {options.scheme.name} needs statistics, and {opened.name} holds none",
                hint="leave out --scheme to verify the scales of the file",
            )
        return _build_scheme(job, options.scheme, opened.name, model, opened.stats)
    if opened.checkpoint is not None:
        return build_checkpoint(opened, model, job.target, options.numerics)
    table = _read_table(job, opened)
    origin = opened.found.dialect if opened.found else "statistics, amax"
    return build_kv_candidate(opened.name, table, options.numerics, origin=origin)


def _build_scheme(
    job: VerifyJob, scheme: Scheme, name: str, model: LoadedModel, stats: CalibrationStats | None
) -> Candidate:
    numerics, fmt = job.options.numerics, job.options.fmt
    return build_scheme(name, scheme, job.target, model, numerics, fmt=fmt, stats=stats)


def _read_table(job: VerifyJob, opened: OpenedCandidate) -> ScaleTable:
    if opened.found is not None:
        _check_format(job, opened.name, opened.found)
        return opened.found.table
    return _compute_table(job, opened)


def _compute_table(
    job: VerifyJob, opened: OpenedCandidate, *, rule: Rule = AMAX, per_head: bool = False
) -> ScaleTable:
    """Compute the KV scales of a candidate with statistics."""
    assert opened.stats is not None  # noqa: S101 -- the caller looked
    fmt, query = job.options.fmt, opened.with_query
    return compute_kv_scales(opened.stats, fmt, rule=rule, per_head=per_head, query=query)


def _check_format(job: VerifyJob, name: str, found: FoundScales) -> None:
    """Refuse scales of another format than the cache's: e4m3fn and e4m3fnuz differ in range."""
    if found.table.fmt is not job.options.fmt:
        raise ModelError(
            f"{name}: the scales are for {found.table.fmt.name}, but the KV cache is emulated in "
            f"{job.options.fmt.name}",
            hint=f"use --fp8-dtype {found.table.fmt.name}",
        )


def _find_rules_stats(job: VerifyJob) -> OpenedCandidate | None:
    """Find the statistics that --rules applies its rules to: the first of --scales."""
    if not job.options.rules:
        return None
    if job.options.scheme is not None:
        raise UsageError(
            "--rules compares scales of the KV cache, and --scheme quantizes weights and inputs",
            hint="run the command twice, once with each option",
        )
    for opened in job.opened:
        if opened.stats is not None:
            return opened
    raise UsageError(
        "--rules needs statistics, and no --scales holds any",
        hint="pass the stats.safetensors that calibrate wrote",
    )


def _build_rules(job: VerifyJob, opened: OpenedCandidate) -> Iterator[tuple[str, Candidate]]:
    for rule in job.options.rules:
        table, name = _compute_table(job, opened, rule=rule), str(rule)
        found = build_kv_candidate(name, table, job.options.numerics, origin=name)
        yield name, leave_cache(found, job.options.plain_caches, job.target.geometry)


def _first_with_kv(job: VerifyJob) -> OpenedCandidate | None:
    """Find the candidate whose KV scales are compared with 1.0; None without KV scales."""
    if job.options.scheme is not None:
        return None
    return next((o for o in job.opened if o.stats is not None or o.found is not None), None)


def _build_per_head(job: VerifyJob, first: OpenedCandidate | None) -> Mapping[Site, Quantizer]:
    """Build the quantizers of per-head scales for the diagnosis; empty where they are unknown."""
    options = job.options
    if first is None or not options.numerics.kv_per_head:
        return {}
    if first.stats is None:
        table = _read_table(job, first)
        if not table.per_head:
            return {}
    else:
        table = _compute_table(job, first, per_head=True)
    found = emulate_kv(table, options.numerics)
    return drop_layers(found, options.plain_caches, job.target.geometry)


def _find_calibration_clipped(job: VerifyJob) -> Mapping[Site, float]:
    stats = next((opened.stats for opened in job.opened if opened.stats is not None), None)
    return {} if stats is None else clipped_unscaled(stats, job.options.fmt)


def list_histograms(job: VerifyJob, candidates: Sequence[Candidate]) -> Iterator[HistogramResult]:
    """List what the first statistics saw at the sites that its candidate scales statically."""
    found = next((opened for opened in job.opened if opened.stats is not None), None)
    if found is None or found.stats is None:
        return
    layer_of = job.target.geometry.index_modules()
    candidate = next(each for each in candidates if each.name == found.name)
    for site, quantizer in candidate.quantizers.items():
        seen = found.stats.sites.get(site)
        if seen is None or seen.histogram is None or not isinstance(quantizer.scale, torch.Tensor):
            continue
        filled = seen.histogram[1:].nonzero().flatten() + 1
        if not len(filled):
            continue
        scale, fmt = float(quantizer.scale.max()), quantizer.fmt
        bins = range(int(filled[0]), int(filled[-1]) + 1)
        yield HistogramResult(
            site=str(site),
            layer=layer_of[site.module],
            lower_edges_log2=tuple(math.log2(lower_edge(index)) for index in bins),
            counts=tuple(seen.histogram[bins.start : bins.stop].tolist()),
            scale=scale,
            largest=scale * fmt.max,
            smallest=scale * fmt.smallest_subnormal / 2,
        )
