"""Round the weights of each layer once all batches of a calibration have run through it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fp8calib.calibration.journal import NAME_PREFIX
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.output import require_free_space
from fp8calib.errors import UsageError
from fp8calib.model.geometry import Layer
from fp8calib.numerics.encode import decode_rows, encode_rows
from fp8calib.numerics.schemes import Scheme
from fp8calib.plugins.gptq.core import (
    DAMPING,
    SCALE_STEPS,
    HessianFactor,
    factorise,
    output_error,
    round_compensated,
    search_scales,
    searches_scales,
)
from fp8calib.plugins.gptq.hessians import LENGTH_POWER, HessianRecorder, HessianSums, LayerHessians
from fp8calib.plugins.gptq.input_map import MappedInput
from fp8calib.plugins.gptq.rounded_codes import RoundedCodes, RoundedLinear
from fp8calib.quantization.matrices import Matrix
from fp8calib.quantization.settings import PlanSettings
from fp8calib.quantization.weights import WeightReader, WeightScales, spread_scales

MIN_HESSIAN_TOKENS = 256
"""A weight with fewer tokens in its Hessian is rounded to nearest."""

_FLOAT32_BYTES, _FLOAT64_BYTES = 4, 8
_FACTOR_COPIES = 5
"""Square float64 matrices while a Hessian is factorised."""
_WEIGHT_COPIES = 7
"""Copies of a weight in float32 while it is rounded and its errors are measured."""
CODES = f"{NAME_PREFIX}rounding"
"""The folder of codes beside the other checkpoints of a run, which all go when it is finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """The weights that are rounded after the text has run through their layer, and how."""

    checkpoint: Checkpoint
    settings: PlanSettings
    matrices: Sequence[Matrix]
    inputs: Mapping[str, MappedInput]
    """The inputs that they multiply, by their module."""
    num_sequences: int

    def estimate_bytes(self) -> int:
        """Estimate the memory of a layer's Hessians, and of rounding a weight, at their largest.

        Linears that engines fuse read one input.
        """
        sums: dict[int, dict[str, int]] = defaultdict(dict)
        largest = 0
        for matrix in self.matrices:
            mapped = self.inputs.get(matrix.module)
            if mapped is None:
                continue
            size = matrix.shape[1]
            sums[mapped.layer][matrix.fused_group] = 2 * _FLOAT32_BYTES * size * size
            weight = matrix.shape[0] * size * _WEIGHT_COPIES * _FLOAT32_BYTES
            largest = max(largest, weight + size * size * _FACTOR_COPIES * _FLOAT64_BYTES)
        return largest + max((sum(found.values()) for found in sums.values()), default=0)

    def open_recorder(self, folder: Path) -> LayerRounding:
        """Make what rounds the weights of each layer into the working folder of a run."""
        require_free_space(folder, count_code_bytes(self.matrices))
        codes = RoundedCodes(folder / CODES)
        codes.begin(self._list_options())
        given = self.checkpoint, self.settings, self.matrices, self.inputs
        return LayerRounding(*given, codes, self.num_sequences)

    def check_same(self, folder: Path) -> None:
        """Refuse the codes of an interrupted run with other options."""
        if not RoundedCodes(folder / CODES).is_of(self._list_options()):
            raise UsageError(
                f"{folder}: the interrupted run had another scheme or other options",
                hint="use the options of that run; to start again, remove the folder",
            )

    def _list_options(self) -> dict[str, object]:
        """List the options that the codes depend on, beside the model and the text."""
        settings = self.settings
        return {
            "scheme": settings.scheme.name,
            "power_of_two": any(each.has_power_of_two_scales for each in settings.schemes),
            **({"layer_schemes": settings.layer_schemes} if settings.by_pattern else {}),
            "ignore": sorted(settings.ignore),
            "damping": DAMPING,
            "length_power": LENGTH_POWER,
            "scale_steps": SCALE_STEPS,
        }


def count_code_bytes(matrices: Collection[Matrix]) -> int:
    """Count the bytes of the codes of weights, which the disk holds twice until the end."""
    return sum(matrix.shape[0] * matrix.shape[1] for matrix in matrices)


class LayerRounding(HessianRecorder):
    """Collects the Hessians of each layer and rounds its weights."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        settings: PlanSettings,
        matrices: Sequence[Matrix],
        inputs: Mapping[str, MappedInput],
        codes: RoundedCodes,
        num_sequences: int,
    ) -> None:
        self._todo: dict[int, list[Matrix]] = defaultdict(list)
        for matrix in matrices:
            mapped = inputs.get(matrix.module)
            if mapped is not None and not codes.has_layer(mapped.layer):
                self._todo[mapped.layer].append(matrix)
        wanted = {inputs[m.module].runner for found in self._todo.values() for m in found}
        super().__init__(wanted, num_sequences)
        self._checkpoint, self._settings, self._matrices = checkpoint, settings, matrices
        self._inputs, self._codes = inputs, codes

    def finish_layer(self, layer: Layer) -> None:
        """Round the weights of a layer and write their codes."""
        hessians = self.take()
        matrices = self._todo.get(layer.index)
        if matrices is None:
            return
        device = next((each.used.device for each in hessians.sums.values()), torch.device("cpu"))
        with (
            ThreadPoolExecutor(1) as pool,
            self._codes.written_layer(layer.index, matrices, self._settings) as put,
        ):
            reader = WeightReader(self._checkpoint, pool, device=device)
            scales = WeightScales(self._matrices, reader)
            for sums, group in self._group_by_input(matrices, hessians):
                rounding = _InputRounding(sums, hessians.changing)
                for matrix in group:
                    weight = reader.read(matrix, range(matrix.shape[0]))
                    key = self._inputs[matrix.module].key
                    scheme = self._settings.scheme_of(matrix.module)
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
        if self._sums.num_used < MIN_HESSIAN_TOKENS:
            return f"fewer than {MIN_HESSIAN_TOKENS} tokens reached it"
        return "" if self._sums.num_held else "no held-back token reached it"


def _to_db(signal: float, error: float) -> float | None:
    return 10 * math.log10(signal / error) if signal > 0 and error > 0 else None
