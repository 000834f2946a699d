"""Compare the types of a KV cache with FP8."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.commands._verify import run as verify
from fp8calib.commands.request import Reporter, as_function
from fp8calib.commands.result import RunPlan
from fp8calib.commands.verify import VerifyRequest
from fp8calib.engines.engine import Engine
from fp8calib.engines.registry import find_emulated, list_offering
from fp8calib.errors import ModelError, UsageError, join_or, suggest
from fp8calib.model.shapes import ModelGeometry
from fp8calib.numerics.formats import E5M2
from fp8calib.plugins.kv_types.request import KvTypesRequest
from fp8calib.plugins.kv_types.result import FP8_TYPES, CacheResult, KvTypesResult, recommend
from fp8calib.plugins.kv_types.types import CACHE_TYPES
from fp8calib.verification.candidates import build_kv_candidate, build_unscaled
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.report import SCALE_ONE
from fp8calib.verification.verify import Verification

_E5M2 = "fp8_e5m2"
_EMULATED = {*FP8_TYPES, _E5M2, *CACHE_TYPES}
_NOT_EMULATED = {
    "fp8_inc": "it is FP8 on Gaudi, where no scale of a file is used",
    "nvfp4_ds_mla": "it stores latents in blocks of 16, by kernels in CUDA that cannot run here",
    "octave": "its kernels are in HIP for MI300X, and cannot run here",
    "": "its kernels were not compared with an emulation yet",
}
"""By the beginning of a type's name: why it is not compared."""


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
    if str(request.scales) in engine.cache_types:
        why = f"--scales {request.scales}: this name is reserved"
        raise UsageError(why, hint=f"write ./{request.scales}")
    for name in request.kv_cache_dtype or ():
        if name not in engine.cache_types:
            others = [f"--engine {key}" for key in list_offering(name)]
            known = [each for each in engine.cache_types if each in _EMULATED]
            hint = f"use {join_or(others)}" if others else suggest(name, known, what="types")
            why = f"--kv-cache-dtype {name}: {engine.release} has no such type"
            raise UsageError(why, hint=hint)
    facts: dict[str, dict[str, Any]] = {}
    warnings: list[str] = []

    def make_candidates(asked: Verification) -> list[Candidate]:
        if others := [each.name for each in asked.opened if each.checkpoint is not None]:
            raise ModelError(f"{others[0]}: holds weights, or no KV scales", hint="name scales")
        made = [(FP8_TYPES[0], candidate) for candidate in asked.candidates]
        for name in dict.fromkeys(request.kv_cache_dtype or engine.cache_types):
            if why := _explain_misfit(name, asked.geometry):
                if request.kv_cache_dtype:
                    raise ModelError(f"--kv-cache-dtype {name}: {why}", hint="leave it out")
                warnings.append(f"the cache type {name} is left out: {why}")
                reporter.warn(warnings[-1])
            elif name not in FP8_TYPES:
                made += [(name, each) for each in _make_candidates(name, asked, engine)]
        for name, candidate in made:
            facts[candidate.name] = _find_facts(name, request.kv_memory, engine, asked.geometry)
        return [candidate for name, candidate in made if name not in FP8_TYPES]

    names = {field.name for field in fields(request)} & {f.name for f in fields(VerifyRequest)}
    options = {name: getattr(request, name) for name in names}
    options["scales"] = () if request.scales is None else request.scales
    verified = verify(VerifyRequest(**options), reporter, make_candidates=make_candidates)
    if isinstance(verified, RunPlan):
        return verified
    rows = [CacheResult(**dict(each), **facts[each.name]) for each in verified.candidates]
    chosen, why = recommend(rows, verified.comparisons, tokens=verified.tokens)
    return KvTypesResult(
        model=verified.model,
        engine=engine.release,
        data=verified.data,
        tokens=verified.tokens,
        sequences=verified.sequences,
        dtype=verified.dtype,
        device=verified.device,
        types=tuple(sorted(rows, key=lambda row: row.bytes_per_token)),
        comparisons=verified.comparisons,
        recommended="" if chosen is None else chosen.name,
        why=why,
        next="" if chosen is None else _spell_next(chosen, verified.model, engine),
        warnings=(*warnings, *verified.warnings),
    )


def _explain_misfit(name: str, geometry: ModelGeometry) -> str:
    """Say why a type cannot be compared; empty if it can."""
    if name in CACHE_TYPES:
        return CACHE_TYPES[name].explain_misfit(geometry)
    if name in _EMULATED:
        return ""
    return next(why for start, why in _NOT_EMULATED.items() if name.startswith(start))


def _make_candidates(name: str, asked: Verification, engine: Engine) -> Iterator[Candidate]:
    """Emulate a type, and again with the scales of --scales if it uses any."""
    geometry, numerics = asked.geometry, asked.numerics
    tables = {each.name: each.make_table(asked.fmt) for each in asked.opened}
    if name == _E5M2:
        yield build_unscaled(name, geometry, E5M2, numerics)
        for scales, table in tables.items() if numerics.kv_scales_e5m2 else ():
            of_e5m2 = replace(table, fmt=E5M2)
            scaled = f"{name} with {scales}"
            yield build_kv_candidate(scaled, of_e5m2, numerics, origin="of e4m3fn")
        return
    cache_type = CACHE_TYPES[name]
    yield Candidate(name=name, quantizers=cache_type.quantize(geometry))
    for scales, table in tables.items() if cache_type.has_global_scales else ():
        quantizers = cache_type.quantize(geometry, table.times(engine.scale_factor))
        yield Candidate(name=f"{name} with {scales}", quantizers=quantizers)


def _find_facts(
    name: str, kv_memory: float | None, engine: Engine, geometry: ModelGeometry
) -> dict[str, Any]:
    """Find the fields of a `CacheResult` that do not depend on the text."""
    size = float(geometry.kv_elements_per_token)
    if name in CACHE_TYPES:
        size = CACHE_TYPES[name].count_bytes(geometry)
    heads = {attention.k_head_dim for _, attention in geometry.attentions()}
    is_known = not geometry.has_latent_attention  # the backends of latents were not read
    flag = "" if engine.launch is None else engine.launch.kv_flag
    return {
        "dtype": flag.rpartition(" ")[2] if flag and name == FP8_TYPES[0] else name,
        "bytes_per_token": size,
        "tokens": None if kv_memory is None else int(kv_memory * 2**30 / size),
        "backends": engine.list_backends(name, None, heads) if is_known else (),
        "gpus": engine.list_generations(name, heads) if is_known else (),
    }


def _spell_next(chosen: CacheResult, model: str, engine: Engine) -> str:
    """Spell the command that serves the model; empty where scales are in no checkpoint."""
    folders: list[str | Path] = [model]
    if chosen.name not in {SCALE_ONE, chosen.dtype}:  # it has the scales that are named in it
        scales = Path(chosen.name.removeprefix(f"{chosen.dtype} with "))
        places = (scales / "kv-overlay", scales)
        folders = [folder for folder in places if (folder / CONFIG_NAME).is_file()]
    if engine.launch is None or not folders:
        return ""
    flag = f"{engine.launch.kv_flag.partition(' ')[0]} {chosen.dtype}"
    return replace(engine.launch, kv_flag=flag).spell(str(folders[0]))


kv_types = as_function("kv_types", KvTypesRequest, run)
