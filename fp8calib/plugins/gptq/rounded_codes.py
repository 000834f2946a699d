"""The codes of rounded weights and their scales, in a work folder: a file and a report per layer.

The report is written last: a layer that has one is complete, and a resumed run leaves it as it is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from fp8calib.checkpoint.output import write_file_atomic
from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.numerics.schemes import count_parts
from fp8calib.quantization.matrices import Matrix
from fp8calib.quantization.settings import PlanSettings
from fp8calib.quantization.shard_layout import OutputTensor, lay_out

GPTQ = "gptq"
_CODES = "layer-{:05}.safetensors"
_REPORT = "layer-{:05}.json"
_OPTIONS = "options.json"
_SCALES = "{}/scales"
"""The scales of a tensor: one, or one per row or block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedLinear:
    """How a weight was rounded."""

    module: str
    rounding: str
    """`gptq` or `nearest`."""
    why: str = ""
    """Why it was rounded to nearest."""
    tokens: int = 0
    """Tokens in its Hessian."""
    held_tokens: int = 0
    gptq_db: float | None = None
    """The signal-to-error ratio of its output on held-back tokens, in dB, if rounded by GPTQ."""
    nearest_db: float | None = None
    damping: float | None = None
    """The share of the Hessian's mean diagonal that was added to it."""


class RoundedCodes:
    """The folder of rounded codes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, TensorFile] | None = None

    def begin(self, options: Mapping[str, object]) -> None:
        """Record the options of a run."""
        write_file_atomic(self._folder / _OPTIONS, json.dumps(options).encode())

    def is_of(self, options: Mapping[str, object]) -> bool:
        """Tell whether a run with these options may continue: the codes have the same options."""
        path = self._folder / _OPTIONS
        return not path.is_file() or path.read_text() == json.dumps(options)

    def has_layer(self, index: int) -> bool:
        """Tell whether a layer is complete."""
        return (self._folder / _REPORT.format(index)).is_file()

    @contextmanager
    def written_layer(
        self, index: int, matrices: Sequence[Matrix], settings: PlanSettings
    ) -> Iterator[Callable[[Matrix, torch.Tensor, torch.Tensor, RoundedLinear], None]]:
        """Write a layer: yields a function that writes codes, scales and report of one matrix."""
        path = self._folder / _CODES.format(index)
        path.parent.mkdir(exist_ok=True)
        tensors = [OutputTensor(name=m.tensor, dtype="F8_E4M3", shape=m.shape) for m in matrices]
        tensors += [
            OutputTensor(
                name=_SCALES.format(m.tensor),
                dtype="F32",
                shape=count_parts(m.shape, settings.scheme_of(m.module)),
            )
            for m in matrices
        ]
        layout = lay_out(path.name, tensors, metadata={})
        report: list[RoundedLinear] = []
        with path.open("wb") as file:
            file.write(layout.head)

            def put(
                matrix: Matrix, codes: torch.Tensor, scales: torch.Tensor, rounded: RoundedLinear
            ) -> None:
                for name, values in (
                    (matrix.tensor, codes),
                    (_SCALES.format(matrix.tensor), scales),
                ):
                    file.seek(layout.starts[name])
                    file.write(values.contiguous().cpu().view(-1).view(torch.uint8).numpy().data)
                report.append(rounded)

            yield put
            file.flush()
            os.fsync(file.fileno())
        document = json.dumps([asdict(each) for each in report]).encode()
        write_file_atomic(self._folder / _REPORT.format(index), document)

    def report(self) -> list[RoundedLinear]:
        """List the weights of all complete layers."""
        paths = sorted(self._folder.glob("layer-*.json"))
        return [
            RoundedLinear(**fields) for path in paths for fields in json.loads(path.read_bytes())
        ]

    def __contains__(self, matrix: Matrix) -> bool:
        return matrix.tensor in self._open()

    def read(self, matrix: Matrix, rows: range) -> torch.Tensor:
        """Read the codes of consecutive rows: float8_e4m3fn."""
        return self._open()[matrix.tensor].read_rows(matrix.tensor, rows.start, rows.stop)

    def read_scales(self, matrix: Matrix) -> torch.Tensor:
        """Read the scales of a weight: fp32 [], or one per row or block."""
        name = _SCALES.format(matrix.tensor)
        return self._open()[name].read(name)

    def _open(self) -> Mapping[str, TensorFile]:
        """Find the file of each tensor."""
        if self._files is None:
            files = map(TensorFile, sorted(self._folder.glob("layer-*.safetensors")))
            self._files = {name: file for file in files for name in file.tensors}
        return self._files

    def close(self) -> None:
        """Close all files."""
        for file in (self._files or {}).values():
            file.close()
        self._files = None
