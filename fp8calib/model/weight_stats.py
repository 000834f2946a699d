"""Compute the amax of weights from the shards, without a forward pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator

import torch

from fp8calib.checkpoint.tensor_file import TORCH_DTYPES, nonfinite_tensor_error
from fp8calib.errors import ModelError
from fp8calib.geometry.model_geometry import Linear
from fp8calib.geometry.sites import Role, Site
from fp8calib.model.projections import read_linears
from fp8calib.model.weight_source import TensorSource, WeightSource
from fp8calib.numerics.amax import channel_amax, group_amax, row_amax
from fp8calib.stats.statistic import SiteStats

_ROWS_AT_ONCE = 4096


def observe_weights(
    linears: Iterable[Linear], source: WeightSource, *, ignored: Collection[str]
) -> Iterator[tuple[Site, SiteStats]]:
    """Read every linear's weight and reduce it per output and per input channel.

    Raises:
        ModelError: a weight holds NaN or inf; the message names tensor and index.
    """
    observed = [linear for linear in linears if linear.runner not in ignored]
    per_expert: dict[str, list[tuple[SiteStats, torch.Tensor]]] = defaultdict(list)
    for weight in read_linears(observed, source):
        linear, stats = weight.linear, _reduce(weight.values, weight.name)
        site = Site(linear.module, Role.WEIGHT)
        if weight.expert is None:
            yield site, stats
            continue
        per_expert[linear.module].append((stats, _blocks(stats, linear)))
        if weight.expert == linear.num_experts - 1:
            yield site, _join(per_expert.pop(linear.module))


_BOUNDS = ("_min", "_max")
"""Bounds of a clamp: without one they are infinite (the towers of Gemma 4)."""


def check_other_weights(checkpoint: TensorSource, names: Iterable[str]) -> None:
    """Refuse NaN and inf in tensors that are not weights of linears: embeddings, norms, biases.

    Raises:
        ModelError: a tensor holds NaN or inf; the message names tensor and index.
    """
    for name in names:
        if not TORCH_DTYPES[checkpoint.tensors[name].dtype].is_floating_point:
            continue
        shape = checkpoint.tensors[name].shape
        if not shape:
            value = checkpoint.read(name).unsqueeze(0)
            if name.endswith(_BOUNDS):
                value = value.nan_to_num(torch.nan, 0, 0)
            _require_finite(value, name, 0)
            continue
        for start in range(0, shape[0], _ROWS_AT_ONCE):
            rows = checkpoint.read_rows(name, start, min(start + _ROWS_AT_ONCE, shape[0]))
            _require_finite(rows, name, start)


def _require_finite(rows: torch.Tensor, name: str, first_row: int) -> None:
    # A sum of finite numbers may overflow: only the elements decide.
    if not rows.numel() or bool(rows.sum(dtype=torch.float32).isfinite()):
        return
    bad = (~rows.float().isfinite()).nonzero()
    if len(bad):
        row, *rest = bad[0].tolist()
        raise nonfinite_tensor_error(name, float(rows[(row, *rest)]), [row + first_row, *rest])


def _reduce(weight: torch.Tensor, name: str) -> SiteStats:
    if not weight.dtype.is_floating_point or weight.dtype.itemsize < 2:
        raise ModelError(
            f"{name} is stored in {str(weight.dtype).removeprefix('torch.')}: the model is "
            "quantized, although its config does not state it",
            hint="calibrate the unquantized model it was made from",
        )
    amax_out = row_amax(weight)
    if not bool(amax_out.isfinite().all()):
        index = (~weight.float().isfinite()).nonzero()[0].tolist()
        raise nonfinite_tensor_error(name, float(weight[tuple(index)]), index)
    return SiteStats(count=0, amax=amax_out, amax_in=channel_amax(weight))


def _blocks(stats: SiteStats, linear: Linear) -> torch.Tensor:
    """Reduce the axis that tensor parallelism cuts to the amax of blocks: [blocks]."""
    cut = stats.amax_in if linear.shard == "row" else stats.amax
    assert cut is not None  # noqa: S101 -- a weight's stats always hold both axes
    return group_amax(cut.unsqueeze(0), linear.expert_block)[0]


def _join(per_expert: list[tuple[SiteStats, torch.Tensor]]) -> SiteStats:
    inputs = [stats.amax_in for stats, _ in per_expert if stats.amax_in is not None]
    return SiteStats(
        count=0,
        amax=torch.stack([stats.amax for stats, _ in per_expert]).amax(0),
        amax_in=torch.stack(inputs).amax(0),
        experts=torch.stack([blocks for _, blocks in per_expert]),
    )
