"""Read and make the candidates of a verification, before a weight of the model is read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from fp8calib.calibration.calibration_stats import CalibrationStats
from fp8calib.calibration.run_model import RunModel
from fp8calib.data.sequences import DataPlan
from fp8calib.engines.engine import Engine
from fp8calib.engines.numerics import SPARSE_LATENTS, Numerics
from fp8calib.errors import Fp8CalibError, ModelError, UsageError, VerificationError
from fp8calib.model.shapes import ModelGeometry, Role
from fp8calib.numerics.formats import E4M3FN, Fp8Format
from fp8calib.numerics.rules import Rule
from fp8calib.verification.candidates import (
    OpenedCandidate,
    Target,
    build_kv_candidate,
    build_opened,
    build_scheme,
    build_unscaled,
    check_sites,
    leave_cache,
    open_candidate,
    open_stats,
)
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.report import SCALE_ONE

Scales = str | Path | CalibrationStats
"""A candidate: statistics in memory, or the path of statistics, scales or an FP8 checkpoint."""


def require_head(model: RunModel) -> None:
    """Refuse a model that predicts no tokens.

    Raises:
        ModelError: naming its class.
    """
    if model.prepared.model.get_output_embeddings() is None:
        raise ModelError(
            f"{type(model.prepared.model).__name__} has no output head, so it predicts no tokens "
            "whose divergence could be measured",
            hint="verify the model with its language-model head (a ...ForCausalLM class)",
        )


def make_candidates(
    target: Target, scales: Iterable[Scales], scheme: str | None, plain_caches: Collection[int]
) -> tuple[list[OpenedCandidate], list[Candidate], dict[str, Fp8CalibError]]:
    """Read and make candidates; give the faults of those that are left out.

    Without any that quantizes weights, scale 1.0 is one more.

    Args:
        target: the unquantized model, and how candidates are emulated.
        scales: statistics, scales and FP8 checkpoints.
        scheme: the scheme of weights and inputs that statistics are for; None for the KV cache.
        plain_caches: the layers whose KV cache stays in 16 bits.

    Raises:
        UsageError: a scheme needs statistics.
        ModelError | VerificationError: no candidate is left: the fault of the first.
    """
    opened: list[OpenedCandidate] = []
    candidates: list[Candidate] = []
    faults: dict[str, Fp8CalibError] = {}

    def add(candidate: Candidate) -> None:
        made = leave_cache(candidate, plain_caches, target.geometry)
        check_sites(made, target.geometry)
        candidates.append(made)

    for index, item in enumerate(scales):
        try:
            if isinstance(item, CalibrationStats):
                name = f"statistics-{index}" if index else "statistics"
                found = open_stats(name, item, target)
            else:
                name = str(item)
                found = open_candidate(name, target)
            add(_make(found, target, scheme))
        except (ModelError, VerificationError) as error:
            faults[name] = error
        else:
            opened.append(found)
    if faults and not opened:
        raise next(iter(faults.values()))
    if scheme is not None and not opened:
        add(build_scheme(scheme, scheme, target))
    # A model without a KV cache has nothing that scale 1.0 could change.
    if target.geometry.kv_elements_per_token or not candidates:
        add(build_unscaled(SCALE_ONE, target.geometry, target.fmt, target.numerics))
    return opened, candidates, faults


def make_rules(
    target: Target,
    rules: Iterable[Rule],
    opened: Sequence[OpenedCandidate],
    plain_caches: Collection[int],
) -> Mapping[str, Candidate]:
    """Make a candidate for each rule, from the first statistics.

    Raises:
        UsageError: there are no statistics.
    """
    first = next((each for each in opened if each.stats is not None), None)
    found = {}
    for rule in rules:
        if first is None:
            raise UsageError(
                "--rules needs statistics, and no --scales holds any",
                hint="pass the stats.safetensors that calibrate wrote",
            )
        name, table = str(rule), first.make_table(target.fmt, rule=rule)
        made = build_kv_candidate(name, table, target.numerics, origin=name)
        found[name] = leave_cache(made, plain_caches, target.geometry)
    return found


def _make(opened: OpenedCandidate, target: Target, scheme: str | None) -> Candidate:
    if scheme is not None:
        if opened.stats is None:
            raise UsageError(
                f"--scheme {scheme} needs statistics, and {opened.name} holds none",
                hint="leave out --scheme to verify the scales of the file",
            )
        return build_scheme(opened.name, scheme, target, opened.stats)
    if opened.checkpoint is not None:
        return build_opened(opened, target)
    table = opened.make_table(target.fmt)
    if table.fmt is not target.fmt:  # e4m3fn and e4m3fnuz differ in range
        raise ModelError(
            f"{opened.name}: the scales are for {table.fmt.name}, but the KV "
            f"cache is emulated in {target.fmt.name}",
            hint=f"use --fp8-dtype {table.fmt.name}",
        )
    return build_opened(opened, target, table)


def warn_of_overlap(text: DataPlan, opened: Iterable[OpenedCandidate]) -> Iterator[str]:
    """Warn of candidates that were calibrated on this text."""
    for candidate in opened:
        if candidate.origin is not None and candidate.origin.text_start == text.start:
            yield (
                f"{candidate.name}: this text was used for calibration, so its figures may be too "
                "good"
            )


def warn_of_ignored_kv(opened: Iterable[OpenedCandidate]) -> Iterator[str]:
    """Warn of statistics of K and V, where a scheme quantizes weights and inputs."""
    for candidate in opened:
        sites = () if candidate.stats is None else candidate.stats.sites
        if any(site.role is Role.K for site in sites):
            yield (
                f"{candidate.name}: its KV scales are ignored, as --scheme quantizes weights and "
                "inputs only; leave out --scheme to verify them"
            )


def warn_of_tiles(
    engine: Engine, numerics: Numerics, fmt: Fp8Format, geometry: ModelGeometry
) -> Iterator[str]:
    """Say where an FP8 cache is another type than the candidates with scales have."""
    is_sparse = geometry.model_type in SPARSE_LATENTS
    if is_sparse and fmt is E4M3FN and (where := numerics.kv_sparse_in_tiles):
        yield (
            f"{engine.release} stores FP8 latents of sparse attention in tiles {where}: the scales "
            f"of {SCALE_ONE} and of files are not used there; `fp8calib kv-types` with --engine "
            "reference emulates it"
        )
