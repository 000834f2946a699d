"""The scales file of vLLM 0.4 to 0.6 and SGLang."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8calib.calibration.calibration_stats import CalibrationStats
from fp8calib.formats.compute import compute_kv_scales
from fp8calib.numerics.formats import E4M3FN, E4M3FNUZ
from tests.formats.handmade import (
    hybrid_stats,
    latent_stats,
    plain_stats,
    shared_stats,
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
    "text": "+/////////8HAAAAAAAAAA=="
  }
}
"""


def _write(stats: CalibrationStats, path: Path, tp: int = 1) -> dict[str, dict[str, float]]:
    write_scales("vllm-json", compute_kv_scales(stats, E4M3FN, tp=tp), path)
    factors: dict[str, dict[str, float]] = json.loads(path.read_text())["kv_cache"][
        "scaling_factor"
    ]
    return factors


def test_the_file_for_two_ranks_is_these_bytes(tmp_path: Path) -> None:
    _write(plain_stats(), tmp_path / "a.json", tp=2)

    assert (tmp_path / "a.json").read_text() == GOLDEN


@pytest.mark.parametrize(
    ("tp", "expected"),
    [
        (1, {"0": {"0": 0.75, "1": 2.0}}),
        (
            4,
            {
                "0": {"0": 0.25, "1": 2.0},
                "1": {"0": 0.25, "1": 2.0},
                "2": {"0": 0.75, "1": 0.0625},
                "3": {"0": 0.75, "1": 0.0625},
            },
        ),
    ],
)
def test_a_rank_has_the_maximum_of_the_heads_it_owns(
    tmp_path: Path, tp: int, expected: dict[str, dict[str, float]]
) -> None:
    assert _write(plain_stats(), tmp_path / "a.json", tp=tp) == expected


def test_layers_without_a_cache_are_listed_with_one(tmp_path: Path) -> None:
    assert _write(hybrid_stats(), tmp_path / "a.json") == {"0": {"0": 1.0, "1": 2.0}}


def test_layers_that_read_another_cache_have_its_scale(tmp_path: Path) -> None:
    expected = {"0": {"0": 0.75, "1": 2.0, "2": 2.0, "3": 0.75}}
    assert _write(shared_stats(), tmp_path / "a.json") == expected


def test_latents_are_whole_on_every_rank(tmp_path: Path) -> None:
    assert _write(latent_stats(), tmp_path / "a.json", tp=2) == {"0": {"0": 0.5}, "1": {"0": 0.5}}


def test_the_dtype_of_fnuz_scales_is_named(tmp_path: Path) -> None:
    write_scales("vllm-json", compute_kv_scales(plain_stats(), E4M3FNUZ), tmp_path / "a.json")

    kv_cache = json.loads((tmp_path / "a.json").read_text())["kv_cache"]
    assert kv_cache["dtype"] == "float8_e4m3fnuz"
    assert kv_cache["scaling_factor"]["0"]["1"] == 3.7333333492279053
