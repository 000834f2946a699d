"""Match the weights of an FP8 checkpoint with their scales, and check both by their headers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.header import TensorEntry, read_header
from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.checkpoint.weight_index import find_weights
from fp8calib.errors import ModelError, cut_list, refusal
from fp8calib.formats.fp8.quantization_config import FindScheme, StoredScheme, contradiction
from fp8calib.formats.fp8.weights import (
    WEIGHT_FORMATS,
    Companions,
    is_companion,
    is_linear_scale,
    list_scale_shapes,
    name_companions,
)
from fp8calib.numerics.schemes import InputScaling

_TRTLLM_SCALE = "weights_scaling_factor"
_SCALE_DTYPES = frozenset({"F16", "BF16", "F32", "F64", "F8_E8M0"})
EXPONENT_DTYPES = frozenset({"U8", "F8_E8M0"})
"""Dtypes of the scales of MXFP8, as files name them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weight:
    """An FP8 weight, its scheme in the config, and the names of its scales."""

    module: str
    """Path of the linear; for stacked experts, of the parameter."""
    shape: tuple[int, ...]
    """[out, in]; for stacked experts [experts, ., .]."""
    scale_name: str
    input_scale_name: str | None
    companions: Collection[str]
    """All names that its scales and zero points may have."""
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
    return any(_list_weights(read_header(folder / name).tensors) for name in names)


def pair_tensors(
    checkpoint: Checkpoint, find_scheme: FindScheme
) -> tuple[dict[str, Fp8Weight], list[str]]:
    """Find the FP8 weights, and check their scales against their shapes and the config.

    Returns:
        The weights by name, and the names of their zero points.
    """
    names = {name: name_companions(name) for name in _list_weights(checkpoint.tensors)}
    _check_dtypes(checkpoint, names)
    schemes = {name: find_scheme(own.module) for name, own in names.items()}
    weights = {n: _pair_weight(checkpoint, n, own, schemes[n]) for n, own in names.items()}
    paired = {part for weight in weights.values() for part in weight.companions}
    orphans = [name for name in checkpoint.tensors if is_linear_scale(name) and name not in paired]
    if orphans:
        fault = f"scales without an FP8 weight: {cut_list(orphans)}"
        hint = "their weights have another dtype (INT4, FP4), or are missing"
        raise refusal(checkpoint.file_of(orphans[0]), fault, hint=hint)
    zero_points = (part for own in names.values() for part in own.zero_points)
    return weights, [part for part in zero_points if part in checkpoint]


def _list_weights(tensors: Mapping[str, TensorEntry]) -> list[str]:
    """List the FP8 tensors that are not scales; TensorRT-LLM's weights are not supported."""
    return [
        name
        for name, entry in tensors.items()
        if entry.dtype.startswith("F8_")
        and not is_companion(name)
        and f"{name.removesuffix('weight')}{_TRTLLM_SCALE}" not in tensors
    ]


def _check_dtypes(checkpoint: Checkpoint, names: Collection[str]) -> None:
    if not names:
        hint = "name the folder of a checkpoint that is quantized to FP8"
        raise refusal(checkpoint.folder, "there are no FP8 weights", hint=hint)
    by_dtype = {checkpoint.tensors[name].dtype: name for name in names}
    if len(by_dtype) > 1:
        examples = ", ".join(f"{name} is {dtype}" for dtype, name in by_dtype.items())
        hint = "one dtype is supported in a checkpoint"
        raise refusal(checkpoint.folder, f"FP8 weights of several dtypes: {examples}", hint=hint)
    ((dtype, name),) = by_dtype.items()
    if dtype not in WEIGHT_FORMATS:
        hint = f"supported: {', '.join(WEIGHT_FORMATS)}"
        raise refusal(checkpoint.file_of(name), f"{name} is of dtype {dtype}", hint=hint)


def _pair_weight(
    checkpoint: Checkpoint, name: str, names: Companions, scheme: StoredScheme
) -> Fp8Weight:
    dtypes = EXPONENT_DTYPES if scheme.is_mx else _SCALE_DTYPES
    scale_name = _find_one(checkpoint, name, names.scales, dtypes)
    if scale_name is None:
        fault = f"{name} is FP8, but there is no {' or '.join(names.scales[:2])}"
        raise _refuse_missing(checkpoint, name, fault, names.scales)
    _check_shape(checkpoint, name, scale_name, scheme)
    input_name = _find_one(checkpoint, name, names.input_scales, _SCALE_DTYPES)
    is_static = scheme.inputs is InputScaling.STATIC
    if is_static and input_name is None:
        fault = f"the inputs of {names.module} are static, but there is no {names.input_scales[0]}"
        raise _refuse_missing(checkpoint, name, fault, names.input_scales)
    if input_name is not None:
        path, shape = checkpoint.file_of(input_name), checkpoint.tensors[input_name].shape
        if not is_static:
            says = f"{CONFIG_NAME} says that inputs are {scheme.inputs}"
            raise contradiction(path, f"there is {input_name}, but {says}")
        if shape not in ((), (1,)):
            hint = "a static input scale must be one number"
            raise refusal(path, f"{input_name} has shape {list(shape)}", hint=hint)
    return Fp8Weight(
        module=names.module,
        shape=checkpoint.tensors[name].shape,
        scale_name=scale_name,
        input_scale_name=input_name,
        companions=(*names.scales, *names.input_scales, *names.zero_points),
        scheme=scheme,
    )


def _refuse_missing(
    checkpoint: Checkpoint, name: str, fault: str, candidates: Collection[str]
) -> ModelError:
    hint = "the weights cannot be used without it; the download or the export is incomplete"
    beside = (each for each in checkpoint.unlisted if each[1] in candidates)
    for file_name, unlisted in islice(beside, 1):
        hint = f"{unlisted} is in {file_name}, but not in the index"
    return refusal(checkpoint.file_of(name), fault, hint=hint)


def _find_one(
    checkpoint: Checkpoint, name: str, candidates: Collection[str], dtypes: Collection[str]
) -> str | None:
    """Find the one of several names that exists; None if there is none."""
    found = [candidate for candidate in candidates if candidate in checkpoint]
    if len(found) > 1:
        fault = f"{name} has several scales: {', '.join(found)}"
        raise refusal(checkpoint.file_of(name), fault, hint="engines differ in which one they read")
    if not found:
        return None
    dtype = checkpoint.tensors[found[0]].dtype
    if dtype not in dtypes:
        hint = "scales of FP8 weights must be floats"
        if dtypes is EXPONENT_DTYPES:
            hint = "scales of MXFP8 must be exponents: uint8 or e8m0"
        raise refusal(checkpoint.file_of(found[0]), f"{found[0]} is of dtype {dtype}", hint=hint)
    return found[0]


def _check_shape(checkpoint: Checkpoint, name: str, scale_name: str, scheme: StoredScheme) -> None:
    shape, scale_shape = checkpoint.tensors[name].shape, checkpoint.tensors[scale_name].shape
    if len(shape) not in (2, 3) or 0 in shape:
        fault = f"{name} is FP8 of shape {list(shape)}"
        hint = "FP8 weights must be [out, in] or [experts, out, in]"
        raise refusal(checkpoint.file_of(name), fault, hint=hint)
    shapes = list_scale_shapes(shape, scheme.block)
    if scale_shape in shapes[scheme.weights]:
        return
    path, fault = checkpoint.file_of(scale_name), f"{scale_name} has shape {list(scale_shape)}"
    fitting = [granularity for granularity, known in shapes.items() if scale_shape in known]
    if fitting:
        says = f"the config says per {scheme.weights}"
        raise contradiction(path, f"{fault}, which is per {fitting[0]}; {says}")
    expected = " or ".join(str(list(known)) for known in shapes[scheme.weights])
    hint = f"for a weight {list(shape)}, scales per {scheme.weights} are {expected}"
    raise refusal(path, fault, hint=hint)
