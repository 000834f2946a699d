"""Check what a verification is asked and resolve its names, before a model is read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from fp8calib.engines.engine import Engine
from fp8calib.engines.registry import REFERENCE, find_emulated
from fp8calib.errors import UsageError
from fp8calib.jobs.verification.job import VerifyOptions
from fp8calib.numerics.formats import FP8_FORMATS, Fp8Format
from fp8calib.numerics.rules import Rule, parse_rule
from fp8calib.numerics.schemes import find_scheme
from fp8calib.requests.shared import SKIP_LAYERS, Stats
from fp8calib.requests.verify import VerifyRequest
from fp8calib.results.calibrate import CalibrateResult
from fp8calib.stats.calibration_stats import CalibrationStats
from fp8calib.verification.candidates import find_candidate
from fp8calib.verification.judge.gates import load_gate
from fp8calib.verification.report import SCALE_ONE

_RESERVED_NAMES = frozenset({"reference", SCALE_ONE, "server", "__metadata__"})
"""Names in the file of --dump; a plug-in adds the server."""
Scales = str | Path | CalibrationStats
"""A candidate: statistics in memory, or the path of statistics, scales or an FP8 checkpoint."""


def resolve_options(request: VerifyRequest) -> VerifyOptions:
    """Check the options that need no model, and resolve their names.

    Raises:
        UsageError: an option is invalid, or names something unknown.
        ModelError: a candidate's folder links to files outside of it.
    """
    if request.strict and request.gate is None:
        raise UsageError("--strict has no effect without --gate", hint="add --gate kv or w8a8")
    scales = list_scales(request.scales)
    engine, numerics = find_emulated(request.engine)
    paths = [str(i) for i in scales if not isinstance(i, CalibrationStats)]
    _check_candidate_names(paths, reserved=_RESERVED_NAMES)
    outputs = list_output_files(request)
    return VerifyOptions(
        request=request,
        scales=tuple(i if isinstance(i, CalibrationStats) else str(i) for i in scales),
        engine=engine,
        numerics=numerics,
        scheme=None if request.scheme is None else find_scheme(request.scheme),
        rules=_parse_rules(request.rules or ()),
        fmt=_find_format(request.fp8_dtype),
        plain_caches=_list_plain_caches(request, engine),
        gate=None if request.gate is None else load_gate(request.gate),
        scratch=outputs[0].absolute().parent if outputs else Path.cwd(),
    )


def _list_plain_caches(request: VerifyRequest, engine: Engine) -> Collection[int]:
    """List the layers whose KV cache stays in 16 bits.

    Raises:
        UsageError: the engine has no option for it, or no KV cache is emulated.
    """
    layers = request.kv_cache_dtype_skip_layers or ()
    if layers and request.scheme is not None:
        what = f"{SKIP_LAYERS} and --scheme, which quantizes no KV cache"
        raise UsageError(what, hint="leave out one of the two")
    if layers and engine is not REFERENCE and not engine.can_skip_caches:
        raise UsageError(
            f"{SKIP_LAYERS}: {engine.release} quantizes the KV cache of all layers or of none",
            hint="use --engine vllm, or reference",
        )
    return layers


def list_output_files(request: VerifyRequest) -> list[Path]:
    """List the files to write: those of --dump and --report."""
    files = (request.dump, request.report)
    return [Path(path) for path in files if path is not None]


def list_scales(scales: Stats | Iterable[Stats]) -> tuple[Scales, ...]:
    """List the candidates, of which one needs no list.

    Raises:
        UsageError: one is neither statistics nor a path.
    """
    if isinstance(scales, Scales | CalibrateResult) or not isinstance(scales, Iterable):
        return (_find_scales(scales),)
    return tuple(map(_find_scales, scales))


def _find_scales(found: object) -> Scales:
    if isinstance(found, CalibrateResult):
        return found.stats
    if not isinstance(found, Scales):
        raise UsageError(
            f"scales: must be statistics or a path, or a list of them, found {found!r}",
            hint="leave scales out to compare scale 1.0 alone",
        )
    return found


def if_quantized(name: str) -> str:
    """Say what to do instead of verifying a quantized model that cannot be decoded."""
    return f"pass the model it was made from as MODEL, and this one as --scales {name}"


def _check_candidate_names(names: Sequence[str], *, reserved: Collection[str]) -> None:
    for name in names:
        if not name or not name.isprintable():
            raise UsageError(f"--scales {name!r}: must be a path of printable characters")
        if name in reserved:
            raise UsageError(f"--scales {name}: this name is reserved", hint=f"write ./{name}")
    places = [find_candidate(name).resolve() for name in names]
    for place in places:
        if places.count(place) > 1:
            twice = " and ".join(n for n, p in zip(names, places, strict=True) if p == place)
            raise UsageError(f"--scales {twice}: the same scales twice", hint="give them once")


def _find_format(name: str) -> Fp8Format:
    if name not in FP8_FORMATS:
        raise UsageError(
            f"--fp8-dtype {name}: unknown format", hint=f"known: {', '.join(FP8_FORMATS)}"
        )
    return FP8_FORMATS[name]


def _parse_rules(names: Sequence[str]) -> tuple[Rule, ...]:
    if not all(names):
        raise UsageError("--rules: empty name", hint="give rules as NAME,NAME")
    rules = tuple(map(parse_rule, names))
    for rule in rules:
        if rules.count(rule) > 1:
            raise UsageError(f"--rules: {rule} is given twice", hint="name each rule once")
    return rules
