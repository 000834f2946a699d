"""Compute the amax of weights, without a forward pass: from the shards or on the model's GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch

from fp8calib.calibration.calibration_stats import SiteStats
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.tensor_file import nonfinite_tensor_error
from fp8calib.checkpoint.torch_dtypes import TORCH_DTYPES
from fp8calib.model.geometry import Linear, Role, Site
from fp8calib.model.prepared import PreparedModel
from fp8calib.model.weight_source import WeightSource, read_linears
from fp8calib.numerics.amax import amax_over, group_amax

_ROWS_AT_ONCE = 4096


def observe_weights(
    linears: Iterable[Linear], source: WeightSource, *, ignored: Collection[str]
) -> Iterator[tuple[Site, SiteStats]]:
    """Read every linear's weight and reduce it per output and per input channel.

    Of experts also the axis that tensor parallelism cuts, to the amax of blocks. Nothing waits for
    a GPU: `settle_weights` does, and looks for NaN.
    """
    observed = [linear for linear in linears if linear.runner not in ignored]
    by_expert: dict[str, list[dict[str, torch.Tensor]]] = defaultdict(list)
    for linear, expert, weight in read_linears(observed, source):
        name = linear.weight_name if expert is None else f"{linear.weight_name}[{expert}]"
        found = {"amax": amax_over(weight, -1), "amax_in": amax_over(weight, 0)}
        if weight.device.type == "cpu" and not bool(found["amax"].isfinite().all()):
            _require_finite(weight, name, 0)
        site = Site(linear.module, Role.WEIGHT)
        if expert is None:
            yield site, SiteStats(count=0, **found)
            continue
        cut = found["amax_in" if linear.shard == "row" else "amax"]
        found["experts"] = group_amax(cut.unsqueeze(0), linear.expert_block)[0]
        by_expert[linear.module].append(found)
        if expert == linear.num_experts - 1:
            parts = by_expert.pop(linear.module)
            stacked = {name: torch.stack([part[name] for part in parts]) for name in found}
            joined = {name: x if name == "experts" else x.amax(0) for name, x in stacked.items()}
            yield site, SiteStats(count=0, **joined)


def settle_weights(
    found: Mapping[Site, SiteStats], prepared: PreparedModel
) -> dict[Site, SiteStats]:
    """Give the statistics of weights on the CPU; refuse NaN and inf."""
    settled = {
        site: SiteStats(count=0, **{name: x.cpu() for name, x in stats.tensors.items()})
        for site, stats in found.items()
    }
    for _, linear in prepared.geometry.linears():
        stats = settled.get(Site(linear.module, Role.WEIGHT))
        if stats is not None and not bool(stats.amax.isfinite().all()):
            for _ in observe_weights([linear], prepared.weights, ignored=()):
                pass  # it raises
    return settled


def check_other_weights(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Refuse NaN and inf in tensors that are not weights of linears: embeddings, norms, biases."""
    for name in names:
        entry = checkpoint.tensors[name]
        if not TORCH_DTYPES[entry.dtype].is_floating_point:
            continue
        if not entry.shape:
            value = checkpoint.read(name).unsqueeze(0)
            if name.endswith(("_min", "_max")):  # of a clamp: infinite without one (Gemma 4)
                value = value.nan_to_num(torch.nan, 0, 0)
            _require_finite(value, name, 0)
            continue
        for start in range(0, entry.shape[0], _ROWS_AT_ONCE):
            rows = checkpoint.read_rows(name, start, min(start + _ROWS_AT_ONCE, entry.shape[0]))
            _require_finite(rows, name, start)


def _require_finite(rows: torch.Tensor, name: str, first_row: int) -> None:
    # A sum of finite numbers may overflow: only the elements decide.
    if not rows.numel() or bool(rows.sum(dtype=torch.float32).isfinite()):
        return
    bad = (~rows.float().isfinite()).nonzero()
    if len(bad):
        row, *rest = bad[0].tolist()
        raise nonfinite_tensor_error(name, float(rows[(row, *rest)]), [row + first_row, *rest])
