"""The RFC's `quantized_weights`, as `export --with-weights` writes them: one file per rank.

A rank's file has, for every projection of attention and MLP (fused ones split, experts one by one),
`X.weight` in FP8 and the rank's own scales, `X.weight_scale` and `X.input_scale`.

The weights may be int4, which become FP8 codes with an FP8 scale of 1: the RFC's compound scale in
the JSON, `scale_int4 * scale_fp8`, converts codes to real numbers in one step. With an FP8 scale of
1 (any power of two would do) each integer from -8 to 7 is an FP8 number: it has three significant
bits, and e4m3fn and e4m3fnuz keep four. So the FP8 weight equals the int4 weight, and the product
is `scale_int4` without rounding. `amax / fmt.max`, the rule of other weights, would put most
integers between two codes (3 x 56 = 168 is between 160 and 176).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch

from fp8calib.calibration.calibration_stats import RunStats
from fp8calib.calibration.fingerprint import fingerprint_model
from fp8calib.calibration.origin import explain_difference
from fp8calib.calibration.streamed_weights import HeldTensors
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.output import explained, require_free_space
from fp8calib.errors import ExportError, ModelError
from fp8calib.formats.compute import compute_linear_scales
from fp8calib.formats.fp8.weights import WEIGHT_FORMATS
from fp8calib.formats.kv.json import name_rank_files
from fp8calib.formats.metadata import make_metadata
from fp8calib.formats.table import Scale, ScaleTable
from fp8calib.model.geometry import Linear, ModelGeometry, Part, Role, Site, find_difference
from fp8calib.model.load import build_skeleton, open_source
from fp8calib.model.tensor_parallel import owned_channels, owned_rows
from fp8calib.model.topology import find_geometry
from fp8calib.model.weight_source import LinearWeight, WeightSource, read_linears
from fp8calib.numerics.amax import tensor_amax
from fp8calib.numerics.cast import encode
from fp8calib.numerics.encode import scale_of
from fp8calib.numerics.formats import Fp8Format
from fp8calib.numerics.rules import ScaleRules
from fp8calib.quantization.shard_layout import OutputTensor, ShardLayout, lay_out
from fp8calib.quantization.sources.int4 import Int4Source, is_int4_source

_DTYPES = {fmt: dtype for dtype, fmt in WEIGHT_FORMATS.items()}
_ROLES = (Role.WEIGHT, Role.INPUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWeights:
    """Weights to write, with their scales for every tensor-parallel degree."""

    tables: Mapping[int, ScaleTable]
    notes: tuple[str, ...]
    source: WeightSource

    def write(self, folder: Path) -> list[str]:
        """Write a file for every rank of every degree, and return their names."""
        names: list[str] = []
        for table in self.tables.values():
            files = list(name_rank_files(table.tp).values())
            layouts = [_lay_out_rank(table, rank, name) for rank, name in enumerate(files)]
            require_free_space(folder, sum(layout.size_bytes for layout in layouts))
            with explained(folder), ExitStack() as stack:
                opened = [stack.enter_context((folder / name).open("wb")) for name in files]
                for file, layout in zip(opened, layouts, strict=True):
                    file.write(layout.head)
                for linear, expert, weight in _read(table.geometry, self.source):
                    for part, rank in product(linear.parts, range(table.tp)):
                        rows = _cut(linear, part, weight, table.tp, rank)
                        for name, data in _encode(table, linear.logical(part, expert), rows, rank):
                            opened[rank].seek(layouts[rank].starts[name])
                            opened[rank].write(data)
            names += files
        return names


def _cut(linear: Linear, part: Part, weight: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    """Give the rows and channels of a part that a tensor-parallel rank owns."""
    channels = owned_channels(linear, tp, rank)
    return weight[owned_rows(linear, part, tp, rank)][:, channels.start : channels.stop]


def _encode(
    table: ScaleTable, module: str, rows: torch.Tensor, rank: int
) -> Iterator[tuple[str, bytes]]:
    """Encode what a rank has of a projection: its weight and its scales, by the tensor's name."""
    scales = {role: table.scales[Site(module, role)].values[rank] for role in _ROLES}
    codes = encode(rows.to(torch.float32) / scales[Role.WEIGHT], table.fmt)
    yield f"{module}.weight", codes.numpy().tobytes()
    for role, value in scales.items():
        yield f"{module}.{role}_scale", value.to(torch.float32).numpy().tobytes()


def prepare_weights(
    stats: RunStats,
    source: Checkpoint,
    fmt: Fp8Format,
    tps: Iterable[int],
    rules: ScaleRules,
) -> RankWeights:
    """Open the weights, and compute their scales for some degrees.

    Raises:
        ModelError: the model, whose modules show which weights are fused or transposed, cannot
            be built; or an int4 checkpoint is damaged, or is of another model.
        ExportError: a scale cannot be computed.
    """
    is_int4 = is_int4_source(source)
    skeleton = build_skeleton(open_source(str(source.folder)))
    tables = {
        tp: compute_linear_scales(stats, fmt, tp=tp, rules=rules) for tp in dict.fromkeys(tps)
    }
    if not is_int4:
        return RankWeights(tables=tables, notes=(), source=WeightSource(skeleton, source))
    int4, measured = Int4Source(source), stats.geometry
    weights = WeightSource(skeleton, int4)
    found, _ = find_geometry(
        weights.model, weights.single_tensors, checkpoint_dtype=measured.checkpoint_dtype
    )
    if difference := find_difference(found, measured):
        raise ModelError(
            f"{source.folder} is not the model these statistics were calibrated on: {difference}",
            hint="pass the int4 checkpoint of the model that was calibrated",
        )
    # the scale of every element, which is merged, split and transposed like the weights
    spread = {name: int4.scale(name).expand(each.shape) for name, each in int4.tensors.items()}
    scales = weights.reading_from(HeldTensors(int4, spread, torch.float32))
    adopted = {
        tp: adopt_scales(table, _read(measured, weights), _read(measured, scales))
        for tp, table in tables.items()
    }
    here = fingerprint_model(source.load_config(), source)
    note = (
        f"{source.folder}: has the shape of the calibrated model, so its int4 weights are assumed "
        f"to come from it (it has {explain_difference(stats.header.model_fingerprint, here)}); if "
        "norms or weights were changed before quantization (smoothing), calibrate that model"
    )
    return RankWeights(tables=adopted, notes=(note,), source=weights)


def _read(geometry: ModelGeometry, source: WeightSource) -> Iterator[LinearWeight]:
    return read_linears(
        [linear for _, linear in geometry.linears() if linear.section != "other"], source
    )


def adopt_scales(
    table: ScaleTable, weights: Iterable[LinearWeight], spread: Iterable[LinearWeight]
) -> ScaleTable:
    """Replace the scale of every weight by the compound scale of its int4 source.

    An unquantized weight of the source gets a scale from its amax; if it is all zeros on a rank,
    it keeps the scale of the table.

    Args:
        table: scales of all projections.
        weights: all weights of the table, in real numbers.
        spread: the int4 scale of every element of these weights, in the same order; 0 if the weight
            is not quantized.
    """
    scales = dict(table.scales)
    for (linear, expert, weight), (_, _, shared) in zip(weights, spread, strict=True):
        expected = (linear.out_features, linear.in_features)
        if weight.shape != expected:
            raise ModelError(
                f"{linear.module} is {list(weight.shape)} in the checkpoint and "
                f"{list(expected)} in the calibrated model",
                hint="name the int4 checkpoint of the model that was calibrated",
            )
        for part in linear.parts:
            site = Site(linear.logical(part, expert), Role.WEIGHT)
            int4 = _find_scale(site, part, shared)
            scales[site] = (
                Scale(values=int4.expand(table.tp), source="observed")
                if bool(int4)
                else _measure(
                    table,
                    site,
                    [_cut(linear, part, weight, table.tp, rank) for rank in range(table.tp)],
                )
            )
    return replace(table, scales=scales)


def _find_scale(site: Site, part: Part, spread: torch.Tensor) -> torch.Tensor:
    """Find the int4 scale of a projection: fp32 [], 0 if it is not quantized."""
    is_one_number = not any(spread.stride())
    own = spread[:1] if is_one_number else spread[part.rows(range(part.count))]
    low, high = torch.aminmax(own)
    if not torch.equal(low, high):
        raise ExportError(
            f"{site} is joined from weights with several int4 scales ({float(low):.6g} to "
            f"{float(high):.6g}), but the RFC has one scale for it",
            hint="name the unquantized model",
        )
    return high


def _measure(table: ScaleTable, site: Site, weights: Iterable[torch.Tensor]) -> Scale:
    """Compute the scales of an unquantized projection from the weights of its ranks."""
    amax = torch.stack([tensor_amax(weight) for weight in weights])
    if not bool(amax.isfinite().all()):
        raise ExportError(f"{site} contains NaN or infinity", hint="download the checkpoint again")
    is_there = amax > 0
    return Scale(
        values=torch.where(is_there, scale_of(amax, table.fmt), table.scales[site].values),
        source="observed" if bool(is_there.all()) else "all-zero",
        is_substitute=not bool(is_there.any()),
    )


def _lay_out_rank(table: ScaleTable, rank: int, name: str) -> ShardLayout:
    dtype = _DTYPES[table.fmt]
    tensors: list[OutputTensor] = []
    linears = (linear for _, linear in table.geometry.linears() if linear.section != "other")
    for linear in linears:
        channels = len(owned_channels(linear, table.tp, rank))
        for expert, part in product(linear.experts, linear.parts):
            module = linear.logical(part, expert)
            shape = (len(owned_rows(linear, part, table.tp, rank)), channels)
            tensors.append(OutputTensor(name=f"{module}.weight", dtype=dtype, shape=shape))
            tensors += (
                OutputTensor(name=f"{module}.{role}_scale", dtype="F32", shape=())
                for role in _ROLES
            )
    measured = make_metadata(origin=table.origin)
    return lay_out(name, tensors, metadata={"fp8calib.rank": f"{rank} of {table.tp}", **measured})
