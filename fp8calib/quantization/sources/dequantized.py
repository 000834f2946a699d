"""Read an FP8 checkpoint as an unquantized one, to quantize it in another way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.header import ITEM_SIZE_BYTES, TensorEntry
from fp8calib.checkpoint.model_config import without_quantization
from fp8calib.checkpoint.tensor_file import TORCH_DTYPES, TensorFile
from fp8calib.checkpoint.weight_index import WeightIndex
from fp8calib.dialects.fp8.checkpoint import Fp8Checkpoint
from fp8calib.errors import ModelError

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


class DequantizedCheckpoint(Checkpoint):
    """An FP8 checkpoint whose weights are read as codes times scales.

    In `tensors` every FP8 weight has the dtype that config.json names, and `read_span` rounds to
    it; `read_rows` gives fp32, so that another quantization rounds only once. There are no scales,
    not even of K and V.
    """

    def __init__(
        self, folder: Path, *, files: Mapping[str, TensorFile], index: WeightIndex | None
    ) -> None:
        super().__init__(folder, files=files, index=index)
        if not any(entry.dtype.startswith("F8_") for entry in self.tensors.values()):
            raise ModelError(
                f"--dequantize: {folder} has no FP8 weights",
                hint="an unquantized model needs no --dequantize; other formats are not supported",
            )
        try:
            self._fp8 = Fp8Checkpoint.open(folder, fuse=False)
        except ModelError as error:
            raise ModelError(
                f"--dequantize: {error.message}",
                hint=error.hint or "only FP8 checkpoints can be dequantized",
            ) from error
        self._dtype = find_dtype(self._fp8.load_config())
        self.tensors = MappingProxyType(
            {name: self._make_entry(name, entry) for name, entry in self._fp8.tensors.items()}
        )

    def load_config(self) -> dict[str, object]:
        """Load `config.json` without the sections on quantization."""
        return without_quantization(super().load_config())

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read rows of the first axis; those of an FP8 weight in fp32."""
        if name not in self._fp8.quantized:
            return super().read_rows(name, start, stop)
        return self._fp8.read_rows(name, start, stop)

    def read_block(self, name: str, index: int, rows: range, columns: range) -> torch.Tensor:
        """Read a part of one matrix of a 3-D tensor; of an FP8 weight in fp32."""
        if name not in self._fp8.quantized:
            return super().read_block(name, index, rows, columns)
        matrix = self.read_rows(name, index, index + 1)[0]
        return matrix[rows.start : rows.stop, columns.start : columns.stop]

    def read_bytes(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read bytes of a tensor's data; those of an FP8 weight in the config's dtype."""
        if name not in self._fp8.quantized:
            return super().read_bytes(name, start, stop)
        entry = self.tensors[name]
        row_bytes = entry.size_bytes // entry.shape[0]
        first, last = start // row_bytes, -(-stop // row_bytes)
        rows = self.read_rows(name, first, last).to(TORCH_DTYPES[entry.dtype])
        data = rows.contiguous().view(torch.uint8).reshape(-1)
        return data[start - first * row_bytes : stop - first * row_bytes]

    def close(self) -> None:
        """Close all files."""
        super().close()
        self._fp8.close()

    def _make_entry(self, name: str, entry: TensorEntry) -> TensorEntry:
        if name not in self._fp8.quantized:
            return entry
        size_bytes = entry.size_bytes * ITEM_SIZE_BYTES[self._dtype]
        return replace(entry, dtype=self._dtype, start=0, stop=size_bytes)


def find_dtype(config: Mapping[str, object]) -> str:
    """Find the dtype that a config names, by its name in files; BF16 if it names none."""
    inner = config.get("text_config")
    for fields in (config, inner if isinstance(inner, dict) else {}):
        dtype = fields.get("dtype") or fields.get("torch_dtype")
        if isinstance(dtype, str) and dtype in _DTYPES:
            return _DTYPES[dtype]
    return "BF16"
