"""The weights of an FP8 checkpoint as numbers, whichever tool wrote it.

Weights are read one at a time and come back in fp32: codes times scales. The form is recognised by
the names and dtypes of the tensors and the config has to agree with it; nothing is assumed, what
does not fit is refused by name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

import torch

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.header import TensorEntry
from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.checkpoint.tensor_file import TORCH_DTYPES
from fp8calib.dialects.fp8.config_readers import load_finder
from fp8calib.dialects.fp8.pairing import pair_tensors
from fp8calib.dialects.fp8.quantization_config import Activation, contradiction
from fp8calib.dialects.fp8.weights import Fp8Weight, dequantize, requantize, spread_scale
from fp8calib.dialects.kv.validate import check_scales
from fp8calib.dialects.metadata import find_measurement
from fp8calib.dialects.refusals import reading_errors, refusal
from fp8calib.fp8.schemes import Granularity

_METHODS = {"fp8": "autofp8"}


class Fp8Checkpoint:
    """A folder of FP8 weights: headers, scales and config are checked, no weight is held.

    Made by `Fp8Checkpoint.open`; used as a context manager it gives its descriptors back.

    Attributes:
        folder: where the checkpoint lies.
        tensors: the tensors as they are stored, without scales and zero points.
        quantized: the names of those that are FP8.
        method: `compressed-tensors`, `autofp8`, `modelopt`, `quark`, `fbgemm_fp8`, or `finegrained`
            where the scales are called `weight_scale_inv`.
        fmt: the format of all FP8 weights.
        origin: the model and the text its scales come from; None where it does not say.
    """

    def __init__(self, checkpoint: Checkpoint, *, fuse: bool, through_float16: bool) -> None:
        self._checkpoint = checkpoint
        self._through_float16 = through_float16
        self.folder = checkpoint.folder
        method, find_scheme = load_finder(self.folder, self.load_config())
        pairing = pair_tensors(checkpoint, find_scheme)
        self._weights, self._schemes = pairing.weights, pairing.schemes
        self.quantized = frozenset(pairing.weights)
        self.tensors: Mapping[str, TensorEntry] = MappingProxyType(pairing.others)
        self.fmt = pairing.fmt
        self.method = self._name_method(method)
        self.origin = find_measurement(self.folder, checkpoint.files)
        for name in pairing.zero_points:
            self._check_zero_point(name)
        self._stored = self._load_tensor_scales()
        self._input_scales = self._load_input_scales()
        self._shared: Mapping[str, float] = {}
        if fuse:
            weights = self._weights
            self._shared = _share(self._stored, lambda name: weights[name].fused_group)
            self._input_scales = _share(self._input_scales, lambda name: weights[name].input_group)

    @classmethod
    def open(cls, folder: Path, *, fuse: bool, through_float16: bool = False) -> Self:
        """Read everything but the weights, and check that it fits together.

        Args:
            folder: a Hugging Face checkpoint.
            fuse: share scales as engines do at load: one per-tensor weight scale for projections
                that they fuse, one static input scale for these and for all experts of a layer;
                each the largest. Weights are rounded again with the shared scale.
            through_float16: with `fuse`, dequantize per-tensor weights to fp16 before they are
                rounded again, fused or not, as vLLM does.

        Raises:
            VerificationError: it is no FP8 checkpoint, or not a whole and sound one.
        """
        with reading_errors():
            checkpoint = Checkpoint.open(folder)
        try:
            return cls(checkpoint, fuse=fuse, through_float16=through_float16)
        finally:
            checkpoint.close()

    def load_config(self) -> dict[str, object]:
        """Load `config.json`, its keys in the file's order.

        Raises:
            VerificationError: there is none, or it is not a JSON object.
        """
        with reading_errors():
            return self._checkpoint.load_config()

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor whole: an FP8 weight as fp32 values, any other as it is stored.

        Raises:
            VerificationError: there is no such tensor, its file cannot be read any more, or the
                weight holds a NaN or an infinity.
        """
        self._require(name)
        with reading_errors():
            stored = self._checkpoint.read(name)
        return self._dequantize(name, stored, 0) if name in self.quantized else stored

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read the rows `start` to `stop` (exclusive) of the leading dimension, as `read` does.

        Raises:
            VerificationError: as `read`.
            IndexError: the tensor does not have these rows.
        """
        self._require(name)
        with reading_errors():
            stored = self._checkpoint.read_rows(name, start, stop)
        return self._dequantize(name, stored, start) if name in self.quantized else stored

    def dtype(self, name: str) -> torch.dtype:
        """Tell the dtype `read` gives."""
        self._require(name)
        return torch.float32 if name in self.quantized else self._checkpoint.dtype(name)

    def read_reach(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Give the largest magnitude that each element of an FP8 weight could be stored as.

        It is that of the file: the scale is the weight's own, not one that is shared, and what the
        scale's dtype rounds off is added to it.

        Args:
            name: of an FP8 weight.
            start: the first row of the leading dimension.
            stop: the row after the last; None for all.

        Returns:
            fp32, of the weight's shape in these rows.
        """
        weight = self._find(name)
        stored = TORCH_DTYPES[self._checkpoint.tensors[weight.scale_name].dtype]
        scale = spread_scale(weight, self._read_scale(weight.scale_name))
        rows = slice(start, stop)
        scale = (scale if scale.shape[0] > 1 else scale.expand(weight.shape[0], *scale.shape[1:]))[
            rows
        ]
        columns = weight.shape[-1]
        if scale.shape[-1] not in (1, columns):
            scale = scale.repeat_interleave(weight.block[1], -1)[..., :columns]
        reach = scale * (self.fmt.max * (1 + max(torch.finfo(stored).eps, 2.0**-20)))
        return reach.expand(scale.shape[0], *weight.shape[1:])

    def granularity(self, name: str) -> Granularity:
        """Tell what shares one scale of the FP8 weight `name`."""
        return self._find(name).granularity

    def weight_scale(self, name: str) -> torch.Tensor:
        """Read the scale of an FP8 weight: fp32 in its stored shape, it multiplies.

        A scale that is shared is the shared one, with which `read` agrees.

        Raises:
            VerificationError: `name` is no FP8 weight, or the scale cannot be read.
        """
        weight = self._find(name)
        scale = self._read_scale(weight.scale_name)
        return scale.fill_(self._shared[name]) if name in self._shared else scale

    def activation(self, name: str) -> Activation:
        """Tell how the input of the linear that owns the FP8 weight `name` is quantized.

        Raises:
            VerificationError: `name` is no FP8 weight.
        """
        self._find(name)
        scheme = self._schemes[name]
        return Activation(
            kind=scheme.input,
            scale=self._input_scales.get(name),
            upper_bound=scheme.upper_bound,
        )

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def close(self) -> None:
        """Give all descriptors back; a later read opens its file again."""
        self._checkpoint.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _name_method(self, method: str) -> str:
        inverses = [w.scale_name for w in self._weights.values() if w.scale_name.endswith("_inv")]
        if inverses and method != "fp8":
            fault = f"there is {inverses[0]}, but quant_method is {method}"
            raise contradiction(self.folder / CONFIG_NAME, fault)
        return "finegrained" if inverses else _METHODS.get(method, method)

    def _require(self, name: str) -> None:
        if name not in self.tensors:
            raise refusal(self.folder, f"there is no tensor {name!r}")

    def _find(self, name: str) -> Fp8Weight:
        if name not in self._weights:
            raise refusal(self.folder, f"{name!r} is no FP8 weight of this checkpoint")
        return self._weights[name]

    def _dequantize(self, name: str, codes: torch.Tensor, start: int) -> torch.Tensor:
        """Turn the rows from `start` on into values; fused weights are rounded again."""
        weight = self._weights[name]
        scale = spread_scale(weight, self._read_scale(weight.scale_name))
        if scale.shape[0] > 1:
            scale = scale[start : start + codes.shape[0]]
        values = dequantize(codes, scale, weight.block[1])
        if not _is_finite(values):
            hint = "FP8 has codes for NaN, which a quantizer writes where its scale was wrong"
            path = self._checkpoint.file_of(name)
            row, *rest = (~values.isfinite()).nonzero()[0].tolist()
            fault = f"{name} holds NaN or infinity at {[start + row, *rest]}"
            raise refusal(path, fault, hint=hint)
        shared = self._shared.get(name)
        if shared is None:
            return values
        if self._through_float16:
            return requantize(values.half().float(), shared, self.fmt)
        return values if shared == self._stored[name] else requantize(values, shared, self.fmt)

    def _read_scale(self, name: str) -> torch.Tensor:
        """Read and check a scale: fp32, in its stored shape."""
        with reading_errors():
            values = self._checkpoint.read(name).to(torch.float32)
        stored = self._checkpoint.tensors[name].dtype
        check_scales(self._checkpoint.file_of(name), name, values, stored=stored)
        return values

    def _load_tensor_scales(self) -> dict[str, float]:
        """Check all weight scales, and keep those of weights [out, in] that have only one."""
        kept: dict[str, float] = {}
        for name, weight in self._weights.items():
            scale = self._read_scale(weight.scale_name)
            if weight.granularity is Granularity.TENSOR and len(weight.shape) == 2:
                kept[name] = scale.item()
        return kept

    def _load_input_scales(self) -> dict[str, float]:
        return {
            name: self._read_scale(weight.input_scale_name).item()
            for name, weight in self._weights.items()
            if weight.input_scale_name is not None
        }

    def _check_zero_point(self, name: str) -> None:
        with reading_errors():
            values = self._checkpoint.read(name).to(torch.float32)
        if bool((values != 0).any()):
            hint = "FP8 is symmetric; engines leave zero points out"
            raise refusal(self._checkpoint.file_of(name), f"{name} is not zero", hint=hint)


def _is_finite(values: torch.Tensor) -> bool:
    """Tell whether all elements are; extremes pass NaN on, and are 14 times as fast to find."""
    return not values.numel() or all(bool(end.isfinite()) for end in torch.aminmax(values))


def _share(
    scales: Mapping[str, float], group_of: Callable[[str], tuple[str, str]]
) -> dict[str, float]:
    """Give every scale the largest of its group."""
    groups: dict[tuple[str, str], float] = defaultdict(float)
    for name, scale in scales.items():
        groups[group_of(name)] = max(groups[group_of(name)], scale)
    return {name: groups[group_of(name)] for name in scales}
