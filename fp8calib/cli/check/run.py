"""Run `fp8calib check`: find the model's geometry, replay each engine, print the verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.cli.calibrate.job import REPORT_NAME
from fp8calib.cli.check.settings import CheckSettings
from fp8calib.cli.check.show import show_check_report
from fp8calib.cli.serving import read_replayed_geometry
from fp8calib.cli.setup import quiet_libraries
from fp8calib.dialects.metadata import read_file_origin
from fp8calib.dialects.read import check_origin
from fp8calib.engines.check import check_file, check_folder, withdraw_used
from fp8calib.engines.registry import find_replayed, list_defaults
from fp8calib.engines.replay.folder import ScaleFolder, open_folder
from fp8calib.engines.replay.verdicts import CheckReport
from fp8calib.errors import ModelError, UsageError, VerificationError, shorten
from fp8calib.model.load import fetch_hub_id, find_folder
from fp8calib.stats.calibration_stats import STATS_NAME
from fp8calib.stats.fingerprint import fingerprint_model

_FILE_SUFFIXES = (".json", ".safetensors", ".npz")


def run_check(settings: CheckSettings) -> int:
    """Check, print the verdicts, and return the exit code: 8 unless every engine is ok."""
    engines = _choose_engines(settings.engine)
    quiet_libraries()
    report = _check(settings, engines)
    show_check_report(report, str(settings.path), as_json=settings.as_json)
    return 0 if report.ok else VerificationError.exit_code


def _choose_engines(names: Sequence[str] | None) -> tuple[str, ...]:
    """Resolve the engines on the command line to keys; without any, the default ones."""
    asked = [part.strip() for name in names or list_defaults() for part in name.split(",")]
    return tuple(dict.fromkeys(find_replayed(key).key for key in asked))


def _check(settings: CheckSettings, engines: Sequence[str]) -> CheckReport:
    path = fetch_hub_id(settings.path)
    is_folder = _is_folder(path)
    if is_folder:
        _refuse_calibrate_output(path)
    model = _open_model(settings, path, is_folder=is_folder)
    geometry, is_foreign = read_replayed_geometry(model)
    if is_folder:
        folder = model if settings.model is None else open_folder(path)
        report = check_folder(
            folder, geometry, engines, settings.tp, requires_kv=settings.require_kv
        )
    else:
        _refuse_other_model(path, model)
        report = check_file(path, geometry, engines, settings.tp, model=model)
    return withdraw_used(report, shorten(geometry.model_type)) if is_foreign else report


def _refuse_other_model(path: Path, model: ScaleFolder) -> None:
    """Refuse scales that record another model, as `verify` does.

    Of a folder without weights the config alone is compared. A quantized model is not compared:
    the record is of the unquantized one.

    Raises:
        ModelError: naming the difference.
    """
    origin = read_file_origin(path)
    if origin is None or model.config.get("quantization_config") is not None or model.modelopt:
        return
    try:
        opened = Checkpoint.open(model.path)
    except ModelError:
        half = len(origin.model) // 2
        bare = Checkpoint(model.path, files={}, index=None)
        known = fingerprint_model(model.config, bare)[:half]
        check_origin(str(path), origin, known + origin.model[half:])
        return
    with opened as checkpoint:
        check_origin(str(path), origin, fingerprint_model(model.config, checkpoint))


def _is_folder(path: Path) -> bool:
    try:
        if not path.exists():
            raise UsageError(
                f"{path}: no such file or folder", hint="name a checkpoint folder or a JSON file"
            )
        if path.is_dir():
            return True
    except (OSError, ValueError) as error:
        raise UsageError(f"{str(path)[:200]!a}: cannot be read") from error
    if path.suffix not in _FILE_SUFFIXES or not path.is_file():
        hint = "check reads a checkpoint folder, or a JSON file of any tool with --model"
        raise UsageError(f"{path}: neither a checkpoint folder nor a file of scales", hint=hint)
    return False


def _refuse_calibrate_output(path: Path) -> None:
    """Refuse the output folder of calibrate: engines load one of the formats in it."""
    is_written = all((path / name).exists() for name in (STATS_NAME, REPORT_NAME))
    if not is_written or (path / CONFIG_NAME).exists():
        return
    checkpoints = sorted(config.parent for config in path.glob(f"*/{CONFIG_NAME}"))
    raise UsageError(
        f"{path}: the output folder of calibrate, not a checkpoint",
        hint=f"name what an engine loads, such as {checkpoints[0]}"
        if checkpoints
        else "name what an engine loads: `fp8calib export` writes it from the statistics",
    )


def _open_model(settings: CheckSettings, path: Path, *, is_folder: bool) -> ScaleFolder:
    if settings.model is not None:
        folder = find_folder(settings.model, None, files=("*.json",))
        if not folder.is_dir():
            raise UsageError(f"--model {settings.model}: this is a file, not a model folder")
        return open_folder(folder)
    if not is_folder:
        hint = "the file does not name the layers that have attention"
        raise UsageError(f"{path}: --model is needed to check a file", hint=hint)
    return open_folder(path)
