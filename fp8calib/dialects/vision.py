"""vLLM's file of scales for the attention of a vision tower: one for q, k and v of each layer.

Source: vLLM `model_executor/layers/attention/mm_encoder_attention.py` (`_load_fp8_scales_file`,
`MMEncoderAttention.process_weights_after_loading`). The server option is
`--mm-encoder-fp8-scale-path`. q, k and v, after rotary embedding, are divided by their scale and
clamped before the cast, and the kernel multiplies by it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from fp8calib.checkpoint.atomic import write_file_atomic
from fp8calib.checkpoint.json_files import load_json_object, parse_unique_keys
from fp8calib.dialects.kv.validate import OTHER_MODEL, check_scales
from fp8calib.dialects.metadata import JSON_ORIGIN_KEY, parse_origin
from fp8calib.dialects.refusals import refusal
from fp8calib.errors import ExportError, cut_list
from fp8calib.fp8.formats import E4M3FN, E4M3FNUZ, Fp8Format
from fp8calib.scales.from_amax import SMALLEST_SCALE
from fp8calib.stats.calibration_origin import CalibrationOrigin

ROLES = ("q", "k", "v")
_NESTED = "layers"
_NOT_LAYERS = ("_comment", JSON_ORIGIN_KEY)
_KEYS = {role: (role, f"{role}_scale") for role in ROLES}
_LARGEST = {E4M3FN.name: E4M3FN.max, E4M3FNUZ.name: 224.0}
"""What vLLM clamps to before the cast: with e4m3fnuz, whose largest value is 240, to 224."""
_EXPECTED = 'expected {"visual.blocks.0.attn.attn": {"q": ..., "k": ..., "v": ...}, ...}'


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionScale:
    """The scales of one attention layer, each an fp32 number for the whole tensor."""

    q: float
    k: float
    v: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionScales:
    """The scales of all attention layers of a vision tower."""

    layers: Mapping[str, VisionScale]
    """By the name of vLLM's attention layer, such as `visual.blocks.0.attn.attn`."""
    origin: CalibrationOrigin | None = None
    """The model and the images that they were calibrated on; None if it is not recorded."""


def compute_vision_scales(
    amaxes: Mapping[str, tuple[float, float, float]],
    *,
    fmt: Fp8Format = E4M3FN,
    headroom: float = 1.0,
) -> dict[str, VisionScale]:
    """Compute fp32 scales from the largest magnitudes of q, k and v of each layer.

    The amax times `headroom` is the largest value that is not clamped. vLLM has 1.5 for the scales
    that it saves itself.

    Raises:
        ExportError: a tensor has only zeros, or a value that is not finite.
    """
    made = {}
    for layer, amax in amaxes.items():
        for role, each in zip(ROLES, amax, strict=True):
            if not 0 < each < float("inf"):
                hint = "calibrate with images that reach the layer"
                raise ExportError(f"{layer}: {each} is no amax of {role}", hint=hint)
        most = torch.tensor(amax, dtype=torch.float32) * headroom
        q, k, v = (most / _LARGEST[fmt.name]).clamp(min=SMALLEST_SCALE).tolist()
        made[layer] = VisionScale(q=q, k=k, v=v)
    return made


def write_vision_scales(path: Path, scales: VisionScales) -> None:
    """Write the file as vLLM itself saves it, with a record of the origin, which vLLM skips.

    Raises:
        ExportError: the file cannot be written.
    """
    origin = {} if scales.origin is None else {JSON_ORIGIN_KEY: scales.origin.to_fields()}
    layers = {name: asdict(scale) for name, scale in scales.layers.items()}
    text = json.dumps({**origin, **layers}, indent=2, allow_nan=False)
    write_file_atomic(path, f"{text}\n".encode())


def read_vision_scales(path: Path, *, layers: Collection[str] | None = None) -> VisionScales:
    """Read the file strictly: vLLM skips what it does not know, and serves NaN and infinity.

    `layers` are vLLM's attention layers, each of which must have scales.

    Raises:
        ModelError: naming the layer and the fault.
    """
    document = load_json_object(path, parse=parse_unique_keys)
    entries = list_vision_layers(document)
    if not entries:
        raise refusal(path, "there are no scales of a vision tower", hint=_EXPECTED)
    if _NESTED in document and (more := sorted({*document} - {_NESTED, *_NOT_LAYERS})):
        fault = f"vLLM reads `{_NESTED}` alone, but there are {cut_list(more)}"
        raise refusal(path, fault, hint=_EXPECTED)
    read = {name: _read_layer(path, name, entry) for name, entry in entries.items()}
    if layers is not None:
        _check_layers(path, read, layers)
    recorded = document.get(JSON_ORIGIN_KEY)
    origin = None if recorded is None else parse_origin(path, JSON_ORIGIN_KEY, recorded)
    return VisionScales(layers=read, origin=origin)


def list_vision_layers(document: Mapping[str, object]) -> Mapping[str, object]:
    """List the entries of a document's layers, unread; none if no entry has q, k and v."""
    nested = document.get(_NESTED)
    found = nested if isinstance(nested, dict) else document
    entries = {name: entry for name, entry in found.items() if name not in _NOT_LAYERS}
    is_known = any(
        isinstance(entry, dict) and all(set(keys) & set(entry) for keys in _KEYS.values())
        for entry in entries.values()
    )
    return entries if is_known else {}


def _read_layer(path: Path, name: str, entry: object) -> VisionScale:
    where = ascii(name)[1:-1][:80]
    if not isinstance(entry, dict):
        raise refusal(path, f"{where}: {entry!a:.60} is not an object", hint=_EXPECTED)
    known = [key for keys in _KEYS.values() for key in keys]
    if more := [ascii(key)[:40] for key in entry if key not in known]:
        raise refusal(path, f"{where}: unknown keys: {cut_list(more)}", hint=_EXPECTED)
    values = {role: _read_number(path, where, role, entry) for role in ROLES}
    return VisionScale(**values)


def _read_number(path: Path, where: str, role: str, entry: Mapping[str, object]) -> float:
    keys = [key for key in _KEYS[role] if key in entry]
    if len(keys) != 1:
        fault = f"{' and '.join(keys)} say the same" if keys else f"there is no scale of {role}"
        raise refusal(path, f"{where}: {fault}", hint=_EXPECTED)
    value = entry[keys[0]]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refusal(path, f"{where}: {keys[0]} is {value!a:.60}, not a number")
    try:
        number = torch.tensor(float(value), dtype=torch.float64).float()
    except OverflowError:
        raise refusal(path, f"{where}: {keys[0]} is too large for a scale") from None
    check_scales(path, f"{where}: {keys[0]}", number)
    return float(number)


def _check_layers(path: Path, read: Collection[str], layers: Collection[str]) -> None:
    if missing := [name for name in layers if name not in read]:
        fault = f"there are no scales for {cut_list(missing)}, so vLLM does not start"
        raise refusal(path, fault, hint=OTHER_MODEL)
    if more := [name for name in read if name not in layers]:
        fault = f"the model has no attention layer {cut_list(more)}"
        raise refusal(path, fault, hint=OTHER_MODEL)
