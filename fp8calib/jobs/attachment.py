"""Whether KV scales belong to a MODEL that is quantized already, and which servers use them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fp8calib.calibration.calibration_origin import CalibrationOrigin, explain_difference
from fp8calib.calibration.fingerprint import fingerprint_model
from fp8calib.calibration.unquantized_tensors import compare_with_base, hash_unquantized
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.engines.registry import find_replayed, list_defaults
from fp8calib.engines.replay.folder import open_folder
from fp8calib.engines.replay.verdicts import Refusal
from fp8calib.engines.status import Status
from fp8calib.errors import ExportError, ModelError, UsageError
from fp8calib.formats.dialect import Attachment
from fp8calib.formats.metadata import explain_other_attention
from fp8calib.formats.quantized_model import QuantizedModel, has_kv_cache
from fp8calib.quantization.sources.decoded import DecodedCheckpoint

if TYPE_CHECKING:
    from fp8calib.commands.export import ExportRequest
    from fp8calib.commands.extract_kv_scales import ExtractRequest
    from fp8calib.model.shapes import ModelGeometry


def refuse_options(request: ExportRequest | ExtractRequest) -> None:
    """Refuse the options for a quantized MODEL, because it is not quantized.

    Raises:
        UsageError: one was given.
    """
    if request.base is not None or request.other_weights:
        option = "--other-weights" if request.base is None else "--base"
        raise UsageError(
            f"{option}: MODEL is not quantized, so it has to be the calibrated model itself",
            hint=f"leave out {option}, or name the quantized checkpoint as MODEL",
        )


def relate_to_quantized(
    name: str,
    origin: CalibrationOrigin | None,
    checkpoint: Checkpoint,
    geometry: ModelGeometry,
    request: ExportRequest | ExtractRequest,
) -> Attachment:
    """Check that scales belong to the model from which a quantized checkpoint was made.

    Args:
        name: the scales or statistics, in messages.
        origin: the model they were calibrated on; None where they record none.
        checkpoint: the quantized checkpoint.
        geometry: its shape.
        request: has the options for a quantized checkpoint.

    Raises:
        ModelError: they do not belong to it, naming the first difference; or `--base` is not the
            calibrated model.
        UsageError: `--base` is needed.
    """
    fingerprint = fingerprint_model(checkpoint.load_config(), checkpoint)
    plain = Attachment(replaces_scales=request.replace_scales)
    if origin is None:
        return replace(plain, model=fingerprint, accepted=_UNKNOWN)
    if origin.model == fingerprint:
        return plain
    other = f"{checkpoint.folder} was not made from the calibrated model of {name}"
    difference = explain_other_attention(origin.attention, geometry) if origin.attention else ""
    if difference:
        raise ModelError(f"{other}: {difference}", hint=_OTHER_HINT)
    hashes = origin.unquantized if request.base is None else _hash_base(str(request.base), origin)
    if not hashes:
        raise UsageError(
            f"{name}: no hashes of norms and embeddings are recorded, so whether "
            f"{checkpoint.folder} was made from the calibrated model cannot be checked",
            hint="add --base MODEL with the calibrated (unquantized) model",
        )
    try:
        decoded = DecodedCheckpoint(checkpoint)
    except ModelError as error:
        compared = compare_with_base(hashes, checkpoint)
        compared = replace(compared, uncompared=compared.uncompared and error.message)
    else:
        with decoded:
            compared = compare_with_base(hashes, decoded)
    if compared.difference and not request.other_weights:
        raise ModelError(
            f"{other}: {compared.difference}",
            hint=f"{_OTHER_HINT}; methods that fold scales into norms (AWQ, SmoothQuant) change "
            "them: if it was made from this model in such a way, add --other-weights",
        )
    return replace(
        plain,
        model=fingerprint,
        accepted=compared.difference,
        unchecked=compared.uncompared,
        compared=compared.compared,
    )


_UNKNOWN = "the scales record no model"
_OTHER_HINT = "name a checkpoint that was quantized from the calibrated model"


def describe_attachment(
    attachment: Attachment, checkpoint: Checkpoint, geometry: ModelGeometry
) -> Iterator[str]:
    """Describe what was not checked or not replaced, and what --other-weights accepted."""
    if attachment.replaces_scales and not has_kv_cache(checkpoint, geometry):
        yield f"--replace-scales has no effect: {checkpoint.folder} has no KV scales"
    if attachment.accepted == _UNKNOWN:
        yield f"{checkpoint.folder}: {_UNKNOWN}, so only layers and shapes were compared with it"
    if attachment.unchecked:
        yield (
            f"{checkpoint.folder}: its linears were not all compared with those of the calibrated "
            f"model: {attachment.unchecked}; if it is another model with the same norms and "
            "embeddings, the scales are wrong"
        )
    if attachment.accepted and attachment.accepted != _UNKNOWN:
        yield (
            f"{checkpoint.folder} is not known to be made from the calibrated model: "
            f"{attachment.accepted}, and --other-weights accepts it. Scales that AWQ and "
            "SmoothQuant fold into norms and the linears after them leave K and V as they were; "
            "after other changes the KV scales do not fit"
        )
        attentions = [attention for _, attention in geometry.attentions()]
        if any(each.num_heads == each.num_kv_heads for each in attentions):
            yield (
                "this model has as many KV heads as query heads: there AWQ may also fold scales "
                "into v_proj and o_proj, which changes V"
            )


def _hash_base(base: str, origin: CalibrationOrigin) -> dict[str, str]:
    from fp8calib.model.load import find_folder  # noqa: PLC0415 -- imports transformers

    with Checkpoint.open(find_folder(base, None)) as checkpoint:
        fingerprint = fingerprint_model(checkpoint.load_config(), checkpoint)
        if fingerprint != origin.model:
            raise ModelError(
                f"--base {base}: not the calibrated model, which had "
                f"{explain_difference(origin.model, fingerprint)}",
                hint="name the unquantized model that was calibrated",
            )
        return hash_unquantized(checkpoint)


def require_server(written: Path, geometry: ModelGeometry, quantized: QuantizedModel) -> None:
    """Refuse a quantized checkpoint with KV scales that no server would use.

    One of the default engines has to use those of every layer. Whether they load the weights is not
    asked.

    Raises:
        ExportError: naming the method, and the reason for each server.
    """
    folder = open_folder(written)
    faults: dict[str, str] = {}
    for name in list_defaults():
        engine = find_replayed(name)
        assert engine.replay_folder is not None  # noqa: S101 -- the default engines have one
        try:
            report = engine.replay_folder(folder, geometry, 1)
        except Refusal as refusal:
            faults[engine.release] = refusal.why
            continue
        fault = next((each.why for each in report.verdicts if each.status is not Status.USED), None)
        if fault is None:
            return
        faults[engine.release] = fault
    reasons = "; ".join(f"{title}: {why}" for title, why in faults.items())
    has_place = quantized.dialect is not None and quantized.dialect.name in _WITH_PLACE
    raise ExportError(
        f"{quantized.source.folder}: no server uses KV scales beside quant_method "
        f"{quantized.method} in this model: {reasons}",
        hint=_SERVE_PLAIN if has_place else _OTHER_METHODS,
    )


_WITH_PLACE = ("compressed-tensors", "autofp8", "modelopt", "quark")
_SERVE_PLAIN = "serve the quantized checkpoint as it is; with an FP8 cache these servers use 1.0"
_OTHER_METHODS = (
    "vLLM and SGLang have a place for them beside compressed-tensors (which also stores INT4 and "
    "INT8 weights), fp8, ModelOpt and Quark: use a checkpoint in one of these, or the unquantized "
    "model"
)
