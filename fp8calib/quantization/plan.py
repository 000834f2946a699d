"""Plan what `quantize` writes, every file and its layout, from headers and config alone."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fp8calib.calibration.fingerprint import fingerprint_model
from fp8calib.calibration.origin import CalibrationOrigin
from fp8calib.checkpoint.checkpoint import Checkpoint, refuse_duplicate_tensors
from fp8calib.checkpoint.json_files import encode_json
from fp8calib.checkpoint.model_config import CONFIG_NAME, replace_dtype
from fp8calib.checkpoint.overlay import CARD_NAME, find_side_files
from fp8calib.checkpoint.weight_index import INDEX_NAME, SINGLE_FILE_NAME
from fp8calib.errors import ExportError
from fp8calib.formats.fp8.dialect import ConfigJob, Fp8Dialect
from fp8calib.formats.fp8.registry import FP8_DIALECTS
from fp8calib.formats.metadata import make_metadata
from fp8calib.model.geometry import ModelGeometry
from fp8calib.model.module_paths import name_fused_path, split_expert
from fp8calib.numerics.schemes import MX_BLOCK, Granularity, Scheme, count_parts
from fp8calib.quantization.ignored import span_layers, spell_options
from fp8calib.quantization.matrices import Matrix
from fp8calib.quantization.select import Selection, find_selection
from fp8calib.quantization.settings import PlanSettings, check_layer_schemes
from fp8calib.quantization.shard_layout import Codes, OutputTensor, ShardLayout, lay_out

if TYPE_CHECKING:  # only named
    from fp8calib.quantization.sources.decoded import DecodedCheckpoint

_ROUNDING_KEY = "fp8calib.rounding"
_TAG_KEY = "fp8calib.quantize"
_SHOWN = 5
_VERSION = 1
"""Version of the bytes that a plan makes of a source; a resumed run must not mix two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedScales:
    """Scales that come from calibration, each fp32 []."""

    inputs: Mapping[str, torch.Tensor]
    """Path of the linear in the checkpoint -> scale of its input."""
    kv: Mapping[str, torch.Tensor]
    """Name of the tensor -> scale of K or V."""
    origin: CalibrationOrigin | None = None
    """The model and the text they come from; None if unknown, or if there are no scales."""
    geometry: ModelGeometry | None = None
    """The geometry of that model."""
    notes: tuple[str, ...] = ()
    """What a user should know about them."""


NO_SCALES = CalibratedScales(inputs={}, kv={})


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlan:
    """The files of a checkpoint, planned before a weight is read."""

    shards: tuple[ShardLayout, ...]
    json_files: Mapping[str, Mapping[str, object]]
    """JSON files by name: config.json, the index and the dialect's own files."""
    side_files: Mapping[str, Path]
    skipped: Mapping[str, str]
    """Files and tensors of the source that are not copied, with the reason."""
    tag: str
    """Hash of the source and all options: equal tags mean equal bytes."""

    @property
    def data_bytes(self) -> int:
        """Sum the bytes of all tensors."""
        return sum(shard.data_bytes for shard in self.shards)

    @property
    def size_bytes(self) -> int:
        """Sum the bytes of all files."""
        sides = sum(path.stat().st_size for path in self.side_files.values())
        texts = sum(len(encode_json(document)) for document in self.json_files.values())
        return sum(shard.size_bytes for shard in self.shards) + sides + texts

    @property
    def names(self) -> frozenset[str]:
        """Name all entries of the output folder, with the card that is written last."""
        sides = (name.split("/")[0] for name in self.side_files)
        shards = (shard.name for shard in self.shards)
        return frozenset({CARD_NAME, *self.json_files, *shards, *sides})


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizePlan(CheckpointPlan):
    """An FP8 checkpoint, planned before a weight is read."""

    settings: PlanSettings
    selection: Selection
    has_kv: bool
    """Whether there are scales of K and V."""
    notes: tuple[str, ...]
    """What a user should know about scales."""


def select_linears(checkpoint: Checkpoint, settings: PlanSettings) -> Selection:
    """Choose the linears to quantize.

    Raises:
        UsageError: a pattern names no linear, or divides what engines load as one weight.
        ModelError: there is nothing to quantize, or the layout of a weight is unknown.
        ExportError: a weight cannot be divided into blocks of MXFP8.
    """
    found = find_selection(checkpoint, ignore=settings.ignore, drafters=settings.drafters)
    selection = found.require()
    if settings.by_pattern:
        check_layer_schemes(settings, selection)
    # Engines have no scale for inputs that are not whole blocks of MXFP8: vLLM 0.32.0
    # `quantization/modelopt.py` (ValueError).
    size = MX_BLOCK[1]
    partial = [
        matrix
        for matrix in selection.quantized
        if matrix.shape[1] % size and settings.scheme_of(matrix.module).is_mx
    ]
    if partial:
        first = partial[0]
        # engines load the experts of a layer as one weight
        whole = ((split_expert(matrix.module) or (matrix.module,))[0] for matrix in partial)
        names = map(span_layers, whole)
        raise ExportError(
            f"{first.module} has {first.shape[1]} inputs, no multiple of {size}: MXFP8 has no "
            "smaller blocks",
            hint=f"add {spell_options(dict.fromkeys(names))}, or use another --scheme",
        )
    return selection


def make_plan(
    checkpoint: Checkpoint,
    settings: PlanSettings,
    selection: Selection,
    *,
    scales: CalibratedScales = NO_SCALES,
    rounding: Mapping[str, object] | None = None,
    measures_inputs: bool = False,
) -> QuantizePlan:
    """Decide what is written where; only headers and config.json are read.

    The checkpoint is unquantized (`check_unquantized`), the selection that of the settings; every
    linear of a static scheme has a scale in `scales`. `rounding` says how weights are rounded, None
    to nearest; with `measures_inputs` the scales follow from it.
    """
    refuse_duplicate_tensors(checkpoint)
    config = checkpoint.load_config()
    calibrated = () if measures_inputs else (scales.inputs, scales.kv)
    has_powers_of_two = any(each.has_power_of_two_scales for each in settings.schemes)
    fields = [
        _VERSION,
        settings.scheme.name,
        settings.dialect.name,
        sorted(settings.ignore),
        *(["drafters"] if settings.drafters else []),
        *(["power-of-two"] if has_powers_of_two else []),
        *([settings.layer_schemes] if settings.by_pattern else []),
        *([[name, float(value)] for name, value in sorted(part.items())] for part in calibrated),
        scales.origin and scales.origin.to_fields(),
        *([] if rounding is None else [rounding]),
    ]
    text = fingerprint_model(config, checkpoint) + json.dumps(fields)
    tag = hashlib.sha256(text.encode()).hexdigest()
    metadata = {
        _TAG_KEY: tag,
        **make_metadata(origin=scales.origin, geometry=scales.geometry if scales.kv else None),
        **({} if rounding is None else {_ROUNDING_KEY: json.dumps(rounding)}),
    }
    made: dict[str, list[OutputTensor]] = defaultdict(list)
    """By the tensor of the source that they are made from."""
    for matrix in selection.quantized:
        made[matrix.source] += _quantized_tensors(matrix, settings, scales)
    for expert in selection.unquantized_experts:
        made[expert.source].append(
            OutputTensor(name=expert.tensor, dtype=expert.dtype, shape=expert.shape, content=expert)
        )
    kv = (_constant(name, each, settings.dialect) for name, each in sorted(scales.kv.items()))
    shards = _lay_out_shards(checkpoint, made, metadata, kv)
    groups: dict[Scheme, dict[str, None]] = defaultdict(dict)
    for matrix in selection.quantized:
        paths = (matrix.module, name_fused_path(matrix.module))
        groups[settings.scheme_of(matrix.module)] |= dict.fromkeys(paths)
    job = ConfigJob(
        scheme=settings.scheme,
        groups=groups,
        unquantized=selection.unquantized,
        quantized=[matrix.module for matrix in selection.quantized],
        has_kv=bool(scales.kv),
    )
    dialect = settings.dialect
    assert dialect.make_config is not None  # noqa: S101 -- find_written refused it
    documents = {CONFIG_NAME: {**config, "quantization_config": dialect.make_config(job)}}
    if dialect.make_own_file is not None:
        documents[dialect.own_file] = dialect.make_own_file(job)
    return QuantizePlan(
        settings=settings,
        selection=selection,
        has_kv=bool(scales.kv),
        notes=scales.notes,
        **plan_files(checkpoint, shards, documents),
        tag=tag,
    )


def plan_files(
    checkpoint: Checkpoint,
    shards: tuple[ShardLayout, ...],
    documents: Mapping[str, Mapping[str, object]],
) -> dict[str, Any]:
    """Plan the files beside the shards, as fields of a `CheckpointPlan`.

    Tensors in the source's files that its index does not name are left out, and listed as skipped:
    engines read whole files.
    """
    sides, skipped = find_side_files(checkpoint)
    names = [f"{name} in {file_name}" for file_name, name in checkpoint.unlisted]
    if len(names) > _SHOWN:
        names[_SHOWN:] = [f"{len(names) - _SHOWN} more tensors"]
    index = {}
    if checkpoint.index is not None:
        weight_map = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
        total_size = sum(shard.data_bytes for shard in shards)
        index[INDEX_NAME] = {
            "metadata": {**checkpoint.index["metadata"], "total_size": total_size},
            "weight_map": dict(sorted(weight_map.items())),
        }
    # a source's own file of a dialect describes a quantization that no longer holds
    replaced = {*documents, *index, *(each.own_file for each in FP8_DIALECTS.values())}
    return {
        "shards": shards,
        "json_files": {**documents, **index},
        "side_files": {name: path for name, path in sides.items() if name not in replaced},
        "skipped": {**skipped, **dict.fromkeys(names, "the index does not list it")},
    }


def plan_dequantized(checkpoint: DecodedCheckpoint) -> CheckpointPlan:
    """Plan the checkpoint of a quantized one's values; few bytes of weights are read.

    A file of the source that holds scales alone has no shard.
    """
    refuse_duplicate_tensors(checkpoint)
    stored, dtype = checkpoint.stored, checkpoint.dtype_name
    fields = [dtype, fingerprint_model(stored.load_config(), stored)]
    config = replace_dtype(checkpoint.load_config(), dtype)
    shards = _lay_out_shards(checkpoint, {}, {})
    return CheckpointPlan(
        **plan_files(checkpoint, shards, {CONFIG_NAME: config}),
        tag=hashlib.sha256(json.dumps(fields).encode()).hexdigest(),
    )


def _lay_out_shards(
    checkpoint: Checkpoint,
    made: Mapping[str, list[OutputTensor]],
    metadata: Mapping[str, str],
    last: Iterable[OutputTensor] = (),
) -> tuple[ShardLayout, ...]:
    """Lay out a shard for each file of the source that has tensors.

    Args:
        checkpoint: the source.
        made: what is made of some tensors, by their names; the others are copied.
        metadata: of every shard.
        last: further tensors of the last shard.
    """
    by_file: dict[str, list[OutputTensor]] = defaultdict(list)
    for name, entry in checkpoint.tensors.items():
        copied = OutputTensor(name=name, dtype=entry.dtype, shape=entry.shape, content=name)
        by_file[checkpoint.file_of(name).name] += made.get(name, [copied])
    by_file[max(by_file)] += last
    return tuple(
        lay_out(name if checkpoint.index else SINGLE_FILE_NAME, by_file[name], metadata=metadata)
        for name in sorted(by_file)
    )


def _quantized_tensors(
    matrix: Matrix, settings: PlanSettings, scales: CalibratedScales
) -> Iterable[OutputTensor]:
    dialect, scheme = settings.dialect, settings.scheme_of(matrix.module)
    parts = count_parts(matrix.shape, scheme)
    scale = OutputTensor(
        name=f"{matrix.module}.{dialect.name_scale(scheme.weights)}",
        dtype="U8" if scheme.is_mx else "F32",
        shape=parts if scheme.weights is Granularity.BLOCK else (*parts, *dialect.scalar_shape),
    )
    codes = Codes(matrix, scheme, scale)
    yield OutputTensor(name=matrix.tensor, dtype="F8_E4M3", shape=matrix.shape, content=codes)
    yield scale
    if scheme.has_static_inputs:
        name = f"{matrix.module}.{dialect.input_scale_name}"
        yield _constant(name, scales.inputs[matrix.module], dialect)


def _constant(name: str, value: torch.Tensor, dialect: Fp8Dialect) -> OutputTensor:
    return OutputTensor(name=name, dtype="F32", shape=dialect.scalar_shape, content=value)
