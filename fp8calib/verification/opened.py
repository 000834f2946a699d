"""Read and make the candidates of a verification, before a weight of the model is read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from fp8calib.calibration.calibration_stats import CalibrationStats, calibrate_first
from fp8calib.calibration.run_model import RunModel
from fp8calib.errors import Fp8CalibError, ModelError, UsageError, VerificationError
from fp8calib.formats.compute import compute_kv_scales
from fp8calib.model.shapes import Role
from fp8calib.numerics.rules import Rule, ScaleRules
from fp8calib.verification.candidates import (
    Scales,
    Target,
    build_kv_candidate,
    build_scheme,
    build_unscaled,
    check_sites,
    leave_cache,
    open_candidate,
)
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.report import SCALE_ONE


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
) -> tuple[list[Candidate], list[Candidate], dict[str, Fp8CalibError]]:
    """Read and make candidates; give the faults of those that are left out.

    Without any that quantizes weights, scale 1.0 is one more.

    Args:
        target: the unquantized model, and how candidates are emulated.
        scales: statistics, scales and FP8 checkpoints.
        scheme: the scheme of weights and inputs that statistics are for; None for the KV cache.
        plain_caches: the layers whose KV cache stays in 16 bits.

    Returns:
        Those of `scales`; those and the other ones; faults by name.

    Raises:
        UsageError: a scheme needs statistics.
        ModelError | VerificationError: no candidate is left: the fault of the first.
    """
    opened: list[Candidate] = []
    others: list[Candidate] = []
    faults: dict[str, Fp8CalibError] = {}

    def finish(candidate: Candidate) -> Candidate:
        made = leave_cache(candidate, plain_caches, target.geometry)
        check_sites(made, target.geometry)
        return made

    for index, item in enumerate(scales):
        name = str(item)
        if isinstance(item, CalibrationStats):
            name = f"statistics-{index}" if index else "statistics"
        try:
            made = open_candidate(item, target, name=name, scheme=scheme)
            _check_format(made, target)
            opened.append(finish(made))
        except (ModelError, VerificationError) as error:
            faults[name] = error
    if faults and not opened:
        raise next(iter(faults.values()))
    if scheme is not None and not opened:
        others.append(finish(build_scheme(scheme, scheme, target)))
    # A model without a KV cache has nothing that scale 1.0 could change.
    if target.geometry.kv_elements_per_token or not (opened or others):
        unscaled = build_unscaled(SCALE_ONE, target.geometry, target.fmt, target.numerics)
        others.append(finish(unscaled))
    return opened, [*opened, *others], faults


def _check_format(made: Candidate, target: Target) -> None:
    """Refuse scales of another FP8 type than scale 1.0 has: e4m3fn and e4m3fnuz differ in range."""
    if made.table is not None and not made.weights and made.table.fmt is not target.fmt:
        fmt = made.table.fmt
        raise ModelError(
            f"{made.name}: the scales are for {fmt.name}, but the KV cache is emulated in "
            f"{target.fmt.name}",
            hint=f"use --fp8-dtype {fmt.name}",
        )


def make_rules(
    target: Target,
    rules: Iterable[Rule],
    opened: Sequence[Candidate],
    plain_caches: Collection[int],
) -> Mapping[str, Candidate]:
    """Make a candidate for each rule, from the first statistics.

    Raises:
        UsageError: there are no statistics.
    """
    first = next((each for each in opened if each.stats is not None), None)
    found = {}
    for rule in rules:
        if first is None or first.stats is None or first.table is None:
            raise UsageError(
                "--rules needs statistics, and no --scales holds any",
                hint=calibrate_first("--scales"),
            )
        has_query = any(site.role is Role.Q for site in first.table.scales)
        own = ScaleRules(rule=rule)
        table = compute_kv_scales(first.stats, target.fmt, rules=own, query=has_query)
        made = build_kv_candidate(str(rule), table, target.numerics, origin=str(rule))
        found[str(rule)] = leave_cache(made, plain_caches, target.geometry)
    return found
