"""Compare the types of a KV cache with FP8."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.commands.verify import run as verify
from fp8calib.engines.engine import Engine
from fp8calib.engines.facts.gpus import find_gpu
from fp8calib.engines.registry import find_emulated, list_offering
from fp8calib.errors import ModelError, UsageError, join_or, suggest
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.jobs.function import as_function
from fp8calib.jobs.reporter import Reporter
from fp8calib.numerics.formats import E5M2
from fp8calib.plugins.kv_types.recommend import recommend
from fp8calib.plugins.kv_types.request import KvTypesRequest
from fp8calib.plugins.kv_types.result import CacheResult, KvTypesResult
from fp8calib.plugins.kv_types.types import CACHE_TYPES
from fp8calib.requests.verify import VerifyRequest
from fp8calib.results.run_plan import RunPlan
from fp8calib.scales.scale_table import ScaleTable
from fp8calib.verification.candidates import build_kv_candidate, build_unscaled
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.report import SCALE_ONE
from fp8calib.verification.verify import Verification

_FP8 = ("fp8", "fp8_e4m3")
"""Engines' names of the type with a scale for each layer, which every comparison has."""
_E5M2 = "fp8_e5m2"
_NOT_EMULATED = {
    "fp8_inc": "it is FP8 on Gaudi, where no scale of a file is used",
    "nvfp4_ds_mla": "it stores latents in blocks of 16, by kernels in CUDA that cannot run here",
    "octave": "its kernels are in HIP for MI300X, and cannot run here",
    "": "its kernels were not compared with an emulation yet",
}
"""By the beginning of a type's name: why it is not compared."""
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
    engine = find_emulated(request.engine)[0]
    _check_offered(request, engine)
    facts: dict[str, dict[str, Any]] = {}
    warnings: list[str] = []

    def make_candidates(asked: Verification) -> list[Candidate]:
        geometry = asked.geometry
        left_out = _find_left_out(request, engine, geometry)
        for name, why in left_out.items():
            warnings.append(f"the cache type {name} is left out: {why}")
            reporter.warn(warnings[-1])
        offered = dict.fromkeys(request.kv_cache_dtype or engine.cache_types)
        names = [name for name in offered if name not in {*_FP8, *left_out}]
        facts.update({name: _find_facts(name, request, engine, geometry) for name in names})
        facts[_FP8[0]] = _find_facts(_FP8[0], request, engine, geometry)
        return list(_make_candidates(names, asked, engine))

    names = {field.name for field in fields(request)} & {f.name for f in fields(VerifyRequest)}
    asked = {name: getattr(request, name) for name in names}
    asked["scales"] = () if request.scales is None else request.scales
    found = verify(VerifyRequest(**asked), reporter, make_candidates=make_candidates)
    if isinstance(found, RunPlan):
        return found
    rows = [
        CacheResult(**dict(each), **facts.get(each.name.partition(_WITH)[0], facts[_FP8[0]]))
        for each in found.candidates
    ]
    chosen, why = recommend(rows, found.comparisons)
    return KvTypesResult(
        model=found.model,
        engine=engine.release,
        data=found.data,
        tokens=found.tokens,
        sequences=found.sequences,
        dtype=found.dtype,
        device=found.device,
        types=tuple(sorted(rows, key=lambda row: row.bytes_per_token)),
        comparisons=found.comparisons,
        recommended="" if chosen is None else chosen.name,
        why=why,
        next=_spell_next(chosen, found.model, engine),
        warnings=(*warnings, *found.warnings),
    )


def _check_offered(request: KvTypesRequest, engine: Engine) -> None:
    """Refuse what an engine does not offer.

    Raises:
        UsageError: naming an engine that does.
    """
    if not engine.cache_types:
        raise UsageError(
            f"--kv-cache-dtype: which types {engine.release} offers is not known",
            hint="use --engine vllm, or reference for any type",
        )
    if request.gpu is not None and not engine.storage:
        why = f"--gpu {request.gpu}: what {engine.release} serves on it is not known"
        raise UsageError(why, hint="use --engine vllm, or leave out --gpu")
    if str(request.scales) in engine.cache_types:
        why = f"--scales {request.scales}: this name is reserved"
        raise UsageError(why, hint=f"write ./{request.scales}")
    for name in request.kv_cache_dtype or ():
        if name not in engine.cache_types:
            others = [f"--engine {key}" for key in list_offering(name)]
            hint = f"use {join_or(others)}" if others else suggest(name, list(engine.cache_types))
            why = f"--kv-cache-dtype {name}: {engine.release} has no such type"
            raise UsageError(why, hint=hint)


def _find_left_out(
    request: KvTypesRequest, engine: Engine, geometry: ModelGeometry
) -> dict[str, str]:
    """Find the types that cannot be compared, and why.

    Raises:
        ModelError: one was named.
    """
    sizes = {attention.k_head_dim for _, attention in geometry.attentions()}
    found = {}
    for name in request.kv_cache_dtype or engine.cache_types:
        why = ""
        if name in CACHE_TYPES:
            why = CACHE_TYPES[name].explain_misfit(geometry)
        elif name not in {*_FP8, _E5M2}:
            why = next(why for start, why in _NOT_EMULATED.items() if name.startswith(start))
        if request.gpu is not None and not why:
            why = engine.explain_unserved(name, find_gpu(request.gpu), sizes)
        if why and request.kv_cache_dtype:
            raise ModelError(f"--kv-cache-dtype {name}: {why}", hint="leave it out")
        if why:
            found[name] = why
    return found


def _find_facts(
    name: str, request: KvTypesRequest, engine: Engine, geometry: ModelGeometry
) -> dict[str, Any]:
    """Find the fields of a `CacheResult` that do not depend on the text."""
    size = float(geometry.kv_elements_per_token)
    if name in CACHE_TYPES:
        size = CACHE_TYPES[name].count_bytes(geometry)
    heads = {attention.k_head_dim for _, attention in geometry.attentions()}
    is_known = not geometry.has_latent_attention  # the backends of latents were not read
    flag = "" if engine.launch is None else engine.launch.kv_flag
    return {
        "dtype": flag.rpartition(" ")[2] if flag and name == _FP8[0] else name,
        "bytes_per_token": size,
        "tokens": None if request.kv_memory is None else int(request.kv_memory * 2**30 / size),
        "backends": engine.list_backends(name, None, heads) if is_known else (),
        "gpus": engine.list_generations(name, heads) if is_known else (),
    }


def _make_candidates(names: list[str], asked: Verification, engine: Engine) -> Iterator[Candidate]:
    """Make the types, and those that use scales again with the ones of --scales.

    Raises:
        ModelError: --scales has none for e4m3fn.
    """
    geometry, numerics = asked.geometry, asked.numerics
    table: ScaleTable | None = None
    scaled = ""
    for name in asked.droppable:
        if name not in asked.tables:
            raise ModelError(f"{name}: holds weights, or no KV scales", hint="name scales")
        scaled, table = f"{_WITH}{name}", asked.tables[name]
    for name in names:
        if name == _E5M2:
            yield build_unscaled(name, geometry, E5M2, numerics)
            if table is not None and numerics.kv_scales_e5m2:
                of_e5m2 = replace(table, fmt=E5M2)
                yield build_kv_candidate(name + scaled, of_e5m2, numerics, origin="of e4m3fn")
            continue
        cache_type = CACHE_TYPES[name]
        one = Candidate(name=name, quantizers=cache_type.quantize(geometry))
        yield one
        if table is not None and cache_type.has_global_scales:
            quantizers = cache_type.quantize(geometry, table.times(engine.scale_factor))
            yield replace(one, name=name + scaled, quantizers=quantizers)


def _spell_next(chosen: CacheResult | None, model: str, engine: Engine) -> str:
    """Spell the command that serves the model; empty where scales are in no checkpoint."""
    if chosen is None or engine.launch is None:
        return ""
    folder: str | Path | None = model
    if chosen.name not in {SCALE_ONE, chosen.dtype}:  # it has the scales that are named in it
        scales = Path(chosen.name.removeprefix(f"{chosen.dtype}{_WITH}"))
        places = (scales / "kv-overlay", scales)
        folder = next((path for path in places if (path / CONFIG_NAME).is_file()), None)
    if folder is None:
        return ""
    flag = engine.launch.kv_flag.partition(" ")[0]
    return replace(engine.launch, kv_flag=f"{flag} {chosen.dtype}").spell(str(folder))


kv_types = as_function("kv_types", KvTypesRequest, run)
