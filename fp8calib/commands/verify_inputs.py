"""A verification before it runs: its options are checked, its candidates are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fp8calib.calibration.calibration_stats import CalibrationStats
from fp8calib.calibration.fingerprint import fingerprint_model
from fp8calib.calibration.run_model import RunModel
from fp8calib.checkpoint.header import read_header
from fp8calib.checkpoint.output import check_output_file
from fp8calib.commands.model import plan_text, read_settings
from fp8calib.commands.options import SKIP_LAYERS, Stats
from fp8calib.commands.verify import VerifyRequest
from fp8calib.data.rows import ReadRow
from fp8calib.data.sequences import FEW_TOKENS, DataPlan, list_other_warnings
from fp8calib.engines.arithmetic import SPARSE_LATENTS
from fp8calib.engines.registry import REFERENCE, find_emulated
from fp8calib.errors import ModelError, UsageError
from fp8calib.model.geometry import Role
from fp8calib.model.load import ModelSource
from fp8calib.numerics.formats import E4M3FN, FP8_FORMATS
from fp8calib.numerics.rules import Rule, parse_rule
from fp8calib.numerics.schemes import find_scheme
from fp8calib.verification.candidates import Target
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.judge.gates import load_gate
from fp8calib.verification.open_candidates import (
    Scales,
    find_candidate,
    judge_loading,
    make_candidates,
    make_rules,
    require_head,
)
from fp8calib.verification.report import SCALE_ONE
from fp8calib.verification.verify import Verification

_RESERVED_NAMES = frozenset({"reference", SCALE_ONE, "server", "__metadata__"})
"""Names in the file of --dump; a plug-in adds the server."""


def check_request(request: VerifyRequest) -> None:
    """Check the outputs, and the options that need no model."""
    _check_outputs(request)
    if request.gate is not None:
        load_gate(request.gate)
    for name in (str(each) for each in list_scales(request.scales) if isinstance(each, str | Path)):
        if name in _RESERVED_NAMES:
            raise UsageError(f"--scales {name}: this name is reserved", hint=f"write ./{name}")
        find_candidate(name)
    if request.scheme is not None:
        find_scheme(request.scheme)
        if _read_rules(request):
            raise UsageError(
                "--rules compares scales of the KV cache, and --scheme quantizes weights and "
                "inputs",
                hint="leave out --rules or --scheme",
            )
        return
    engine, _ = find_emulated(request.engine)
    if request.kv_cache_dtype_skip_layers and not (engine is REFERENCE or engine.can_skip_caches):
        raise UsageError(
            f"{SKIP_LAYERS}: {engine.release} quantizes the KV cache of all layers or of none",
            hint="use --engine vllm, or reference",
        )


def _read_rules(request: VerifyRequest) -> list[Rule]:
    """Read the rules to compare."""
    names = request.rules or ()
    if not all(names):
        raise UsageError("--rules: empty name", hint="give rules as NAME,NAME")
    return list(dict.fromkeys(map(parse_rule, names)))


def list_scales(scales: Stats | Iterable[Stats]) -> tuple[Scales, ...]:
    """List the candidates; a single one may be given without a list."""
    is_list = isinstance(scales, Iterable) and not isinstance(scales, str | BaseModel)
    given: Any = scales if is_list else [scales]
    named: dict[str | int, Scales] = {}  # the same twice is compared once
    for item in given:
        each = getattr(item, "stats", item)  # of the result of `calibrate`
        if not isinstance(each, Scales):
            raise UsageError(
                f"scales: must be statistics or a path, or a list of them, found {each!r}",
                hint="leave scales out to compare scale 1.0 alone",
            )
        key = id(each) if isinstance(each, CalibrationStats) else str(Path(each).absolute())
        named.setdefault(key, each)
    return tuple(named.values())


def plan_verified(
    request: VerifyRequest,
    source: ModelSource,
    specs: Sequence[str],
    rows: Iterable[ReadRow] | None,
) -> DataPlan:
    """Plan the text of a verification; the warnings are about figures, not about scales."""
    data = read_settings(request, specs)
    plan = plan_text(source, data, rows=rows, part="verify", tokenizer=request.tokenizer)
    few = f"only {plan.num_tokens} tokens, fewer than {FEW_TOKENS}: the figures are imprecise"
    is_few = plan.num_tokens < FEW_TOKENS
    return replace(plan, warnings=(*list_other_warnings(plan), *((few,) if is_few else ())))


def open_verification(
    request: VerifyRequest, model: RunModel, read_text: Callable[[], DataPlan]
) -> Verification:
    """Read the candidates, and refuse what cannot be emulated before a weight is loaded.

    One that cannot be read or emulated is left out while another is left. The text is read after
    the candidates, which take less time.
    """
    require_head(model)
    engine, numerics = find_emulated(request.engine)
    fmt, scheme = FP8_FORMATS[request.fp8_dtype], request.scheme
    geometry = model.prepared.geometry
    target = Target(
        checkpoint=model.checkpoint,
        fingerprint=fingerprint_model(model.source.raw_config, model.checkpoint.stored),
        geometry=geometry,
        model=model.prepared.model,
        numerics=numerics,
        fmt=fmt,
    )
    plain_caches = request.kv_cache_dtype_skip_layers or ()
    scales = list_scales(request.scales)
    opened, candidates, refused = make_candidates(target, scales, scheme, plain_caches)
    plan = read_text()
    unusable, loading = judge_loading(engine, model, opened, scheme)
    tiles = []
    has_tiles = geometry.model_type in SPARSE_LATENTS and fmt is E4M3FN and scheme is None
    if has_tiles and (where := numerics.kv_sparse_in_tiles):
        tiles = [
            f"{engine.release} stores FP8 latents of sparse attention in tiles {where}: the scales "
            f"of {SCALE_ONE} and of files are not used there; `fp8calib kv-types ... --engine "
            "reference` emulates it"
        ]
    return Verification(
        model=model.name,
        fingerprint=target.fingerprint,
        geometry=geometry,
        numerics=numerics,
        candidates=tuple(candidates),
        plan=plan,
        batch_size=request.batch_size,
        engine=engine.key,
        engine_version=engine.release,
        dtype=model.dtype,
        device=model.device,
        rules=make_rules(target, _read_rules(request), opened, plain_caches)
        if request.rules
        else {},
        opened=tuple(opened),
        fmt=fmt,
        gate=None if request.gate is None else load_gate(request.gate),
        is_strict=request.strict,
        unusable=unusable,
        refused=refused,
        warnings=(
            *plan.warnings,
            *map(str, refused),
            *model.list_warnings(),
            *_warn_of_candidates(opened, plan, has_scheme=scheme is not None),
            *loading,
            *tiles,
            *(f"{each.name}: {note}" for each in candidates for note in each.notes),
        ),
    )


def _warn_of_candidates(
    opened: Iterable[Candidate], text: DataPlan, *, has_scheme: bool
) -> Iterator[str]:
    """Warn of candidates that were calibrated on this text, and of KV scales beside a scheme."""
    for candidate in opened:
        if candidate.origin is not None and candidate.origin.text_start == text.start:
            yield (
                f"{candidate.name}: this text was used for calibration, so its figures may be too "
                "good"
            )
    for candidate in opened if has_scheme else ():
        if candidate.stats and any(site.role is Role.K for site in candidate.stats.sites):
            yield (
                f"{candidate.name}: its KV scales are ignored: a scheme quantizes weights and "
                "inputs; leave out --scheme to verify them"
            )


def _check_outputs(request: VerifyRequest) -> None:
    """Refuse outputs that cannot be written or would replace other files, before hours of work."""
    outputs = [] if request.dump is None else [(Path(request.dump), _is_dump)]
    if request.report is not None:
        from fp8calib.verification.page.page import is_page

        outputs.insert(0, (Path(request.report), is_page))
    for path, is_ours in outputs:
        check_output_file(path)
        if path.exists() and path.stat().st_size and not is_ours(path):
            raise UsageError(f"{path}: not written by verify", hint="name another file")
        check_output_file(path, force=request.force)
    if len({path.resolve() for path, _ in outputs}) < len(outputs):
        raise UsageError(f"--report and --dump are both {outputs[0][0]}")


def _is_dump(path: Path) -> bool:
    """Whether a file is one that --dump wrote."""
    try:
        header = read_header(path)
    except ModelError:
        return False
    return "reference" in header.tensors and "data" in header.metadata
