"""Write the RFC's `quantized_weights`: one file per rank, split by tensor parallelism.

A rank's file has, for every projection of attention and MLP (fused ones split, experts one by one),
`X.weight` in FP8 and the rank's own scales, `X.weight_scale` and `X.input_scale`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from fp8calib.checkpoint.disk import explain_os_error, require_free_space
from fp8calib.formats.fp8.weights import WEIGHT_FORMATS
from fp8calib.formats.kv.json import name_rank_files
from fp8calib.formats.metadata import make_metadata
from fp8calib.formats.table import ScaleTable
from fp8calib.model.projections import LinearWeight
from fp8calib.model.shapes import Linear, Part, Role, Site
from fp8calib.model.tensor_parallel import owned_channels, owned_rows
from fp8calib.numerics.cast import encode
from fp8calib.numerics.encode import ENCODABLE_DTYPES, encode_rows
from fp8calib.numerics.formats import E4M3FN, Fp8Format
from fp8calib.quantization.shard_layout import OutputTensor, ShardLayout, lay_out

_DTYPES = {fmt: dtype for dtype, fmt in WEIGHT_FORMATS.items()}


def write_rank_weights(
    table: ScaleTable, weights: Iterable[LinearWeight], folder: Path
) -> tuple[str, ...]:
    """Quantize weights with the table's scales and write a file for each of its ranks.

    Args:
        table: scales of inputs and weights.
        weights: all weights of the table, in any order; each is in memory once.
        folder: must exist.

    Returns:
        The names of the files.

    Raises:
        ExportError: a file cannot be written, or the disk is full.
    """
    names = tuple(name_rank_files(table.tp).values())
    layouts = [_lay_out_rank(table, rank, name) for rank, name in enumerate(names)]
    require_free_space(folder, sum(layout.size_bytes for layout in layouts))
    try:
        for layout in layouts:
            with (folder / layout.name).open("wb") as file:
                file.write(layout.head)
                file.truncate(layout.size_bytes)
        for rank, layout in enumerate(layouts):
            _put_scales(table, rank, folder, layout)
        for weight in weights:
            _put_weight(table, weight, folder, layouts)
    except OSError as error:
        raise explain_os_error(error, folder) from error
    return names


def _projections(table: ScaleTable) -> Iterator[tuple[Linear, Part, int | None]]:
    return (
        (linear, part, expert)
        for _, linear in table.geometry.linears()
        if linear.section != "other"
        for expert in linear.experts
        for part in linear.parts
    )


def _lay_out_rank(table: ScaleTable, rank: int, name: str) -> ShardLayout:
    dtype = _DTYPES[table.fmt]
    tensors: list[OutputTensor] = []
    for linear, part, expert in _projections(table):
        module = linear.logical(part, expert)
        shape = (
            len(owned_rows(linear, part, table.tp, rank)),
            len(owned_channels(linear, table.tp, rank)),
        )
        tensors.append(OutputTensor(name=f"{module}.weight", dtype=dtype, shape=shape))
        tensors += [
            OutputTensor(name=f"{module}.{role}_scale", dtype="F32", shape=())
            for role in (Role.WEIGHT, Role.INPUT)
        ]
    measured = make_metadata(origin=table.origin)
    return lay_out(name, tensors, metadata={"fp8calib.rank": f"{rank} of {table.tp}", **measured})


def _put_scales(table: ScaleTable, rank: int, folder: Path, layout: ShardLayout) -> None:
    with (folder / layout.name).open("r+b") as file:
        for linear, part, expert in _projections(table):
            module = linear.logical(part, expert)
            for role in (Role.WEIGHT, Role.INPUT):
                file.seek(layout.starts[f"{module}.{role}_scale"])
                value = table.scales[Site(module, role)].values[rank]
                file.write(value.to(torch.float32).numpy().tobytes())


def _put_weight(
    table: ScaleTable, weight: LinearWeight, folder: Path, layouts: list[ShardLayout]
) -> None:
    linear, expert = weight.linear, weight.expert
    for rank, layout in enumerate(layouts):
        with (folder / layout.name).open("r+b") as file:
            for part in linear.parts:
                module = linear.logical(part, expert)
                scale = table.scales[Site(module, Role.WEIGHT)].values[rank]
                file.seek(layout.starts[f"{module}.weight"])
                own = _encode(weight.cut(part, table.tp, rank), scale, table.fmt)
                file.write(own.numpy().tobytes())


def _encode(rows: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """Quantize rows: uint8 codes."""
    if fmt is E4M3FN and rows.dtype in ENCODABLE_DTYPES:
        return encode_rows(rows, scale).view(torch.uint8)
    return encode(rows.to(torch.float32) / scale, fmt)
