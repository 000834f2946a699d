"""Look at what a command wrote, as `check` does: a line for each engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from fp8calib.commands.check import CheckRequest, EngineResult, check_path
from fp8calib.commands.result import WrittenCheck
from fp8calib.engines.engine import Engine
from fp8calib.engines.registry import find_replayed, list_defaults
from fp8calib.errors import Fp8CalibError, format_ranges
from fp8calib.formats.registry import find_dialect

_NO_OVERLAY = ("tgi",)
"""Formats whose folders no engine of `check` loads."""


def check_formats(
    names: Iterable[str], written: Path, target: Path, *, tp: int = 1
) -> tuple[WrittenCheck, ...]:
    """Check the checkpoints among written formats.

    Args:
        names: the formats.
        written: the output folder where it is now.
        target: the output folder where it will be.
        tp: ranks.
    """
    dialects = [find_dialect(name) for name in names]
    folders = [each.path() for each in dialects if each.needs_model]
    return tuple(
        found
        for path in folders
        if path not in _NO_OVERLAY
        for found in check_written(written / path, target / path, path=path, tp=tp)
    )


def check_written(
    written: Path,
    target: Path,
    *,
    path: str = ".",
    tp: int = 1,
    plain_caches: Sequence[int] = (),
) -> tuple[WrittenCheck, ...]:
    """Check a checkpoint.

    Args:
        written: where it is now.
        target: where it will be.
        path: how the result names it.
        tp: ranks.
        plain_caches: the layers whose KV cache stays in 16 bits.
    """
    engines = [find_replayed(name) for name in list_defaults()]
    try:
        report = check_path(CheckRequest(written, tp=tp))
    except Fp8CalibError as error:
        return tuple(
            WrittenCheck(
                path=path,
                engine=engine.release,
                verdict="unknown",
                summary=f"unknown: {error.message}",
                command="",
            )
            for engine in engines
        )
    return tuple(
        _sum_up(path, target, engine, report.engines[engine.key], plain_caches, tp)
        for engine in engines
    )


def _sum_up(
    path: str,
    target: Path,
    engine: Engine,
    found: EngineResult,
    plain_caches: Sequence[int],
    tp: int,
) -> WrittenCheck:
    why = _explain_cache(engine, plain_caches) or found.reason
    verdict = "not ok" if found.ok and why else found.verdict
    command = ""
    if verdict == "ok" and engine.launch is not None:
        skip = engine.numerics.spell_skip(plain_caches) if engine.numerics else ""
        spelled = engine.launch.spell(str(target), has_kv=found.asks_for_kv, tp=tp)
        command = f"{spelled} {skip}".rstrip()
    return WrittenCheck(
        path=path,
        engine=engine.release,
        verdict=verdict,
        summary=found.summary if verdict == "ok" else f"{verdict}: {why}",
        command=command,
    )


def _explain_cache(engine: Engine, plain_caches: Sequence[int]) -> str:
    """Say why an engine cannot serve a KV cache as it is wanted; empty if it can."""
    if plain_caches and not engine.can_skip_caches:
        return f"it cannot leave the KV cache of layers {format_ranges(plain_caches)} in 16 bits"
    return ""
