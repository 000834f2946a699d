"""Open a verification: check the request, read the candidates, and judge them, without weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fp8calib.calibration.calibration_origin import estimate_overlap
from fp8calib.calibration.calibration_stats import CalibrationStats
from fp8calib.calibration.fingerprint import fingerprint_model
from fp8calib.commands.calibrate import CalibrateResult
from fp8calib.commands.options import SKIP_LAYERS, Stats
from fp8calib.commands.recipe import Data
from fp8calib.commands.verify import VerifyRequest
from fp8calib.data.rows import Row
from fp8calib.data.sequences import FEW_TOKENS, DataPlan, list_other_warnings
from fp8calib.engines.engine import Engine
from fp8calib.engines.numerics import SPARSE_LATENTS, Numerics
from fp8calib.engines.registry import REFERENCE, find_emulated
from fp8calib.errors import Fp8CalibError, ModelError, UsageError, VerificationError
from fp8calib.formats.table import ScaleTable
from fp8calib.jobs.models import RunModel
from fp8calib.jobs.text import plan_text
from fp8calib.jobs.verification.loadable import judge_loading
from fp8calib.model.load import ModelSource
from fp8calib.model.shapes import ModelGeometry, Role
from fp8calib.model.stored_parameters import list_leftovers
from fp8calib.numerics.formats import E4M3FN, FP8_FORMATS, Fp8Format
from fp8calib.numerics.rules import AMAX, Rule, parse_rule
from fp8calib.numerics.schemes import find_scheme
from fp8calib.verification.candidates import (
    OpenedCandidate,
    Target,
    build_kv_candidate,
    build_opened,
    build_scheme,
    build_unscaled,
    check_sites,
    find_candidate,
    leave_cache,
    open_candidate,
    open_stats,
)
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.judge.gates import load_gate
from fp8calib.verification.report import SCALE_ONE, RefusedCandidate
from fp8calib.verification.verify import Verification

_RESERVED_NAMES = frozenset({"reference", SCALE_ONE, "server", "__metadata__"})
"""Names in the file of --dump; a plug-in adds the server."""
_SMALLEST_SHARE = 0.01
Scales = str | Path | CalibrationStats
"""A candidate: statistics in memory, or the path of statistics, scales or an FP8 checkpoint."""


# --- what needs no model --------------------------------------------------------------------------


def check_request(request: VerifyRequest) -> None:
    """Check the options that need no model.

    Raises:
        UsageError: an option is invalid, or names something unknown.
        ModelError: a candidate's folder links to files outside of it.
    """
    if request.strict and request.gate is None:
        raise UsageError("--strict has no effect without --gate", hint="add --gate kv or w8a8")
    if request.gate is not None:
        load_gate(request.gate)
    engine, _ = find_emulated(request.engine)
    names = [str(each) for each in list_scales(request.scales) if isinstance(each, str | Path)]
    for name in names:
        if not name or not name.isprintable():
            raise UsageError(f"--scales {name!r}: must be a path of printable characters")
        if name in _RESERVED_NAMES:
            raise UsageError(f"--scales {name}: this name is reserved", hint=f"write ./{name}")
    places = [find_candidate(name).resolve() for name in names]
    for place in places:
        if places.count(place) > 1:
            twice = " and ".join(n for n, p in zip(names, places, strict=True) if p == place)
            raise UsageError(f"--scales {twice}: the same scales twice", hint="give them once")
    if request.scheme is not None:
        find_scheme(request.scheme)
    if request.fp8_dtype not in FP8_FORMATS:
        raise UsageError(
            f"--fp8-dtype {request.fp8_dtype}: unknown format",
            hint=f"known: {', '.join(FP8_FORMATS)}",
        )
    _parse_rules(request)
    if request.kv_cache_dtype_skip_layers and request.scheme is not None:
        raise UsageError(
            f"{SKIP_LAYERS} and --scheme, which quantizes no KV cache",
            hint="leave out one of the two",
        )
    skips = engine is REFERENCE or engine.can_skip_caches
    if request.kv_cache_dtype_skip_layers and not skips:
        raise UsageError(
            f"{SKIP_LAYERS}: {engine.release} quantizes the KV cache of all layers or of none",
            hint="use --engine vllm, or reference",
        )


def _parse_rules(request: VerifyRequest) -> tuple[Rule, ...]:
    names = request.rules or ()
    if not all(names):
        raise UsageError("--rules: empty name", hint="give rules as NAME,NAME")
    rules = tuple(map(parse_rule, names))
    for rule in rules:
        if rules.count(rule) > 1:
            raise UsageError(f"--rules: {rule} is given twice", hint="name each rule once")
    if rules and request.scheme is not None:
        raise UsageError(
            "--rules compares scales of the KV cache, and --scheme quantizes weights and inputs",
            hint="run the command twice, once with each option",
        )
    return rules


def list_scales(scales: Stats | Iterable[Stats]) -> tuple[Scales, ...]:
    """List the candidates, of which one needs no list.

    Raises:
        UsageError: one is neither statistics nor a path.
    """
    if isinstance(scales, Scales | CalibrateResult) or not isinstance(scales, Iterable):
        scales = (scales,)
    found = tuple(each.stats if isinstance(each, CalibrateResult) else each for each in scales)
    for each in found:
        if not isinstance(each, Scales):
            raise UsageError(
                f"scales: must be statistics or a path, or a list of them, found {each!r}",
                hint="leave scales out to compare scale 1.0 alone",
            )
    return found


def if_quantized(name: str) -> str:
    """Say what to do instead of verifying a quantized model that cannot be decoded."""
    return f"pass the model it was made from as MODEL, and this one as --scales {name}"


def plan_verified(
    source: ModelSource, data: Data, rows: Iterable[Row] | None, tokenizer: Any
) -> DataPlan:
    """Plan the text of a verification; the warnings are about figures, not about scales.

    Raises:
        UsageError: the length is above the model's maximum, or a data spec is invalid.
        DataError: the data cannot be read.
    """
    plan = plan_text(source, data, rows=rows, part="verify", tokenizer=tokenizer)
    few = f"only {plan.num_tokens} tokens, fewer than {FEW_TOKENS}: the figures are imprecise"
    is_few = plan.num_tokens < FEW_TOKENS
    return replace(plan, warnings=(*list_other_warnings(plan), *((few,) if is_few else ())))


# --- the candidates -------------------------------------------------------------------------------


def open_target(model: RunModel) -> Target:
    """Describe the unquantized model that candidates are checked against."""
    return Target(
        checkpoint=model.checkpoint,
        fingerprint=fingerprint_model(model.source.raw_config, model.checkpoint.stored),
        geometry=model.prepared.geometry,
    )


def open_verification(
    request: VerifyRequest, model: RunModel, read_text: Callable[[], DataPlan]
) -> Verification:
    """Read the candidates, and refuse what cannot be emulated before a weight is loaded.

    One that cannot be read or emulated is left out while another is left. The text is read after
    the candidates, which take less time.

    Raises:
        UsageError: options contradict each other.
        ModelError: a candidate cannot be read or emulated, or belongs to another model.
        DataError: the text cannot be read.
        VerificationError: a weight would be quantized in part.
    """
    require_head(model)
    engine, numerics = find_emulated(request.engine)
    fmt, geometry = FP8_FORMATS[request.fp8_dtype], model.prepared.geometry
    maker = _CandidateMaker(request, model, numerics, fmt)
    opened, candidates, faults = maker.make_all()
    plan = read_text()
    refused = tuple(
        RefusedCandidate(name=name, why=error.message, hint=error.hint)
        for name, error in faults.items()
    )
    if request.scheme is not None and not opened:
        candidates.append(maker.finish(maker.make_scheme(request.scheme, None)))
    # A model without a KV cache has nothing that scale 1.0 could change.
    if geometry.kv_elements_per_token or not candidates:
        unscaled = build_unscaled(SCALE_ONE, geometry, fmt, numerics)
        candidates.append(maker.finish(unscaled))
    first = next((one for one in opened if one.stats is not None), None)
    scaled = (one for one in opened if one.stats is not None or one.found is not None)
    diagnosed = None if request.scheme is not None else next(scaled, None)
    unusable, loading = judge_loading(request, engine, model, opened)
    names = ", ".join(list_leftovers(model.prepared.weights))
    leftovers = [f"{model.name}: not parameters of the model, so not loaded: {names}"] * bool(names)
    return Verification(
        model=model.name,
        fingerprint=maker.target.fingerprint,
        geometry=geometry,
        numerics=numerics,
        candidates=tuple(candidates),
        plan=plan,
        batch_size=request.batch_size,
        engine=engine.key,
        engine_version=engine.release,
        dtype=model.dtype,
        device=model.device,
        rules=maker.make_rules(first),
        opened=tuple(opened),
        fmt=fmt,
        diagnosis_of="" if diagnosed is None else diagnosed.name,
        gate=None if request.gate is None else load_gate(request.gate),
        is_strict=request.strict,
        unusable=unusable,
        refused=refused,
        warnings=(
            *plan.warnings,
            *map(str, refused),
            *model.describe_decoded(),
            *leftovers,
            *_warn_of_overlap(plan, opened),
            *_warn_of_ignored_kv(request, opened),
            *loading,
            *_note_tiles(engine, numerics, request, fmt, geometry),
            *(f"{each.name}: {note}" for each in candidates for note in each.notes),
        ),
    )


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


class _CandidateMaker:
    """Makes the candidates of a request."""

    def __init__(
        self, request: VerifyRequest, model: RunModel, numerics: Numerics, fmt: Fp8Format
    ) -> None:
        self._request = request
        self._model = model.prepared.model
        self.target = open_target(model)
        self._numerics = numerics
        self._fmt = fmt

    def make_all(
        self,
    ) -> tuple[list[OpenedCandidate], list[Candidate], dict[str, Fp8CalibError]]:
        """Read and make the candidates of --scales; give the faults of those that are left out.

        Raises:
            ModelError | VerificationError: no candidate is left: the fault of the first.
        """
        opened: list[OpenedCandidate] = []
        candidates: list[Candidate] = []
        faults: dict[str, Fp8CalibError] = {}
        for index, item in enumerate(list_scales(self._request.scales)):
            is_stats = isinstance(item, CalibrationStats)
            name = (f"statistics-{index}" if index else "statistics") if is_stats else str(item)
            try:
                found = (
                    open_stats(name, item, self.target)
                    if isinstance(item, CalibrationStats)
                    else open_candidate(name, self.target, self._numerics)
                )
                candidate = self.finish(self._make(found))
            except (ModelError, VerificationError) as error:
                faults[name] = error
            else:
                opened.append(found)
                candidates.append(candidate)
        if faults and not opened:
            raise next(iter(faults.values()))
        return opened, candidates, faults

    def _make(self, opened: OpenedCandidate) -> Candidate:
        if self._request.scheme is not None:
            if opened.stats is None:
                raise UsageError(
                    f"--scheme {self._request.scheme} needs statistics, and {opened.name} holds "
                    "none",
                    hint="leave out --scheme to verify the scales of the file",
                )
            return self.make_scheme(self._request.scheme, opened.stats, opened.name)
        table = self.read_table(opened) if opened.checkpoint is None else None
        return build_opened(opened, self._model, self.target, self._numerics, table)

    def make_scheme(self, scheme: str, stats: CalibrationStats | None, name: str = "") -> Candidate:
        """Make the candidate that `quantize` would write."""
        context = (self.target, self._model, self._numerics)
        found = find_scheme(scheme)
        return build_scheme(name or scheme, found, *context, fmt=self._fmt, stats=stats)

    def make_rules(self, first: OpenedCandidate | None) -> Mapping[str, Candidate]:
        """Make a candidate for each of --rules, from the first statistics."""
        rules = _parse_rules(self._request)
        if rules and first is None:
            raise UsageError(
                "--rules needs statistics, and no --scales holds any",
                hint="pass the stats.safetensors that calibrate wrote",
            )
        found = {}
        for rule in rules:
            assert first is not None  # noqa: S101 -- checked above
            table, name = self.read_table(first, rule=rule), str(rule)
            found[name] = self.finish(build_kv_candidate(name, table, self._numerics, origin=name))
        return found

    def finish(self, candidate: Candidate) -> Candidate:
        """Leave the caches that are named, and refuse what does not fit the model."""
        layers = self._request.kv_cache_dtype_skip_layers or ()
        found = leave_cache(candidate, layers, self.target.geometry)
        check_sites(found, self.target.geometry)
        return found

    def read_table(self, opened: OpenedCandidate, *, rule: Rule = AMAX) -> ScaleTable:
        """Give the KV scales of a candidate: those of its file, or of its statistics."""
        table = opened.make_table(self._fmt, rule=rule)
        if table.fmt is not self._fmt:  # e4m3fn and e4m3fnuz differ in range
            raise ModelError(
                f"{opened.name}: the scales are for {table.fmt.name}, but the KV "
                f"cache is emulated in {self._fmt.name}",
                hint=f"use --fp8-dtype {table.fmt.name}",
            )
        return table


# --- warnings -------------------------------------------------------------------------------------


def _warn_of_overlap(plan: DataPlan, opened: Sequence[OpenedCandidate]) -> Iterator[str]:
    """Warn of candidates that were calibrated on this text."""
    text = plan.text.distinctive()
    for candidate in opened:
        measured = candidate.origin
        if measured is not None and (share := estimate_overlap(text, measured.text)):
            about = f"about {share:.0%}" if share >= _SMALLEST_SHARE else "less than 1%"
            yield (
                f"{candidate.name}: {about} of this text was used for calibration, so its figures "
                "are too good"
            )


def _warn_of_ignored_kv(request: VerifyRequest, opened: Sequence[OpenedCandidate]) -> Iterator[str]:
    for candidate in opened if request.scheme is not None else ():
        sites = () if candidate.stats is None else candidate.stats.sites
        if any(site.role is Role.K for site in sites):
            yield (
                f"{candidate.name}: its KV scales are ignored, as --scheme quantizes weights and "
                "inputs only; leave out --scheme to verify them"
            )


def _note_tiles(
    engine: Engine,
    numerics: Numerics,
    request: VerifyRequest,
    fmt: Fp8Format,
    geometry: ModelGeometry,
) -> Iterator[str]:
    """Say where an FP8 cache is another type than the candidates with scales have."""
    has_fp8 = request.scheme is None and fmt is E4M3FN
    is_sparse = geometry.model_type in SPARSE_LATENTS
    if is_sparse and has_fp8 and (where := numerics.kv_sparse_in_tiles):
        yield (
            f"{engine.release} stores FP8 latents of sparse attention in tiles {where}: the scales "
            f"of {SCALE_ONE} and of files are not used there; `fp8calib kv-types` with --engine "
            "reference emulates it"
        )
