"""JSON files of scales: one byte for byte, and the numbers in it."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch

from fp8calib.calibration.statistic import SiteStats
from fp8calib.formats.compute import compute_kv_scales
from fp8calib.formats.dialect import WriteJob
from fp8calib.model.shapes import Role
from fp8calib.numerics.formats import E4M3FN
from tests.formats.handmade import (
    make_attention,
    make_geometry,
    make_stats,
    plain_stats,
    write_scales,
)

GOLDEN = """{
  "model_type": "llama",
  "kv_cache": {
    "dtype": "float8_e4m3fn",
    "scaling_factor": {
      "0": {
        "0": 0.25,
        "1": 2.0
      },
      "1": {
        "0": 0.75,
        "1": 0.0625
      }
    }
  },
  "_fp8calib": {
    "model": "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
    "data": "fedcba9876543210fedcba9876543210fedcba9876543210fedcba9876543210",
    "text_start": "fedcba9876543210"
  }
}
"""


def test_the_file_for_two_ranks_is_these_bytes(tmp_path: Path) -> None:
    write_scales("vllm-json", compute_kv_scales(plain_stats(), E4M3FN, tp=2), tmp_path / "a.json")
    assert (tmp_path / "a.json").read_text() == GOLDEN


def test_every_number_reads_back_as_the_fp32_it_was(tmp_path: Path) -> None:
    torch.manual_seed(0)
    amaxes = torch.cat([torch.rand(60) * 50, torch.tensor([1e-45, 1e-30, 3e38, 448 / 3])])
    geometry = make_geometry([make_attention(index) for index in range(64)])
    sites = {
        attention.site(role): SiteStats(count=1, amax=amaxes[layer.index].expand(2).clone())
        for layer, attention in geometry.attentions()
        for role in (Role.K, Role.V)
    }
    write_scales(
        "vllm-json", compute_kv_scales(make_stats(geometry, sites), E4M3FN), tmp_path / "a.json"
    )

    read = json.loads((tmp_path / "a.json").read_text())["kv_cache"]["scaling_factor"]["0"]
    expected = (amaxes / 448).clamp(min=2.0**-126)
    assert [struct.pack("<f", read[str(index)]) for index in range(64)] == [
        struct.pack("<f", value) for value in expected.tolist()
    ]
    assert all(read[str(index)] == expected[index].item() for index in range(64))


def test_numbers_that_are_no_json_are_refused(tmp_path: Path) -> None:
    job = WriteJob(table=compute_kv_scales(plain_stats(), E4M3FN))
    with pytest.raises(ValueError, match="not JSON compliant"):
        job.save_json(tmp_path / "a.json", {"scale": float("nan")})
    assert not (tmp_path / "a.json").exists()
