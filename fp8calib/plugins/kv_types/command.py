"""Compare the types of a KV cache with FP8."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.commands.verify import describe_plan
from fp8calib.data.sources import split_data
from fp8calib.engines.engine import Engine
from fp8calib.engines.facts.gpus import find_gpu
from fp8calib.engines.registry import find_emulated, list_offering
from fp8calib.errors import ModelError, UsageError, join_or, suggest
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.jobs.function import as_function
from fp8calib.jobs.models import RunModel, open_run_model
from fp8calib.jobs.reporter import Reporter
from fp8calib.jobs.text import read_settings
from fp8calib.jobs.verification.memory import open_scored, plan_verification
from fp8calib.jobs.verification.opened import (
    check_request,
    if_quantized,
    list_scales,
    open_target,
    open_verification,
    plan_verified,
)
from fp8calib.numerics.formats import E4M3FN, E5M2
from fp8calib.plugins.kv_types.recommend import list_usable, recommend
from fp8calib.plugins.kv_types.request import KvTypesRequest
from fp8calib.plugins.kv_types.result import CacheResult, KvTypesResult
from fp8calib.plugins.kv_types.types import CACHE_TYPES
from fp8calib.requests.verify import VerifyRequest
from fp8calib.results.run_plan import RunPlan
from fp8calib.scales.compute import compute_kv_scales
from fp8calib.scales.scale_table import ScaleTable
from fp8calib.stats.calibration_stats import CalibrationStats
from fp8calib.verification.candidates import (
    build_kv_candidate,
    build_unscaled,
    open_candidate,
    open_stats,
)
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.report import (
    SCALE_ONE,
    CandidateResult,
    PairedAnswer,
    PairedResult,
)
from fp8calib.verification.verify import Verification, verify

_SHARED = (
    *("model", "data", "engine", "text_column", "samples", "seq_len", "batch_size", "pack"),
    *("device", "dtype", "device_map", "memory", "revision", "trust_remote_code", "tokenizer"),
)
_FP8 = ("fp8", "fp8_e4m3")
"""Engines' names of the type with a scale for each layer, which every comparison has."""
_E5M2 = "fp8_e5m2"
_WITH = " with "


def run(request: KvTypesRequest, reporter: Reporter) -> KvTypesResult | RunPlan:
    """Compare the types of a KV cache on the same text, and recommend one.

    Raises:
        UsageError: an option is invalid, or the engine does not offer a type.
        ModelError: the model or the scales cannot be read, or a named type cannot be compared.
        DataError: the data cannot be read.
        CalibrationError: a forward pass failed.
        VerificationError: a model gives NaN or infinity.
    """
    if request.kv_memory is not None and not 0 < request.kv_memory * 2**30 < math.inf:
        raise UsageError("--kv-memory: must be a number above 0", hint="give GiB, such as 12.5")
    shared = VerifyRequest(**{name: getattr(request, name) for name in _SHARED})
    check_request(replace(shared, scales=() if request.scales is None else request.scales))
    engine, _ = find_emulated(request.engine)
    _check_offered(request.kv_cache_dtype or (), engine)
    specs, text_rows = split_data(request.data, text_column=request.text_column)
    with open_run_model(request, if_quantized=if_quantized(str(request.model))) as model:
        settings = read_settings(shared, specs)
        plan = plan_verified(model.source, settings, text_rows, request.tokenizer)
        asked = open_verification(shared, model, plan)
        left_out = _find_left_out(request, engine, asked.geometry)
        asked_types = dict.fromkeys(request.kv_cache_dtype or engine.cache_types)
        names = [name for name in asked_types if name not in {*_FP8, *left_out}]
        scales = None
        if request.scales is not None:
            scales = _open_scales(list_scales(request.scales)[0], model, asked)
        candidates = _make_candidates(names, asked, engine, scales)
        asked = replace(asked, candidates=(*candidates, *asked.candidates))
        mode = plan_verification(asked, model, Path.cwd(), walks=1)
        if request.dry_run:
            return describe_plan(asked, model, mode)
        with open_scored(asked, model, mode, reporter) as scored:
            report = verify(asked, scored, reporter).report
    warnings = (
        *(f"the cache type {name} is left out: {why}" for name, why in left_out.items()),
        *report.warnings,
    )
    for text in warnings:
        reporter.warn(text)
    rows = [_make_row(found, request, engine, asked.geometry) for found in report.candidates]
    compare = partial(_find_pair, report.comparisons)
    chosen, why = recommend(rows, compare)
    return KvTypesResult(
        model=report.model,
        engine=engine.release,
        data=report.data,
        tokens=report.tokens,
        sequences=report.sequences,
        dtype=report.dtype,
        device=report.device,
        types=tuple(sorted(rows, key=lambda row: row.bytes_per_token)),
        comparisons=tuple(
            compare(row.name, best.name)
            for best in list_usable(rows)[:1]
            for row in rows
            if row is not best
        ),
        recommended="" if chosen is None else chosen.name,
        why=why,
        next=_spell_next(chosen, report.model, request.scales, engine),
        warnings=warnings,
    )


def _check_offered(names: Sequence[str], engine: Engine) -> None:
    """Refuse types that an engine does not offer.

    Raises:
        UsageError: naming an engine that offers it.
    """
    if not engine.cache_types:
        raise UsageError(
            f"--kv-cache-dtype: which types {engine.release} offers is not known",
            hint="use --engine vllm, or reference for any type",
        )
    for name in names:
        if name not in engine.cache_types:
            others = [f"--engine {key}" for key in list_offering(name)]
            hint = f"use {join_or(others)}" if others else suggest(name, list(engine.cache_types))
            why = f"--kv-cache-dtype {name}: {engine.release} has no such type"
            raise UsageError(why, hint=hint)


def _find_left_out(
    request: KvTypesRequest, engine: Engine, geometry: ModelGeometry
) -> Mapping[str, str]:
    """Find the types that cannot be compared, and why.

    Raises:
        ModelError: one was named.
        UsageError: nothing is known of the GPU.
    """
    gpu = None if request.gpu is None else find_gpu(request.gpu)
    if gpu is not None and not engine.storage:
        why = f"--gpu {gpu.name}: what {engine.release} serves on it is not known"
        raise UsageError(why, hint="use --engine vllm, or leave out --gpu")
    sizes = {attention.k_head_dim for _, attention in geometry.attentions()}
    found = {}
    for name in request.kv_cache_dtype or engine.cache_types:
        why = ""
        if name in CACHE_TYPES:
            why = CACHE_TYPES[name].explain_misfit(geometry)
        elif name not in {*_FP8, _E5M2}:
            why = _explain_not_emulated(name)
        if gpu is not None and not why:
            why = engine.explain_unserved(name, gpu, sizes)
        if why and request.kv_cache_dtype:
            raise ModelError(f"--kv-cache-dtype {name}: {why}", hint="leave it out")
        if why:
            found[name] = why
    return found


def _explain_not_emulated(name: str) -> str:
    if name.endswith("_ds_mla"):
        return "it stores latents in blocks of 16, by kernels in CUDA that cannot run here"
    if name.startswith("octave"):
        return "its kernels are in HIP for MI300X, and cannot run here"
    if name == "fp8_inc":
        return "it is FP8 on Gaudi, where no scale of a file is used"
    return "its kernels were not compared with an emulation yet"


def _open_scales(
    scales: str | Path | CalibrationStats, model: RunModel, asked: Verification
) -> tuple[str, ScaleTable]:
    """Read the KV scales of --scales, and name them.

    Raises:
        ModelError: it has none for e4m3fn.
    """
    target = open_target(model)
    if isinstance(scales, CalibrationStats):
        opened = open_stats("statistics", scales, target)
    else:
        opened = open_candidate(str(scales), target, asked.numerics)
    if opened.stats is not None:
        return opened.name, compute_kv_scales(opened.stats, E4M3FN, query=opened.with_query)
    if opened.found is None or opened.found.table.fmt is not E4M3FN:
        raise ModelError(f"{opened.name}: has no KV scales for e4m3fn")
    return opened.name, opened.found.table


def _make_candidates(
    names: Sequence[str],
    asked: Verification,
    engine: Engine,
    scales: tuple[str, ScaleTable] | None,
) -> Iterator[Candidate]:
    """Make the types, and those that use scales again with the ones of --scales."""
    origin, table = scales or ("", None)
    if table is not None:
        yield build_kv_candidate(f"fp8{_WITH}{origin}", table, asked.numerics, origin=origin)
    for name in names:
        if name == _E5M2:
            yield build_unscaled(name, asked.geometry, E5M2, asked.numerics)
            if table is not None and asked.numerics.kv_scales_e5m2:
                named = f"{name}{_WITH}{origin}"
                of_e5m2 = replace(table, fmt=E5M2)
                yield build_kv_candidate(named, of_e5m2, asked.numerics, origin=origin)
            continue
        yield _emulate(name, name, asked.geometry)
        if table is not None and CACHE_TYPES[name].has_global_scales:
            factor = engine.scale_factor
            scaled = _emulate(f"{name}{_WITH}{origin}", name, asked.geometry, table.times(factor))
            told = f"{scaled.description}; global scales times {factor:g}, as on B200"
            yield scaled if factor == 1 else replace(scaled, description=told)


def _emulate(
    name: str, dtype: str, geometry: ModelGeometry, table: ScaleTable | None = None
) -> Candidate:
    cache_type = CACHE_TYPES[dtype]
    return Candidate(
        name=name,
        description=cache_type.description,
        quantizers=cache_type.quantize(geometry, table),
    )


def _make_row(
    found: CandidateResult, request: KvTypesRequest, engine: Engine, geometry: ModelGeometry
) -> CacheResult:
    """Add how many tokens fit, and who serves it; the backends of latents were not read."""
    dtype = _FP8[0] if found.name == SCALE_ONE else found.name.partition(_WITH)[0]
    own = CACHE_TYPES.get(dtype)
    size = float(geometry.kv_elements_per_token) if own is None else own.count_bytes(geometry)
    heads = {attention.k_head_dim for _, attention in geometry.attentions()}
    is_known = not geometry.has_latent_attention
    backends = engine.list_backends(dtype, None, heads) if is_known else ()
    gpus = engine.list_generations(dtype, heads) if is_known else ()
    if dtype == _FP8[0] and engine.launch is not None:
        dtype = engine.launch.kv_flag.rpartition(" ")[2]
    return CacheResult(
        **dict(found),
        dtype=dtype,
        bytes_per_token=size,
        tokens=None if request.kv_memory is None else int(request.kv_memory * 2**30 / size),
        backends=backends,
        gpus=gpus,
    )


def _find_pair(pairs: Sequence[PairedResult], candidate: str, base: str) -> PairedResult:
    """Find the comparison of two candidates; scale 1.0 is only compared against."""
    named = {(pair.candidate, pair.base): pair for pair in pairs}
    if (candidate, base) in named:
        return named[candidate, base]
    found = named[base, candidate]
    turned = {PairedAnswer.BETTER: PairedAnswer.WORSE, PairedAnswer.WORSE: PairedAnswer.BETTER}
    answer = turned.get(found.answer, found.answer)
    update = {"candidate": candidate, "base": base, "answer": answer}
    return found.model_copy(update={**update, "difference": -found.difference})


def _spell_next(chosen: CacheResult | None, model: str, scales: object, engine: Engine) -> str:
    """Spell the command that serves the model; empty where scales are in no checkpoint."""
    if chosen is None or engine.launch is None:
        return ""
    folder: str | Path | None = model
    if _WITH in chosen.name:
        places = (Path(str(scales)) / "kv-overlay", Path(str(scales)))
        folder = next((path for path in places if (path / CONFIG_NAME).is_file()), None)
    if folder is None:
        return ""
    flag = engine.launch.kv_flag.partition(" ")[0]
    return replace(engine.launch, kv_flag=f"{flag} {chosen.dtype}").spell(str(folder))


kv_types = as_function("kv_types", KvTypesRequest, run)
