"""`kv-scales`: one safetensors file with nothing but the scale tensors of an overlay."""

from __future__ import annotations

from pathlib import Path

from fp8calib.checkpoint.tensor_file import save_tensors
from fp8calib.dialects.names import make_scale_tensors
from fp8calib.scales import ScaleTable


def write_kv_scales(table: ScaleTable, path: Path) -> None:
    """Write the table's scales under the names an overlay gives them, fp32 0-dim.

    Raises:
        ExportError: the file cannot be written.
    """
    save_tensors(path, make_scale_tensors(table), metadata={"format": "pt"})
