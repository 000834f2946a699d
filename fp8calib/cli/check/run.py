"""What `fp8calib check` does: find the model's shape, ask every engine, show the verdicts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.cli.calibrate.job import REPORT_NAME
from fp8calib.cli.check.show import show_check_report
from fp8calib.cli.setup import quiet_libraries
from fp8calib.engines.check import check_file, check_folder, withdraw_used
from fp8calib.engines.registry import find_replayed, list_defaults
from fp8calib.engines.replay.folder import ScaleFolder, open_folder
from fp8calib.engines.replay.geometry_from_names import read_named_geometry
from fp8calib.engines.replay.verdicts import CheckReport
from fp8calib.errors import UsageError, VerificationError, shorten
from fp8calib.model.geometry_from_config import is_known, read_geometry
from fp8calib.model.load import find_folder
from fp8calib.stats.calibration_stats import STATS_NAME

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*(?<!\.json)(?<!\.safetensors)(?<!\.npz)")
"""ORG/NAME; a name alone is taken for a path that is not there."""
_FILE_SUFFIXES = (".json", ".safetensors", ".npz")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    """The command line, resolved."""

    path: Path
    engines: tuple[str, ...]
    tp: int
    model: str | None
    as_json: bool


def run_check(settings: CheckSettings) -> int:
    """Check, show, and give the exit code: 8 unless every layer of every engine is served."""
    quiet_libraries()
    report = _check(settings)
    show_check_report(report, str(settings.path), as_json=settings.as_json)
    return 0 if report.ok else VerificationError.exit_code


def choose_engines(names: Sequence[str] | None) -> tuple[str, ...]:
    """Give the keys of the engines on the command line, or the default ones.

    Raises:
        UsageError: one is unknown, or nothing of it is replayed.
    """
    asked = [part.strip() for name in names or list_defaults() for part in name.split(",")]
    return tuple(dict.fromkeys(find_replayed(key).key for key in asked))


def _check(settings: CheckSettings) -> CheckReport:
    path = _fetch(settings.path)
    is_folder = _is_folder(path)
    if is_folder:
        _refuse_folder_of_forms(path)
    model = _open_model(settings, path, is_folder=is_folder)
    is_foreign = "auto_map" in model.config and not is_known(model.config)
    geometry = read_named_geometry(model) if is_foreign else read_geometry(model.path, model.config)
    if is_folder:
        folder = model if settings.model is None else open_folder(path)
        report = check_folder(folder, geometry, settings.engines, settings.tp)
    else:
        report = check_file(path, geometry, settings.engines, settings.tp, model=model)
    return withdraw_used(report, shorten(geometry.model_type)) if is_foreign else report


def _fetch(path: Path) -> Path:
    """Give the folder of a checkpoint on the hub where `path` is its id, else the path itself."""
    try:
        is_there = path.exists()
    except (OSError, ValueError):
        return path
    if is_there or not _HUB_ID.fullmatch(str(path)):
        return path
    return find_folder(str(path), None)


def _is_folder(path: Path) -> bool:
    try:
        if not path.exists():
            raise UsageError(f"{path}: no such file or folder", hint="name a checkpoint or a JSON")
        if path.is_dir():
            return True
    except (OSError, ValueError) as error:
        raise UsageError(f"{str(path)[:200]!a}: cannot be looked at") from error
    if path.suffix not in _FILE_SUFFIXES or not path.is_file():
        hint = "check reads a checkpoint folder, or a JSON file of any tool with --model"
        raise UsageError(f"{path}: neither", hint=hint)
    return False


def _refuse_folder_of_forms(path: Path) -> None:
    """Refuse what calibrate writes as a whole: engines load one of the forms in it."""
    is_written = all((path / name).exists() for name in (STATS_NAME, REPORT_NAME))
    if not is_written or (path / CONFIG_NAME).exists():
        return
    forms = sorted(config.parent for config in path.glob(f"*/{CONFIG_NAME}"))
    raise UsageError(
        f"{path}: what calibrate wrote, and no checkpoint itself",
        hint=f"name what an engine loads, such as {forms[0]}"
        if forms
        else "name what an engine loads: `fp8calib export` makes it of the statistics",
    )


def _open_model(settings: CheckSettings, path: Path, *, is_folder: bool) -> ScaleFolder:
    if settings.model is not None:
        folder = find_folder(settings.model, None, files=("*.json",))
        if not folder.is_dir():
            raise UsageError(f"--model {settings.model}: a file, not a model folder")
        return open_folder(folder)
    if not is_folder:
        hint = "the file does not say how many layers there are, nor which have attention"
        raise UsageError(f"{path}: a file needs --model", hint=hint)
    return open_folder(path)
