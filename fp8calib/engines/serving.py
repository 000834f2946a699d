"""Which engines serve what was just written, and by which command: found by replaying them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fp8calib.checkpoint.model_config import find_quantization_configs
from fp8calib.engines.check import check_file, check_folder, withdraw_used
from fp8calib.engines.engine import Engine, Launch
from fp8calib.engines.registry import ENGINES
from fp8calib.engines.replay.folder import ScaleFolder, open_folder, place_tensor_file
from fp8calib.engines.replay.recorded_dtype import find_cache_flag
from fp8calib.engines.replay.verdicts import EngineReport, Refusal
from fp8calib.engines.status import Status
from fp8calib.errors import format_ranges, shorten
from fp8calib.geometry.model_geometry import ModelGeometry

UNKNOWN = "unknown: "
"""How the reason of a limitation starts that cannot be judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingCommand:
    """The command line that serves a file with an engine."""

    engine: str
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Limitation:
    """Why an engine cannot use a file, or a condition under which it does."""

    engine: str
    why: str
    is_blocking: bool
    """The engine cannot use it; otherwise `why` is a condition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BriefServing:
    """Whether an engine serves a file that is only listed by name (`Engine.is_brief`)."""

    engine: str
    name: str
    """What `check --engine` calls it."""
    command: str
    """Empty where it cannot use the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """How engines serve one file or folder."""

    commands: tuple[ServingCommand, ...]
    limitations: tuple[Limitation, ...]
    others: tuple[BriefServing, ...]
    """Without those of which it is unknown."""


Reports = Iterable[tuple[Engine, EngineReport]]


def find_scale_serving(
    written: Path, target: Path, geometry: ModelGeometry, *, model: Path, model_name: str, tp: int
) -> Serving:
    """Find who serves KV scales that were written for a model.

    Args:
        written: the overlay, or the file of scales, where it is now.
        target: where it will be.
        geometry: the shape of the model.
        model: the model's folder.
        model_name: the model as the user named it.
        tp: the number of ranks to serve with.
    """
    if written.is_dir():
        folder = open_folder(written)
        flag = find_cache_flag(folder)
        return _collect(
            _replay_folder(folder, geometry, tp),
            lambda _, launch: launch.spell(str(target), cache_type=flag, tp=tp),
        )
    if written.suffix == ".safetensors":
        limitations = _limit_tensor_file(written, geometry, tp, model)
        return Serving(commands=(), limitations=tuple(limitations), others=())
    reports = _replay_file(written, geometry, tp, model)

    def spell(engine: Engine, launch: Launch) -> str:
        flag = "" if engine.find_cache_type is None else engine.find_cache_type(written)
        return launch.spell(model_name, scales=str(target), tp=tp, cache_type=flag)

    return _collect(reports, spell)


def list_servers_without(written: Path, geometry: ModelGeometry) -> dict[str, str]:
    """List why servers do not use the KV scales of a checkpoint, by their titles.

    Empty if one of them uses those of every layer. Whether they load the weights is not asked.
    """
    folder = open_folder(written)
    faults: dict[str, str] = {}
    for engine in _list_engines():
        if engine.is_brief or engine.launch is None or engine.replay_folder is None:
            continue
        try:
            report = engine.replay_folder(folder, geometry, 1)
        except Refusal as refusal:
            faults[engine.release] = refusal.why
            continue
        fault = next((each.why for each in report.verdicts if each.status is not Status.USED), None)
        if fault is None:
            return {}
        faults[engine.release] = fault
    return faults


def find_checkpoint_serving(
    folder: ScaleFolder,
    target: Path,
    geometry: ModelGeometry,
    *,
    has_kv: bool,
    is_foreign: bool,
    cache_type: str = "",
    plain_caches: Sequence[int] = (),
) -> Serving:
    """Find who serves a checkpoint with FP8 weights.

    Args:
        folder: it, where it is now.
        target: where it will be.
        geometry: the shape of the model.
        has_kv: whether it holds KV scales; otherwise its KV cache is served in 16 bits.
        is_foreign: the type of the model is unknown to this tool.
        cache_type: the type of the KV cache; empty for FP8, where there are scales.
        plain_caches: the layers whose KV cache stays in 16 bits.
    """

    def spell(engine: Engine, launch: Launch) -> str:
        if _explain_cache(engine, cache_type, plain_caches):
            return ""
        is_quantized = has_kv or bool(cache_type)
        command = launch.spell(str(target), has_kv=is_quantized, cache_type=cache_type)
        skip = engine.numerics.spell_skip(plain_caches) if engine.numerics else ""
        return f"{command} {skip}".rstrip()

    found = _collect(
        _replay_folder(folder, geometry, 1, is_foreign=is_foreign),
        spell,
        has_fp8_weights=True,
        has_kv=has_kv,
    )
    blocked = {each.engine for each in found.limitations if each.is_blocking}
    refused = (
        Limitation(engine=engine.title, why=why, is_blocking=True)
        for engine in _list_engines()
        if engine.launch and not engine.is_brief and engine.title not in blocked
        if (why := _explain_cache(engine, cache_type, plain_caches))
    )
    return replace(found, limitations=(*found.limitations, *refused))


def _explain_cache(engine: Engine, cache_type: str, plain_caches: Sequence[int]) -> str:
    """Say why an engine cannot serve a KV cache as it is wanted; empty if it can."""
    if cache_type and cache_type not in engine.cache_types:
        return f"it has no --kv-cache-dtype {cache_type}"
    if plain_caches and not engine.can_skip_caches:
        return f"it cannot leave the KV cache of layers {format_ranges(plain_caches)} in 16 bits"
    return ""


def _list_engines() -> Iterator[Engine]:
    """List the replayed engines that have a loader or a server of their own."""
    for engine in ENGINES.values():
        is_own = engine.is_brief or not engine.loads_like
        if is_own and (engine.replay_folder or engine.replay_json):
            yield engine


def _replay_folder(
    folder: ScaleFolder, geometry: ModelGeometry, tp: int, *, is_foreign: bool = False
) -> Reports:
    asked = [engine for engine in _list_engines() if engine.replay_folder]
    keys = [engine.key for engine in asked]
    report = check_folder(folder, geometry, keys, tp)
    if is_foreign:
        report = withdraw_used(report, shorten(geometry.model_type))
    return [(engine, report.engines[engine.key]) for engine in asked]


def _replay_file(path: Path, geometry: ModelGeometry, tp: int, model: Path) -> Reports:
    asked = list(_list_engines())
    keys = [engine.key for engine in asked]
    report = check_file(path, geometry, keys, tp, model=open_folder(model))
    return [(engine, report.engines[engine.key]) for engine in asked]


def _limit_tensor_file(
    path: Path, geometry: ModelGeometry, tp: int, model: Path
) -> Iterator[Limitation]:
    """Say when a file of tensors is read, and what happens to it where it is."""
    folder = open_folder(model)
    asked = [each for each in _list_engines() if each.replay_folder and not each.is_brief]
    if folder.modelopt is not None or any(find_quantization_configs(folder.config)):
        why = "the model is quantized: `fp8calib extract-kv-scales` adds this file to it"
        yield from (Limitation(engine=each.title, why=why, is_blocking=True) for each in asked)
        return
    placed = place_tensor_file(folder, path)
    report = check_folder(placed, geometry, [engine.key for engine in asked], tp)
    for engine in asked:
        if not engine.tensor_file_condition:
            why = "it reads no file of scales beside the checkpoint's own files"
            yield Limitation(engine=engine.title, why=why, is_blocking=True)
            continue
        found = list(_list_limitations(engine, report.engines[engine.key]))
        if not any(item.is_blocking for item in found):
            why = engine.tensor_file_condition
            yield Limitation(engine=engine.title, why=why, is_blocking=False)
        yield from found


def _collect(
    reports: Reports,
    spell: Callable[[Engine, Launch], str],
    *,
    has_fp8_weights: bool = False,
    has_kv: bool = True,
) -> Serving:
    commands: list[ServingCommand] = []
    limitations: list[Limitation] = []
    others: list[BriefServing] = []
    for engine, report in reports:
        found = list(
            _list_limitations(engine, report, has_fp8_weights=has_fp8_weights, has_kv=has_kv)
        )
        is_unknown = bool(report.unknown)
        is_blocked = is_unknown or any(item.is_blocking for item in found)
        command = "" if is_blocked or engine.launch is None else spell(engine, engine.launch)
        if engine.is_brief and is_unknown:
            continue
        if engine.is_brief:
            others.append(BriefServing(engine=engine.title, name=engine.key, command=command))
            continue
        limitations += found
        if command:
            commands.append(ServingCommand(engine=engine.title, command=command))
    return Serving(commands=tuple(commands), limitations=tuple(limitations), others=tuple(others))


def _list_limitations(
    engine: Engine, report: EngineReport, *, has_fp8_weights: bool = False, has_kv: bool = True
) -> Iterator[Limitation]:
    """List why a replay is not ok, and its conditions; FP8 weights are of use without KV scales."""
    faults = (each for each in report.verdicts if each.status is not Status.USED)
    fault = next((each for each in faults if has_kv or each.status is Status.REFUSED), None)
    if report.weights is not None:
        yield Limitation(engine=engine.title, why=report.weights.why, is_blocking=True)
    elif fault is not None and has_fp8_weights and fault.status is not Status.REFUSED:
        yield Limitation(engine=engine.title, why=f"KV scales: {fault.why}", is_blocking=False)
    elif fault is not None:
        yield Limitation(engine=engine.title, why=fault.why, is_blocking=not report.only_on)
    unknown = [f"{UNKNOWN}{why}" for why in report.unknown if report.weights is None]
    for why in (*unknown, *report.problems):
        yield Limitation(engine=engine.title, why=why, is_blocking=False)
