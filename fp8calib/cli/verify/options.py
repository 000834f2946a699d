"""Check the options of `fp8calib verify` and resolve their names, before a model is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fp8calib.checkpoint.atomic import check_output_file
from fp8calib.checkpoint.output_files import probe_output_files
from fp8calib.cli.setup import check_device_map
from fp8calib.cli.verify.job import ResolvedOptions
from fp8calib.cli.verify.settings import VerifySettings
from fp8calib.engines.registry import find_emulated
from fp8calib.errors import UsageError
from fp8calib.fp8.formats import FP8_FORMATS
from fp8calib.fp8.schemes import find_scheme
from fp8calib.machine.devices import choose_device
from fp8calib.scales.rules import Rule, parse_rule
from fp8calib.verification.candidates import find_candidate
from fp8calib.verification.judge.gates import load_gate
from fp8calib.verification.report import SCALE_ONE, SERVER
from fp8calib.verification.tasks.task_files import require_harness

_RESERVED_NAMES = frozenset({"reference", SCALE_ONE, SERVER, "__metadata__"})


def resolve_options(settings: VerifySettings) -> ResolvedOptions:
    """Check the options that need no model, and resolve their names.

    Raises:
        UsageError: an option is invalid, or names something unknown.
        ModelError: a candidate's folder links to files outside of it.
    """
    check_device_map(settings.device_map, settings.device)
    _check_candidate_names(settings.scales)
    _check_outputs(settings)
    _check_task_options(settings)
    _check_server_options(settings)
    if settings.fp8_dtype not in FP8_FORMATS:
        raise UsageError(
            f"--fp8-dtype {settings.fp8_dtype}: unknown format",
            hint=f"known: {', '.join(FP8_FORMATS)}",
        )
    engine, numerics = find_emulated(settings.engine)
    return ResolvedOptions(
        engine=engine,
        numerics=numerics,
        scheme=None if settings.scheme is None else find_scheme(settings.scheme),
        rules=_parse_rules(settings.rules),
        fmt=FP8_FORMATS[settings.fp8_dtype],
        gate=None if settings.gate is None else load_gate(settings.gate),
        device=choose_device(settings.device),
    )


def _parse_rules(names: tuple[str, ...]) -> tuple[Rule, ...]:
    if not all(names):
        raise UsageError("--rules: empty name", hint="give rules as NAME,NAME")
    rules = tuple(map(parse_rule, names))
    for rule in rules:
        if rules.count(rule) > 1:
            raise UsageError(f"--rules: {rule} is given twice", hint="name each rule once")
    return rules


def _check_task_options(settings: VerifySettings) -> None:
    if not all(settings.tasks):
        raise UsageError("--tasks: empty name", hint="give tasks as NAME,NAME")
    if settings.tasks:
        require_harness()
    elif settings.limit is not None:
        raise UsageError("--limit has no effect without --tasks", hint="add --tasks NAME")


def _check_server_options(settings: VerifySettings) -> None:
    named = (("--server-model", settings.server_model), ("--server-kind", settings.server_kind))
    useless = [option for option, value in (*named, ("--resume", settings.resume)) if value]
    if settings.server is None and useless:
        raise UsageError(f"{useless[0]} has no effect without --server", hint="add --server URL")


def _check_candidate_names(names: Sequence[str]) -> None:
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


def _check_outputs(settings: VerifySettings) -> None:
    """Refuse outputs that cannot be written or would replace an input, before hours of work.

    Raises:
        UsageError: naming the path.
    """
    outputs = [path for path in (settings.report, settings.dump) if path is not None]
    for path in outputs:
        if not path.absolute().parent.is_dir():
            raise UsageError(f"{path}: no such folder: {path.parent}")
        check_output_file(path, force=settings.force)
        for name in (settings.model, *settings.scales, *(settings.data or ())):
            _refuse_input(path, Path(name))
    if len(outputs) > 1 and outputs[0].resolve() == outputs[1].resolve():
        raise UsageError(f"--report and --dump are both {outputs[0]}")
    probe_output_files(outputs)


def _refuse_input(path: Path, source: Path) -> None:
    try:
        is_inside = source.exists() and path.resolve().is_relative_to(source.resolve())
    except (OSError, ValueError):
        return
    if is_inside and (path.exists() or source.is_file()):
        raise UsageError(f"{path} would replace an input", hint="name another file")
