"""Decode a checkpoint that is quantized already: codes times scales.

`calibrate` and `verify` run such a model if no unquantized one is published; `dequantize` writes
its values; the RFC's export rounds int4 weights to FP8. Weights are decoded one at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from math import prod
from pathlib import Path
from types import MappingProxyType

import torch

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.header import FLOATS, ITEM_SIZE_BYTES, TensorEntry
from fp8calib.checkpoint.model_config import CONFIG_NAME, find_dtype, without_quantization
from fp8calib.errors import ModelError, shorten
from fp8calib.formats.fp8.checkpoint import Fp8Checkpoint
from fp8calib.formats.fp8.weights import is_companion
from fp8calib.formats.kv.parse_names import find_spelling
from fp8calib.formats.quantized_model import find_quantized
from fp8calib.quantization.sources.packed import StoredWeight, find_blocks, find_fp4, find_integers

FP8 = "FP8"
_LARGEST_HALF = torch.finfo(torch.float16).max
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_READ = (
    "calibrate, verify and dequantize read FP8 checkpoints, INT4 and INT8 weights of "
    "compressed-tensors, NVFP4 of compressed-tensors and ModelOpt, and MXFP4 of "
    "compressed-tensors, gpt_oss and DeepSeek-V4"
)


def decode_model(checkpoint: Checkpoint, *, if_quantized: str) -> DecodedCheckpoint:
    """Decode the quantized checkpoint of a model to run.

    `if_quantized` is the hint of the error for a checkpoint that cannot be decoded.

    Raises:
        ModelError: it is quantized in a form that cannot be decoded.
    """
    decoded = DecodedCheckpoint(checkpoint)
    if decoded.form:
        return decoded
    is_plain = _is_plain(checkpoint)
    what = f"is already quantized (quant_method {decoded.method})"
    hint = f"{if_quantized}; {_READ}"
    if is_plain and any(map(find_spelling, checkpoint.tensors)):
        what, hint = "has KV scales, and its weights are not quantized", if_quantized
    elif is_plain:
        what = "has a quantization_config, but none of its weights is quantized"
        hint = (
            f"remove it from {CONFIG_NAME} if the model is unquantized, or copy the weights again"
        )
    raise ModelError(f"{checkpoint.folder} {what}", hint=hint)


def open_quantized(folder: Path, *, dtype: str = "") -> DecodedCheckpoint:
    """Open a quantized checkpoint to write its values.

    Weights are decoded in `dtype`; empty for that of config.json.

    Raises:
        ModelError: it cannot be read, is not quantized, or cannot be decoded.
    """
    checkpoint = Checkpoint.open(folder)
    quantized = find_quantized(checkpoint)
    fault = "its weights are not quantized"
    hint = "there is nothing to dequantize: use the model as it is"
    if quantized is not None:
        decoded = DecodedCheckpoint(checkpoint, dtype=dtype)
        if decoded.form:
            return decoded
        if not _is_plain(checkpoint):
            fault = f"its weights cannot be dequantized (quant_method {quantized.method})"
            hint = _READ
    raise ModelError(f"{folder}: {fault}", hint=hint)


def can_decode(checkpoint: Checkpoint) -> bool:
    """Check whether a checkpoint is quantized in a form that can be decoded."""
    try:
        return find_quantized(checkpoint) is not None and bool(DecodedCheckpoint(checkpoint).form)
    except ModelError:  # its form is known, and it is damaged
        return False


def _is_plain(checkpoint: Checkpoint) -> bool:
    """Check whether all tensors of a checkpoint are floats of 16 or 32 bits."""
    return all(entry.dtype in _DTYPES.values() for entry in checkpoint.tensors.values())


class DecodedCheckpoint(Checkpoint):
    """A quantized checkpoint whose weights are read as codes times scales.

    In `tensors` every weight has the dtype that config.json names. Its weights may have several
    forms; `form` is empty if none of them can be decoded.

    Attributes:
        weights: the quantized weights, by the names that they have unquantized.
        method: the method of quantization, as messages name it.
        dtype_name: the dtype of decoded weights, as config.json spells it.
    """

    def __init__(self, stored: Checkpoint, *, dtype: str = "") -> None:
        """Decode in `dtype`; empty for that of config.json, or bfloat16 if it names none."""
        super().__init__(stored.folder, files=stored.files, index=stored.index)
        self._stored = stored
        quantized = find_quantized(stored)
        assert quantized is not None  # noqa: S101 -- every caller has checked it
        self.method = quantized.method
        self.weights: dict[str, StoredWeight] = dict(find_fp4(stored))
        if quantized.method == "compressed-tensors":
            self.weights |= find_integers(stored)
        if quantized.method == "fp8":
            self.weights |= find_blocks(stored, quantized.config)
        if quantized.config.get("transform_config"):
            raise ModelError(
                f"{stored.folder}: transform_config rotates the inputs of its weights",
                hint="name the unquantized model",
            )
        parts = {part for weight in self.weights.values() for part in weight.parts}
        self._fp8 = fp8 = _open_fp8(stored, parts)
        if fp8 is not None:
            self.weights |= {
                name: StoredWeight(
                    form=FP8,
                    shape=fp8.tensors[name].shape,
                    parts=(name,),
                    decode=partial(fp8.read_rows, name),
                )
                for name in sorted(fp8.quantized)
            }
        if not self.weights:
            return
        method = quantized.method if self._fp8 is None else self._fp8.dialect.name
        forms = sorted({weight.form for weight in self.weights.values()})
        self.form = f"{' and '.join(forms)} weights ({method})"
        named = dtype or find_dtype(stored.load_config())
        self.dtype_name = named if named in _DTYPES else "bfloat16"
        stored_dtype = _DTYPES[self.dtype_name]
        size = ITEM_SIZE_BYTES[stored_dtype]
        entries = dict(self._list_others(parts))
        entries |= {
            name: TensorEntry(stored_dtype, weight.shape, 0, prod(weight.shape) * size)
            for name, weight in self.weights.items()
        }
        names = (*(name for name in self.tensors if name in entries), *entries)
        self.tensors = MappingProxyType({name: entries[name] for name in names})

    def _list_others(self, parts: Collection[str]) -> Iterator[tuple[str, TensorEntry]]:
        """List the tensors of the model that are not quantized."""
        for name, entry in self.tensors.items():
            leaf = name.rpartition(".")[2]
            is_scale = self._fp8 is not None and name not in self._fp8.tensors
            if name in parts or name in self.weights or is_scale or is_companion(name):
                continue
            if leaf == "weight_g_idx":
                fault = f"{shorten(name)}: groups of reordered columns are not read"
            elif entry.dtype not in FLOATS and leaf.startswith("weight"):
                fault = f"{shorten(name)} is stored in {entry.dtype}, beside {self.form}"
            else:
                yield name, entry
                continue
            raise ModelError(
                f"{self.folder}: {fault}", hint=f"{_READ}; or name the unquantized model"
            )

    @property
    def stored(self) -> Checkpoint:
        """The checkpoint as it is on disk, with its codes and scales."""
        return self._stored

    def load_config(self) -> dict[str, object]:
        """Load `config.json` without the sections on quantization."""
        return without_quantization(self._stored.load_config())

    def make_rows(self, name: str, rows: slice) -> torch.Tensor | None:
        """Decode rows of a quantized weight."""
        weight = self.weights.get(name)
        if weight is None:
            return None
        start, stop, _ = rows.indices(weight.shape[0])
        values, dtype = weight.decode(start, stop), self.dtype(name)
        if dtype is torch.float16 and values.numel() and float(values.abs().max()) > _LARGEST_HALF:
            raise ModelError(
                f"{self.folder}: {shorten(name)} holds values beyond {_LARGEST_HALF}, the largest "
                "of float16",
                hint="use --dtype bfloat16, which has the range of float32",
            )
        return values.to(dtype)

    def form_of(self, name: str) -> str:
        """Return the form of a decoded tensor on disk; empty for other tensors."""
        return self.weights[name].form if name in self.weights else ""

    def file_of(self, name: str) -> Path:
        """Return the file that holds a tensor, or the codes of a decoded one."""
        return super().file_of(self.weights[name].parts[0] if name in self.weights else name)

    def close(self) -> None:
        """Close all files."""
        super().close()
        if self._fp8 is not None:
            self._fp8.close()


def _open_fp8(checkpoint: Checkpoint, parts: Collection[str]) -> Fp8Checkpoint | None:
    """Open the FP8 weights of a checkpoint; None if there are none."""
    if not any(
        entry.dtype.startswith("F8_") and name not in parts and not is_companion(name)
        for name, entry in checkpoint.tensors.items()
    ):
        return None
    rest = Checkpoint(checkpoint.folder, files=checkpoint.files, index=checkpoint.index)
    rest.tensors = {name: entry for name, entry in rest.tensors.items() if name not in parts}
    return Fp8Checkpoint(rest)
