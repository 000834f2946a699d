"""Readers read only the headers and scales of a checkpoint, never its weights."""

import json
import sys
from pathlib import Path

import pytest
import torch

from fp8calib.formats.read import read_scales
from fp8calib.model.geometry import Role
from tests.engines.check_handmade import plain_geometry

SCALES = {
    f"model.layers.{layer}.self_attn.{role}_scale": 0.25 * (layer + 1) + 0.5 * (role == "v")
    for layer in range(2)
    for role in "kv"
}
WEIGHT = "model.layers.0.mlp.up_proj.weight"
GIGABYTE = 1 << 30


def _save(folder: Path, *, weight_bytes: int, weight: bytes = b"") -> Path:
    """Write a checkpoint whose weight comes first: `weight`, and holes up to `weight_bytes`."""
    header: dict[str, object] = {
        WEIGHT: {
            "dtype": "F8_E4M3",
            "shape": [weight_bytes // 1024, 1024],
            "data_offsets": [0, weight_bytes],
        }
    }
    for index, name in enumerate(SCALES):
        start = weight_bytes + 4 * index
        header[name] = {"dtype": "F32", "shape": [1], "data_offsets": [start, start + 4]}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw + weight)
        file.seek(8 + len(raw) + weight_bytes)
        file.write(torch.tensor(list(SCALES.values())).numpy().tobytes())
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    config = {"model_type": "llama", "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _read(folder: Path) -> dict[str, float]:
    found = read_scales(folder, plain_geometry(), needs_dtype=True)
    assert (found.table.dialect, found.has_weights) == ("autofp8", True)
    return {
        f"{attention.module}.{role}_scale": float(found.table.scales[attention.site(role)].values)
        for _, attention in plain_geometry().attentions()
        for role in (Role.K, Role.V)
    }


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_of_sixty_four_gigabytes_a_few_kilobytes_are_read(tmp_path: Path) -> None:
    folder = _save(tmp_path / "large", weight_bytes=64 * GIGABYTE)
    size = (folder / "model.safetensors").stat().st_size
    assert size > 64 * GIGABYTE
    _read(folder)  # whatever is imported late is read here
    before = _count_bytes_read()
    assert _read(folder) == SCALES
    assert _count_bytes_read() - before < 100_000


def _count_bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])
