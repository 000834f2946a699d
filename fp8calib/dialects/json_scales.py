"""What the JSON dialects have in common: one KV scale a layer, numbers that read back exactly."""

from __future__ import annotations

import json
from pathlib import Path

from fp8calib.checkpoint.atomic import write_file_atomic
from fp8calib.dialects.scale_metadata import JSON_MEASURED_KEY
from fp8calib.scales.compute import ScaleTable

NO_CACHE_SCALE = 1.0
"""For layers without K and V: readers want every layer's index, and this scales nothing."""


def list_kv_scales(table: ScaleTable, rank: int) -> dict[str, float]:
    """List the scale of every layer of the model by its index, as `rank` has it."""
    return {
        str(layer.index): table.kv(layer.attention, rank) if layer.attention else NO_CACHE_SCALE
        for layer in table.geometry.layers
    }


def describe_measurement(table: ScaleTable) -> dict[str, object]:
    """Say at the top of a document what the scales were measured on; readers pass over the key."""
    return {} if table.measured_on is None else {JSON_MEASURED_KEY: table.measured_on.to_fields()}


def save_json(path: Path, document: object) -> None:
    """Write a JSON file; every float reads back as the fp32 it was.

    Raises:
        ExportError: the file cannot be written.
    """
    text = json.dumps(document, indent=2, allow_nan=False)
    write_file_atomic(path, f"{text}\n".encode())
