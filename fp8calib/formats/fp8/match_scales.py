"""Match the weights of an FP8 checkpoint with their scales, and check both by their headers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.header import TensorEntry, read_header
from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.checkpoint.weight_index import find_weights
from fp8calib.errors import ModelError, cut_list, refusal
from fp8calib.formats.fp8.quantization_config import FindScheme, StoredScheme, contradiction
from fp8calib.formats.fp8.weights import (
    WEIGHT_FORMATS,
    is_companion,
    is_linear_scale,
    list_scale_shapes,
    name_companions,
    name_weight_scales,
)
from fp8calib.numerics.schemes import InputScaling

_TRTLLM_SCALE = "weights_scaling_factor"
_SCALE_DTYPES = frozenset({"F16", "BF16", "F32", "F64", "F8_E8M0"})
EXPONENT_DTYPES = frozenset({"U8", "F8_E8M0"})
"""Dtypes of the scales of MXFP8, as files name them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weight:
    """An FP8 weight, its scheme in the config, and the names of its scales."""

    shape: tuple[int, ...]
    """[out, in]; for stacked experts [experts, ., .]."""
    scale_name: str
    input_scale_name: str | None
    scheme: StoredScheme


def is_fp8_checkpoint(folder: Path) -> bool:
    """Tell from headers alone whether a folder is a Hugging Face checkpoint with FP8 weights.

    Raises:
        ModelError: a file is damaged.
    """
    if not folder.is_dir():
        return False
    try:
        names = find_weights(folder)[0]
    except ModelError:
        names = tuple(path.name for path in sorted(folder.glob("*.safetensors")))
    return any(_list_weights(read_header(folder / name)[0]) for name in names)


def pair_tensors(
    checkpoint: Checkpoint, find_scheme: FindScheme
) -> tuple[dict[str, Fp8Weight], set[str]]:
    """Find the FP8 weights, and check their scales against their shapes and the config.

    Returns:
        The weights by name, and the names of all their scales and zero points.
    """
    tensors = checkpoint.tensors
    names = _list_weights(tensors)
    dtypes = {tensors[name].dtype: name for name in names}
    if len(dtypes) != 1 or not dtypes.keys() <= WEIGHT_FORMATS.keys():
        found = ", ".join(f"{name} is {dtype}" for dtype, name in dtypes.items())
        fault = f"the FP8 weights are not of one known dtype: {found}"
        hint = f"they must be {' or '.join(WEIGHT_FORMATS)}"
        raise refusal(checkpoint.folder, fault if names else "there are no FP8 weights", hint=hint)
    schemes = {name: find_scheme(name.removesuffix(".weight")) for name in names}
    weights = {name: _pair_weight(checkpoint, name, scheme) for name, scheme in schemes.items()}
    companions = {each for name in names for each in name_companions(name) if each in tensors}
    if orphans := [name for name in tensors if is_linear_scale(name) and name not in companions]:
        fault = f"scales without an FP8 weight: {cut_list(orphans)}"
        hint = "their weights have another dtype (INT4, FP4), or are missing"
        raise refusal(checkpoint.file_of(orphans[0]), fault, hint=hint)
    return weights, companions


def _list_weights(tensors: Mapping[str, TensorEntry]) -> list[str]:
    """List the FP8 tensors that are not scales; TensorRT-LLM's weights are not supported."""
    return [
        name
        for name, entry in tensors.items()
        if entry.dtype.startswith("F8_")
        and not is_companion(name)
        and f"{name.removesuffix('weight')}{_TRTLLM_SCALE}" not in tensors
    ]


def _pair_weight(checkpoint: Checkpoint, name: str, scheme: StoredScheme) -> Fp8Weight:
    shape = checkpoint.tensors[name].shape
    if len(shape) not in (2, 3) or 0 in shape:
        fault = f"{name} is FP8 of shape {list(shape)}"
        hint = "FP8 weights must be [out, in] or [experts, out, in]"
        raise refusal(checkpoint.file_of(name), fault, hint=hint)
    dtypes = EXPONENT_DTYPES if scheme.is_mx else _SCALE_DTYPES
    needs = f"{name} is FP8"
    scale_name = _find_scale(checkpoint, name, name_weight_scales(name), dtypes, needs) or ""
    _check_shape(checkpoint, name, scale_name, scheme)
    is_static = scheme.inputs is InputScaling.STATIC
    needs = f"the inputs of {name.removesuffix('.weight')} are static" if is_static else ""
    candidates = name_weight_scales(name, of_inputs=True)
    input_name = _find_scale(checkpoint, name, candidates, _SCALE_DTYPES, needs)
    if input_name is not None:
        input_shape = checkpoint.tensors[input_name].shape
        if not is_static or input_shape not in ((), (1,)):
            says = f"{CONFIG_NAME} says that inputs are {scheme.inputs}"
            fault = f"there is {input_name} of shape {list(input_shape)}, but {says}"
            raise contradiction(checkpoint.file_of(input_name), fault)
    return Fp8Weight(shape=shape, scale_name=scale_name, input_scale_name=input_name, scheme=scheme)


def _find_scale(
    checkpoint: Checkpoint,
    name: str,
    candidates: Sequence[str],
    dtypes: Collection[str],
    needs: str,
) -> str | None:
    """Find the scale of a weight that has one of several names.

    `needs` says why it cannot be missing; empty if it can.
    """
    found = [candidate for candidate in candidates if candidate in checkpoint.tensors]
    fault, hint, place = "", "", name
    if not found and needs:
        fault = f"{needs}, but there is no {' or '.join(candidates[:2])}"
        hint = "the weights cannot be used without it; the download or the export is incomplete"
        for file_name, unlisted in checkpoint.unlisted:
            if unlisted in candidates:
                hint = f"{unlisted} is in {file_name}, but not in the index"
    elif len(found) > 1:
        fault = f"{name} has several scales: {', '.join(found)}"
        hint = "engines differ in which one they read"
    elif found and (dtype := checkpoint.tensors[found[0]].dtype) not in dtypes:
        fault, place = f"{found[0]} is of dtype {dtype}", found[0]
        hint = "scales of FP8 weights must be floats, those of MXFP8 exponents: uint8 or e8m0"
    if fault:
        raise refusal(checkpoint.file_of(place), fault, hint=hint)
    return found[0] if found else None


def _check_shape(checkpoint: Checkpoint, name: str, scale_name: str, scheme: StoredScheme) -> None:
    shape, scale_shape = checkpoint.tensors[name].shape, checkpoint.tensors[scale_name].shape
    shapes = list_scale_shapes(shape, scheme.block)
    if scale_shape in shapes[scheme.weights]:
        return
    fitting = [granularity for granularity, known in shapes.items() if scale_shape in known]
    expected = " or ".join(str(list(known)) for known in shapes[scheme.weights])
    fault = f"{scale_name} has shape {list(scale_shape)}"
    if fitting:
        fault += f", which is per {fitting[0]}"
    says = f"the config says per {scheme.weights}, {expected} for a weight {list(shape)}"
    raise contradiction(checkpoint.file_of(scale_name), f"{fault}; {says}")
