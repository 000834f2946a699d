"""Compute the amax of weights as they are read from the shards, without a forward pass."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch
from torch import nn
from transformers import PreTrainedModel

from fp8calib.checkpoint.tensor_file import TORCH_DTYPES
from fp8calib.errors import ModelError
from fp8calib.fp8.amax import channel_amax, group_amax, row_amax
from fp8calib.geometry.model_geometry import Linear, Part
from fp8calib.geometry.sites import Role, Site
from fp8calib.model.topology.layouts import gate_up_parts, rows_part
from fp8calib.model.topology.search import is_transposed
from fp8calib.model.weight_source import TensorSource, WeightSource
from fp8calib.stats.statistic import SiteStats

_ROWS_AT_ONCE = 4096


def observe_weights(
    model: PreTrainedModel,
    linears: Iterable[Linear],
    source: WeightSource,
    *,
    ignored: Collection[str],
) -> Iterator[tuple[Site, SiteStats]]:
    """Read every linear's weight and reduce it per output and per input channel.

    Only the modules of `model` are used; it may be without weights.

    Raises:
        ModelError: a weight holds NaN or inf; the message names tensor and index.
    """
    modules = dict(model.named_modules())
    done: set[str] = set()
    for linear in linears:
        parent = linear.module.rpartition(".")[0]
        if linear.module in ignored or (linear.num_experts and parent in ignored):
            continue
        if not linear.num_experts:
            weight = source.read(linear.weight_name)
            if is_transposed(modules[linear.module]):
                weight = weight.T
            yield Site(linear.module, Role.WEIGHT), _reduce(weight, linear.weight_name)
        elif linear.weight_name not in done:
            done.add(linear.weight_name)
            yield from _observe_experts(modules[parent], parent, linear, source)


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
            _require_finite(checkpoint.read(name).unsqueeze(0), name, 0)
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
        raise _nonfinite_error(name, float(rows[(row, *rest)]), [row + first_row, *rest])


def _nonfinite_error(name: str, value: float, index: list[int]) -> ModelError:
    return ModelError(
        f"{name} holds {value} at {index}",
        hint="the checkpoint is damaged, or overflowed in training or conversion",
    )


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
        raise _nonfinite_error(name, float(weight[tuple(index)]), index)
    return SiteStats(count=0, amax=amax_out, amax_in=channel_amax(weight))


def _observe_experts(
    experts: nn.Module, path: str, linear: Linear, source: WeightSource
) -> Iterator[tuple[Site, SiteStats]]:
    parts = expert_parts(experts, linear)
    seen: dict[str, list[tuple[SiteStats, torch.Tensor]]] = {part.name: [] for part in parts}
    for expert, stored in enumerate(source.read_experts(linear.weight_name)):
        weight = stored.T if getattr(experts, "is_transposed", False) else stored
        for part in parts:
            rows = weight[part.rows(range(part.count))] if len(parts) > 1 else weight
            stats = _reduce(rows, f"{linear.weight_name}[{expert}]")
            seen[part.name].append((stats, _blocks(stats, part.name, linear.expert_block)))
    for name, per_expert in seen.items():
        yield Site(f"{path}.{name}", Role.WEIGHT), _join(per_expert)


def expert_parts(experts: nn.Module, linear: Linear) -> tuple[Part, ...]:
    """Describe the projections in one expert's part of the parameter of `linear`, [out, in]."""
    if linear.weight_name.endswith("gate_up_proj"):
        is_interleaved = not getattr(experts, "is_concatenated", True)
        return gate_up_parts(2 * linear.out_features, interleaved=is_interleaved)
    return (rows_part(linear.module.rpartition(".")[2], linear.out_features),)


def _blocks(stats: SiteStats, name: str, block: int) -> torch.Tensor:
    """Reduce the axis tensor parallelism cuts (down: inputs, else outputs) to blocks: [blocks]."""
    cut = stats.amax_in if name == "down_proj" else stats.amax
    assert cut is not None  # noqa: S101 -- a weight's stats always hold both axes
    return group_amax(cut.unsqueeze(0), block)[0]


def _join(per_expert: list[tuple[SiteStats, torch.Tensor]]) -> SiteStats:
    inputs = [stats.amax_in for stats, _ in per_expert if stats.amax_in is not None]
    return SiteStats(
        count=0,
        amax=torch.stack([stats.amax for stats, _ in per_expert]).amax(0),
        amax_in=torch.stack(inputs).amax(0),
        experts=torch.stack([blocks for _, blocks in per_expert]),
    )
