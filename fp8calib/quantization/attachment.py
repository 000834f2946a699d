"""Whether KV scales belong to a model that is quantized already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fp8calib.calibration.calibration_stats import RunStats
from fp8calib.calibration.fingerprint import fingerprint_model
from fp8calib.calibration.origin import CalibrationOrigin
from fp8calib.calibration.unquantized_tensors import compare_with_base, hash_unquantized, is_sketch
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.hub import RANGED_FILES
from fp8calib.checkpoint.weight_index import INDEX_NAME, SINGLE_FILE_NAME
from fp8calib.errors import ModelError
from fp8calib.formats.dialect import Attachment
from fp8calib.formats.metadata import describe_attention, explain_other_attention
from fp8calib.formats.quantized_model import find_quantized
from fp8calib.model.geometry import ModelGeometry, find_difference
from fp8calib.model.geometry_from_config import read_geometry
from fp8calib.quantization.sources.decoded import DecodedCheckpoint

_UNKNOWN = "the scales record no model"
_OTHER_HINT = "name a checkpoint that was quantized from the calibrated model"


def adopt_names(stats: RunStats, checkpoint: Checkpoint) -> RunStats:
    """Give statistics the names that a quantized checkpoint of the same model has.

    Raises:
        ModelError: the checkpoint is of another model.
    """
    geometry = read_geometry(checkpoint.folder, checkpoint.load_config())
    recorded = describe_attention(stats.geometry)
    difference = explain_other_attention(recorded, geometry)
    if difference := difference or find_difference(geometry, stats.geometry):
        raise ModelError(
            f"{checkpoint.folder} was not made from the model these statistics were calibrated on: "
            f"{difference}",
            hint=_OTHER_HINT,
        )
    return replace(stats, header=stats.header.model_copy(update={"geometry": geometry}))


def relate_to_quantized(
    name: str,
    origin: CalibrationOrigin | None,
    checkpoint: Checkpoint,
    geometry: ModelGeometry,
    *,
    other_weights: bool,
    replace_scales: bool,
) -> tuple[Attachment, list[str]]:
    """Check that scales belong to the model from which a quantized checkpoint was made.

    Args:
        name: the scales or statistics, in messages.
        origin: the model they were calibrated on; None if they record none.
        checkpoint: the quantized checkpoint.
        geometry: its shape.
        other_weights: whether norms and embeddings may differ.
        replace_scales: whether the scales replace those of the checkpoint.

    Returns:
        How they are added to it, and what was not compared, or differs and was accepted.

    Raises:
        ModelError: they do not belong to it, naming the first difference; or they record another
            model, and nothing of its weights.
    """
    fingerprint = fingerprint_model(checkpoint.load_config(), checkpoint)
    plain = Attachment(replaces_scales=replace_scales)
    if origin is None:
        note = f"{checkpoint.folder}: {_UNKNOWN}, so only layers and shapes were compared with it"
        return replace(plain, model=fingerprint, accepted=_UNKNOWN), [note]
    if origin.model == fingerprint:
        return plain, []
    other = f"{checkpoint.folder} was not made from the calibrated model of {name}"
    difference = explain_other_attention(origin.attention, geometry) if origin.attention else ""
    hashes = origin.unquantized
    if not hashes and not difference:
        raise ModelError(
            f"{name}: no hashes of norms and embeddings are recorded, so whether "
            f"{checkpoint.folder} was made from the calibrated model cannot be checked",
            hint="name the statistics, a kv-overlay or kv_scales.safetensors, which record them",
        )
    if difference:
        raise ModelError(f"{other}: {difference}", hint=_OTHER_HINT)
    difference, found = compare_weights(hashes, checkpoint)
    unchecked = found.get("unchecked", "")
    notes = _list_accepted(
        difference, unchecked, other, checkpoint.folder, other_weights=other_weights
    )
    return replace(plain, model=fingerprint, accepted=difference, **found), notes


def compare_source(
    source: Path, model: Checkpoint, *, other_weights: bool
) -> tuple[str, list[str]]:
    """Check that a checkpoint whose scales record no model was made from an unquantized one.

    What it names otherwise is not compared. On the Hub it is not read: embeddings are large.

    Returns:
        Which linears were compared, in words; and what was not compared, or differs and was
        accepted.

    Raises:
        ModelError: it was not made from the model, naming the first difference.
    """
    note = f"{source}: {_UNKNOWN}, so only layers and shapes were compared with {model.folder}"
    is_model = any((source / name).is_file() for name in (INDEX_NAME, SINGLE_FILE_NAME))
    if not is_model or any(each in RANGED_FILES for each in source.glob("*.safetensors")):
        return "", [note]
    with Checkpoint.open(source) as stored:
        recorded = {
            name: text
            for name, text in hash_unquantized(model).items()
            if is_sketch(text) or name in stored.tensors
        }
        if all(map(is_sketch, recorded.values())):
            return "", [note]
        difference, found = compare_weights(recorded, stored)
    other, unchecked = f"{source} was not made from {model.folder}", found.get("unchecked", "")
    notes = _list_accepted(difference, unchecked, other, source, other_weights=other_weights)
    return found.get("compared", ""), notes


def _list_accepted(
    difference: str,
    unchecked: str,
    other: str,
    folder: Path,
    *,
    other_weights: bool,
) -> list[str]:
    """Say what was not compared, or differs and is accepted; `other` begins the error if not."""
    if difference and not other_weights:
        hint = f"{_OTHER_HINT}; methods that fold scales into norms (AWQ, SmoothQuant) change "
        hint += "them: if it was made from this model in such a way, add --other-weights"
        raise ModelError(f"{other}: {difference}", hint=hint)
    notes = []
    if unchecked:
        notes.append(
            f"{folder}: its linears were not all compared with those of the calibrated model: "
            f"{unchecked}; if it is another model with the same norms and embeddings, "
            "the scales are wrong"
        )
    if difference:
        notes.append(
            f"{folder} is not known to be made from the calibrated model: {difference}, "
            "and --other-weights accepts it. Scales that AWQ and SmoothQuant fold into norms and "
            "the linears after them leave K and V as they were; after other changes the KV scales "
            "do not fit: without shared KV heads, AWQ may also fold scales into v_proj"
        )
    return notes


def compare_weights(
    recorded: Mapping[str, str], checkpoint: Checkpoint
) -> tuple[str, dict[str, Any]]:
    """Compare a checkpoint, decoded if it can be, with the record: see `compare_with_base`."""
    if find_quantized(checkpoint) is None:
        return compare_with_base(recorded, checkpoint)
    try:
        decoded = DecodedCheckpoint(checkpoint)
    except ModelError as error:
        difference, found = compare_with_base(recorded, checkpoint)
        return difference, found | ({"unchecked": error.message} if found.get("unchecked") else {})
    with decoded:
        return compare_with_base(recorded, decoded)
