"""Compare the types of a KV cache with FP8, and recommend one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.commands.request import Reporter, as_function
from fp8calib.commands.result import Result, RunPlan
from fp8calib.commands.verify import VerifyRequest
from fp8calib.commands.verify_run import run as verify
from fp8calib.engines.engine import Engine
from fp8calib.engines.gpus import join_generations, list_backends, list_generations
from fp8calib.engines.registry import find_emulated, list_offering
from fp8calib.errors import ModelError, UsageError, join_or, suggest
from fp8calib.model.geometry import ModelGeometry
from fp8calib.numerics.formats import E5M2
from fp8calib.plugins.kv_types.request import KvTypesRequest
from fp8calib.plugins.kv_types.types import CACHE_TYPES
from fp8calib.text import Answer, Block, Line, Table
from fp8calib.verification.candidates import build_kv_candidate, make_unscaled_table
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.judge.decide import get_kld
from fp8calib.verification.judge.gates import GATES
from fp8calib.verification.report import SCALE_ONE, CandidateResult, PairedResult, Verdict
from fp8calib.verification.tables import describe_pair, format_mean_kld, format_ratio, format_share
from fp8calib.verification.verify import Verification

FP8_TYPES = ("fp8", "fp8_e4m3")
"""Engines' names of the type with a scale for a tensor or a head, which is always compared."""
_SMALLER = 1.1
"""What needs less by a smaller factor is not called smaller: a scale for a token adds 6 %."""
_E5M2 = "fp8_e5m2"
_EMULATED = {*FP8_TYPES, _E5M2, *CACHE_TYPES}
_NOT_EMULATED = {
    "fp8_inc": "it is FP8 on Gaudi, where no scale of a file is used",
    "nvfp4_ds_mla": "it stores latents in blocks of 16, by kernels in CUDA that cannot run here",
    "octave": "its kernels are in HIP for MI300X, and cannot run here",
    "": "its kernels were not compared with an emulation yet",
}
"""By the beginning of a type's name: why it is not compared."""


class CacheResult(CandidateResult):
    """A KV cache beside the unquantized model, judged by the gate `kv`."""

    dtype: str
    """The value of `--kv-cache-dtype`."""
    bytes_per_token: float
    """In all layers and on all ranks."""
    tokens: int | None
    """How many fit into `--kv-memory`; None if that is not given."""
    backends: tuple[str, ...]
    """The engine's backends that store it, in its order of preference; empty where not known."""
    gpus: tuple[str, ...]
    """The generations of GPUs with such a backend, as compilers name them."""

    def __str__(self) -> str:
        kld = format_mean_kld(self.kld_mean, self.kld_se)
        return f"{self.name} ({self.bytes_per_token:,.0f} bytes a token, KLD {kld})"


class KvTypesResult(Result):
    """The types, the smallest first, and the one to serve."""

    model: str
    engine: str
    data: tuple[str, ...]
    tokens: int
    sequences: int
    dtype: str
    device: str
    types: tuple[CacheResult, ...]
    comparisons: tuple[PairedResult, ...]
    """All with all."""
    recommended: str
    """Empty where the text cannot tell."""
    why: str
    next: str
    """The command that serves the model with it; empty where none does."""
    warnings: tuple[str, ...]


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
        geometry = asked.model.prepared.geometry
        if others := [each.name for each in asked.opened if each.weights]:
            raise ModelError(f"{others[0]}: holds weights, or no KV scales", hint="name scales")
        made = [(FP8_TYPES[0], candidate) for candidate in asked.candidates]
        for name in dict.fromkeys(request.kv_cache_dtype or engine.cache_types):
            if why := _explain_misfit(name, geometry):
                if request.kv_cache_dtype:
                    raise ModelError(f"--kv-cache-dtype {name}: {why}", hint=f"leave out {name}")
                warnings.append(f"the cache type {name} is left out: {why}")
                reporter.warn(warnings[-1])
            elif name not in FP8_TYPES:
                made += [(name, each) for each in _make_candidates(name, asked, engine)]
        for name, candidate in made:
            facts[candidate.name] = _find_facts(name, request.kv_memory, engine, geometry)
        return [candidate for name, candidate in made if name not in FP8_TYPES]

    names = {field.name for field in fields(request)} & {f.name for f in fields(VerifyRequest)}
    options = {name: getattr(request, name) for name in names}
    options["scales"] = () if request.scales is None else request.scales
    verified = verify(VerifyRequest(**options), reporter, make_more=make_candidates)
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
        next="" if chosen is None else _spell_next(chosen, request, engine),
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
    geometry, numerics = asked.model.prepared.geometry, asked.numerics
    tables = {each.name: each.table for each in asked.opened if each.table is not None}
    if name == _E5M2:
        yield build_kv_candidate(name, make_unscaled_table(geometry, E5M2), numerics)
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
    flag = engine.kv_flag
    return {
        "dtype": flag.rpartition(" ")[2] if flag and name == FP8_TYPES[0] else name,
        "bytes_per_token": size,
        "tokens": None if kv_memory is None else int(kv_memory * 2**30 / size),
        "backends": list_backends(engine, name, head_sizes=heads) if is_known else (),
        "gpus": list_generations(engine, name, heads) if is_known else (),
    }


def _spell_next(chosen: CacheResult, request: KvTypesRequest, engine: Engine) -> str:
    """Spell the command that serves the model; empty where scales are in no checkpoint."""
    revision = request.revision
    folders: list[str | Path] = [str(request.model)]
    if chosen.name not in {SCALE_ONE, chosen.dtype}:  # it has the scales that are named in it
        scales = Path(chosen.name.removeprefix(f"{chosen.dtype} with "))
        places = (scales / "kv-overlay", scales)
        folders = [folder for folder in places if (folder / CONFIG_NAME).is_file()]
        revision = None
    if not folders:
        return ""
    flag = f"{engine.kv_flag.partition(' ')[0]} {chosen.dtype}"
    return replace(engine, kv_flag=flag).spell_launch(
        str(folders[0]), revision=revision, trusts_code=request.trust_remote_code
    )


def recommend(
    rows: Sequence[CacheResult], pairs: Sequence[PairedResult], *, tokens: int = 0
) -> tuple[CacheResult | None, str]:
    """Recommend the type that loses least; of equal losses, the one that needs least memory.

    None if the text cannot tell whether a type passes, or whether one that needs no more memory
    loses less; and why. FP8 is among the types, and all are compared with all.
    """
    usable = [row for row in rows if row.verdict not in {Verdict.FAIL, Verdict.CANNOT_TELL}]
    if not usable:
        return None, _explain_none(rows, tokens)
    exact = min(usable, key=get_kld)
    rivals = [
        (row, _find_pair(row, exact, pairs))
        for row in usable
        if row is not exact and row.bytes_per_token <= exact.bytes_per_token
    ]
    same = [row for row, pair in rivals if pair.answer == "no-difference"]
    chosen = min((exact, *same), key=_rank)
    unclear = [
        f"{row.name} {describe_pair(pair)}"
        for row, pair in rivals
        if pair.answer == "cannot-tell" and row.bytes_per_token <= chosen.bytes_per_token
    ]
    if unclear:
        against = f"against {exact}, {'; '.join(unclear)}"
        return None, f"Which type of the KV cache loses least cannot be told: {against}."
    text = f"Of the types of the KV cache use {chosen}"
    if chosen.dtype in FP8_TYPES:
        text += "; no other that passes loses less"
    else:
        fp8 = min((row for row in rows if row.dtype in FP8_TYPES), key=get_kld)
        text += f", which {describe_pair(_find_pair(chosen, fp8, pairs))} against {fp8}"
    if chosen.backends:
        text += f"; it is served with {' or '.join(chosen.backends)}"
    smallest = min(usable, key=_rank)
    if smallest.bytes_per_token * _SMALLER < chosen.bytes_per_token:
        text += f". The smallest that passes is {smallest}"
    return chosen, f"{text}."


def _explain_none(rows: Sequence[CacheResult], tokens: int) -> str:
    """Say why no type is usable: all fail, or so little text cannot tell, and how much would."""
    unknown = [row for row in rows if row.verdict is Verdict.CANNOT_TELL]
    if not unknown:
        return "No type of the KV cache passes."
    best, more = min(unknown, key=get_kld), ""
    if tokens and best.ppl_ratio_se is not None:
        # The errors of `judge`: both shrink with the square root of the text.
        implied = math.sqrt(2 * get_kld(best) / tokens)
        error = max(best.ppl_ratio_se / best.ppl_ratio, implied)
        needed = tokens * (error / GATES[best.gate].margin) ** 2
        more = f"; about {float(f'{needed:.2g}'):,.0f} tokens would tell" * (needed > tokens)
    return (
        "Whether a type of the KV cache passes cannot be told. Of the smallest KLD is "
        f"{best}: {best.verdict_why}{more}."
    )


def _rank(row: CacheResult) -> tuple[float, float]:
    return row.bytes_per_token, get_kld(row)


def _find_pair(
    candidate: CacheResult, base: CacheResult, pairs: Sequence[PairedResult]
) -> PairedResult:
    """Find the comparison of two types."""
    named = {(pair.candidate, pair.base): pair for pair in pairs}
    if pair := named.get((candidate.name, base.name)):
        return pair
    # Scale 1.0 is the base of its comparisons only. It is turned where the text tells nothing.
    pair = named[base.name, candidate.name]
    return pair.model_copy(update={"difference": -pair.difference})


def describe(result: KvTypesResult, _: KvTypesRequest) -> Iterator[Block]:
    """Give the table and the recommendation."""
    columns = {
        "type": [row.name for row in result.types],
        "verdict": [row.verdict.value for row in result.types],
        "KLD mean ± se": [format_mean_kld(row.kld_mean, row.kld_se) for row in result.types],
        "ratio ± se": [format_ratio(row.ppl_ratio, row.ppl_ratio_se) for row in result.types],
        "same token": [format_share(row.top1_agreement) for row in result.types],
        "bytes a token": [f"{row.bytes_per_token:,.0f}" for row in result.types],
        "tokens that fit": [f"{row.tokens or 0:,}" for row in result.types],
        "GPUs": [join_generations(row.gpus) or "-" for row in result.types],
        "backends": [", ".join(row.backends) or "-" for row in result.types],
    }
    if all(row.tokens is None for row in result.types):
        del columns["tokens that fit"]
    yield Table(
        title=f"KV caches in {result.engine}, emulated: {result.tokens:,} tokens in "
        f"{result.sequences} sequences, {result.dtype}",
        columns=list(columns),
        rows=list(zip(*columns.values(), strict=True)),
        words=(0, 1, len(columns) - 2, len(columns) - 1),
    )
    yield Line()
    yield Answer("\n".join(filter(None, (result.why, result.next and f"next: {result.next}"))))


kv_types = as_function("kv_types", KvTypesRequest, run)
