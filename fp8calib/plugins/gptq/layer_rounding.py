"""Round the weights of each layer once all batches have run through it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from fp8calib.calibration.processes import LONE, ProcessGroup
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.model.shapes import Layer
from fp8calib.numerics.encode import decode_rows, encode_rows
from fp8calib.numerics.schemes import Scheme
from fp8calib.plugins.gptq.core import (
    HessianFactor,
    factorise,
    output_error,
    round_compensated,
    search_scales,
    searches_scales,
)
from fp8calib.plugins.gptq.hessians import HessianCollector, HessianSums, LayerHessians
from fp8calib.plugins.gptq.input_map import InputMap
from fp8calib.plugins.gptq.rounded_codes import RoundedCodes, RoundedLinear
from fp8calib.quantization.matrices import Matrix
from fp8calib.quantization.settings import PlanSettings
from fp8calib.quantization.weights import WeightReader, WeightScales, spread_scales

MIN_TOKENS = 256
"""A weight with fewer tokens in its Hessian is rounded to nearest."""

_FLOAT32_BYTES, _FLOAT64_BYTES = 4, 8
_FACTOR_COPIES = 5
"""Square float64 matrices while a Hessian is factorised."""
_WEIGHT_COPIES = 7
"""Copies of a weight in float32 while it is rounded and its errors are measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingTask:
    """The weights to round, and the inputs that they multiply."""

    settings: PlanSettings
    matrices: Collection[Matrix]
    inputs: InputMap

    def estimate_bytes(self) -> int:
        """Estimate the memory of a layer's Hessians, and of rounding a weight, at their largest.

        Linears that engines fuse read one input.
        """
        sums: dict[int, dict[str, int]] = defaultdict(dict)
        largest = 0
        for matrix in self.matrices:
            mapped = self.inputs.inputs.get(matrix.module)
            if mapped is None:
                continue
            size = matrix.shape[1]
            sums[mapped.layer][matrix.fused_group] = 2 * _FLOAT32_BYTES * size * size
            weight = matrix.shape[0] * size * _WEIGHT_COPIES * _FLOAT32_BYTES
            largest = max(largest, weight + size * size * _FACTOR_COPIES * _FLOAT64_BYTES)
        return largest + max((sum(found.values()) for found in sums.values()), default=0)


class LayerRounding(HessianCollector):
    """Collects the Hessians of each layer and rounds its weights (a `LayerWork`).

    Several processes sum their Hessians, and the first process rounds.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        task: RoundingTask,
        codes: RoundedCodes,
        *,
        group: ProcessGroup = LONE,
    ) -> None:
        inputs = task.inputs.inputs
        by_layer: dict[int, list[Matrix]] = defaultdict(list)
        for matrix in task.matrices:
            if matrix.module in inputs:
                by_layer[inputs[matrix.module].layer].append(matrix)
        done = group.broadcast(lambda: [index for index in by_layer if codes.has_layer(index)])
        self._todo = {index: found for index, found in by_layer.items() if index not in done}
        super().__init__({inputs[m.module].runner for found in self._todo.values() for m in found})
        self._checkpoint = checkpoint
        self._task = task
        self._inputs = inputs
        self._codes = codes
        self._group = group

    def finish_layer(self, layer: Layer) -> None:
        """Round the weights of a layer and write their codes."""
        hessians = self.take()
        matrices = self._todo.get(layer.index)
        if matrices is None:
            return
        if self._group.size > 1:
            hessians = _sum_ranks(hessians, self._group)
        if self._group.is_first:
            with ThreadPoolExecutor(1) as pool:
                self._round_layer(layer.index, matrices, hessians, pool)
        self._group.broadcast(lambda: True)  # no process saves a state after an unwritten layer

    def forget(self) -> None:
        """Drop the Hessians of the open layer; finished layers stay."""
        self.take()

    def _round_layer(
        self,
        index: int,
        matrices: list[Matrix],
        hessians: LayerHessians,
        pool: ThreadPoolExecutor,
    ) -> None:
        device = next((each.used.device for each in hessians.sums.values()), torch.device("cpu"))
        reader = WeightReader(self._checkpoint, pool, device=device)
        settings = self._task.settings
        scales = WeightScales(self._task.matrices, reader)
        with self._codes.written_layer(index, matrices, settings) as put:
            for sums, group in self._group_by_input(matrices, hessians):
                rounding = _InputRounding(sums, hessians.changing)
                for matrix in group:
                    weight = reader.read(matrix, range(matrix.shape[0]))
                    key = self._inputs[matrix.module].key
                    scheme = settings.scheme_of(matrix.module)
                    scale = scales.of_weight(matrix, scheme, weight)
                    put(matrix, *rounding.round(matrix, key, weight, scale, scheme))

    def _group_by_input(
        self, matrices: list[Matrix], hessians: LayerHessians
    ) -> Iterator[tuple[HessianSums | None, list[Matrix]]]:
        """Group matrices that share a Hessian, which is dropped after its group."""
        groups: dict[str, list[Matrix]] = defaultdict(list)
        for matrix in matrices:
            key = self._inputs[matrix.module].key
            groups[hessians.owners.get(key, key)].append(matrix)
        for owner, group in groups.items():
            yield hessians.sums.pop(owner, None), group


class _InputRounding:
    """Rounds the weights that multiply one input."""

    def __init__(self, sums: HessianSums | None, changing: Collection[str]) -> None:
        self._sums = sums
        self._changing = changing
        self._factor: HessianFactor | None = None

    def round(
        self, matrix: Matrix, key: str, weight: torch.Tensor, scale: torch.Tensor, scheme: Scheme
    ) -> tuple[torch.Tensor, torch.Tensor, RoundedLinear]:
        """Round a weight [out, in] both ways and keep the one with the smaller held-out error.

        Returns:
            Codes, their scales (in the shape of `scale`, which rounding to nearest uses), and the
            report.
        """
        shape = tuple(weight.shape)
        spread = spread_scales(scale, shape, scheme)
        nearest = encode_rows(weight, spread)
        sums = self._sums
        why = self._explain_nearest(key)
        rounded = RoundedLinear(
            module=matrix.module,
            rounding="nearest",
            why=why,
            tokens=0 if sums is None else sums.num_used,
            held_tokens=0 if sums is None else sums.num_held,
        )
        if sums is None or why:
            return nearest, scale, rounded
        if self._factor is None:
            self._factor = factorise(sums.used)
        chosen = scale
        if searches_scales(scheme):
            chosen = search_scales(weight, scale, sums.used.diagonal())
        wider = spread_scales(chosen, shape, scheme)
        codes = round_compensated(weight, wider, self._factor)
        wide = weight.to(torch.float32)
        signal = output_error(wide, sums.held)
        errors = [
            output_error(decode_rows(each).mul_(by).sub_(wide), sums.held)
            for each, by in ((codes, wider), (nearest, spread))
        ]
        is_better = errors[0] < errors[1]
        report = replace(
            rounded,
            rounding="gptq" if is_better else "nearest",
            why="" if is_better else "its error on held-back tokens is no larger",
            gptq_db=_to_db(signal, errors[0]),
            nearest_db=_to_db(signal, errors[1]),
            damping=self._factor.damping,
        )
        return (codes, chosen, report) if is_better else (nearest, scale, report)

    def _explain_nearest(self, key: str) -> str:
        if self._sums is None:
            return "no token reached it"
        if key in self._changing:
            return "it reads the input of another linear in some batches only"
        if self._sums.num_used < MIN_TOKENS:
            return f"fewer than {MIN_TOKENS} tokens reached it"
        return "" if self._sums.num_held else "no held-back token reached it"


def _to_db(signal: float, error: float) -> float | None:
    return 10 * math.log10(signal / error) if signal > 0 and error > 0 else None


def _sum_ranks(own: LayerHessians, group: ProcessGroup) -> LayerHessians:
    """Sum the Hessians of all processes.

    A linear that shares its input with others in some processes only is added to `changing`.
    """
    owners: dict[str, str] = {}
    changing: set[str] = set()
    counts: Mapping[str, list[int]] = {k: [s.num_used, s.num_held] for k, s in own.sums.items()}
    joined: dict[str, list[int]] = {}
    named = {
        f"{k}/{part}": getattr(s, part) for k, s in own.sums.items() for part in ("used", "held")
    }
    shapes: dict[str, torch.Size] = {}
    gathered = group.all_gather(
        (own.owners, own.changing, counts, {name: x.shape for name, x in named.items()})
    )
    for other_owners, other_changing, other_counts, other_shapes in gathered:
        for module, owner in other_owners.items():
            if owners.setdefault(module, owner) != owner:
                changing.add(module)
        changing.update(other_changing)
        for key, pair in other_counts.items():
            joined[key] = [a + b for a, b in zip(joined.get(key, [0, 0]), pair, strict=True)]
        shapes |= other_shapes
    # zeros where this process saw nothing
    summed = {
        name: group.sum(named[name] if name in named else torch.zeros(shapes[name]))
        for name in sorted(shapes)
    }
    sums = {
        key: HessianSums(summed[f"{key}/used"], summed[f"{key}/held"], *pair)
        for key, pair in joined.items()
    }
    return LayerHessians(sums=sums, owners=owners, changing=changing)
