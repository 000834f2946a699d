"""`kv-scales`: one safetensors file with nothing but the scale tensors of an overlay."""

from __future__ import annotations

from pathlib import Path

from fp8calib.checkpoint.tensor_file import save_tensors
from fp8calib.dialects.names import make_scale_tensors
from fp8calib.dialects.scale_metadata import Provenance, make_metadata
from fp8calib.scales.compute import ScaleTable


def write_kv_scales(table: ScaleTable, path: Path, *, provenance: Provenance | None = None) -> None:
    """Write the table's scales under the names an overlay gives them, fp32 0-dim.

    No config lies beside them, so the FP8 format stands in the header's metadata.

    Raises:
        ExportError: the file cannot be written.
    """
    metadata = make_metadata(fmt=table.fmt, measured_on=table.measured_on, provenance=provenance)
    save_tensors(path, make_scale_tensors(table), metadata={"format": "pt", **metadata})
