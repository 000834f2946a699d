"""Whether an engine can load the checkpoint that a plan describes, before a weight is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from fp8calib.checkpoint.json_files import encode_json
from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.engines.check import check_folder
from fp8calib.engines.registry import list_defaults
from fp8calib.engines.replay.folder import open_folder
from fp8calib.engines.replay.verdicts import EngineReport
from fp8calib.engines.status import Status
from fp8calib.engines.weights.missing_tensors import find_first_fault
from fp8calib.errors import ExportError, ModelError, shorten
from fp8calib.jobs.replayed_geometry import read_replayed_geometry
from fp8calib.quantization.plan import QuantizePlan
from fp8calib.quantization.shard_layout import Constant, WeightScale
from fp8calib.quantization.shard_writer import encode_scale

_CONFIG_HINT = "use the config.json that its weights were saved with"
_FORCE_HINT = "--allow-unservable writes the checkpoint as it is"
_NOT_CHECKED = "whether an engine can load the output is not checked: {}"


def require_servable(plan: QuantizePlan, source: Path) -> str:
    """Refuse a checkpoint that no engine of the default list can load.

    Of a model whose shape `check` does not know, a note says that this was not checked.

    Args:
        plan: the checkpoint.
        source: the model's folder.

    Returns:
        The note, also where only one engine can load it; empty where there is nothing to note.

    Raises:
        ModelError: no model can be built from the config, or tensors of it are missing or have
            other shapes.
        ExportError: naming why each engine cannot load it.
    """
    reports, unchecked = replay_plan(plan, source, list_defaults())
    if unchecked:
        return unchecked
    faults = {engine: find_load_fault(report) for engine, report in reports.items()}
    able = [engine for engine, fault in faults.items() if not fault]
    what = f"{plan.settings.schemes.name} of this model in this format"
    if not able:
        listed = "; ".join(f"{engine}: {why}" for engine, why in faults.items())
        raise ExportError(
            f"none of {', '.join(faults)} can load {what}: {listed}",
            hint=f"choose another --scheme or --format; {_FORCE_HINT}",
        )
    is_last = len(able) == 1 < len(faults)
    return f"of {', '.join(faults)}, only {able[0]} can load {what}" if is_last else ""


def replay_plan(
    plan: QuantizePlan, source: Path, engines: Sequence[str]
) -> tuple[Mapping[str, EngineReport], str]:
    """Report what each engine would do with a checkpoint, or say why that is not known.

    What `check` reads is written to a temporary folder: configs, headers and scales, of which
    those of weights are 1.0. The other data are holes in the files.

    Returns:
        The report of each engine; and why nothing was checked, else empty.

    Raises:
        ModelError: no model can be built from the config, or tensors of it are missing or have
            other shapes.
    """
    from fp8calib.model.geometry_from_config import (  # noqa: PLC0415 -- imports transformers
        UnusableConfigError,
    )

    with TemporaryDirectory(prefix="fp8calib-") as name:
        folder = Path(name)
        write_outline(plan, folder)
        opened = open_folder(folder)
        try:
            geometry, is_foreign = read_replayed_geometry(opened)
        except UnusableConfigError as error:
            message = error.message.replace(str(folder), str(source))
            raise ModelError(message, hint=f"{_CONFIG_HINT}; {_FORCE_HINT}") from error
        except ModelError as error:
            return {}, _NOT_CHECKED.format(error.message.replace(str(folder), str(source)))
        if is_foreign:
            return {}, _NOT_CHECKED.format(f"{source}: its model_type needs code of its own")
        tensors = {name: entry for held in opened.tensors.values() for name, entry in held.items()}
        _refuse_fault(source, find_first_fault(geometry, tensors, has_linears=False))
        reports = check_folder(opened, geometry, engines, 1).engines
    if not all(map(find_load_fault, reports.values())):
        _refuse_fault(source, find_first_fault(geometry, tensors, has_linears=True))
    return reports, ""


def _refuse_fault(source: Path, fault: str) -> None:
    if fault:
        hint = f"download the model again, or {_CONFIG_HINT}; {_FORCE_HINT}"
        raise ModelError(f"{source}: {fault}", hint=hint)


def write_outline(plan: QuantizePlan, folder: Path) -> None:
    """Write what `check` reads of a checkpoint: configs, headers, and scales of 1.0.

    Files have holes for the rest.
    """
    for document, content in {CONFIG_NAME: plan.config, **plan.json_files}.items():
        (folder / document).write_bytes(encode_json(content))
    for shard in plan.shards:
        with (folder / shard.name).open("wb") as file:
            file.write(shard.head)
            for tensor in shard.tensors:
                if isinstance(tensor.content, WeightScale):
                    values = torch.ones(tensor.shape)
                elif isinstance(tensor.content, Constant):
                    values = tensor.content.value
                else:
                    continue
                file.seek(shard.starts[tensor.name])
                file.write(encode_scale(tensor, values))
            file.truncate(shard.size_bytes)


def find_load_fault(report: EngineReport) -> str:
    """Say why an engine cannot load the weights; empty where it can."""
    if report.weights is not None:
        return shorten(report.weights.why)
    refused = (each.why for each in report.verdicts if each.status is Status.REFUSED)
    return shorten(next(refused, ""))


def find_fault(report: EngineReport) -> str:
    """Say why an engine does not load the weights or use the KV scales for sure; empty if ok."""
    if report.ok:
        return ""
    unused = (each.why for each in report.verdicts if each.status is not Status.USED)
    doubts = (*report.unknown, *report.suspicious, *unused)
    return find_load_fault(report) or shorten(next(iter(doubts), ""))
