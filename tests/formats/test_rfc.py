"""The RFC's JSON: every number typed by hand (`rfc_expected.json`) from `handmade`."""

import json
from pathlib import Path
from typing import Any

import pytest

from fp8calib.calibration.calibration_stats import CalibrationStats
from fp8calib.formats.compute import compute_kv_scales, compute_linear_scales
from fp8calib.numerics.formats import E4M3FN, Fp8Format
from fp8calib.numerics.rules import Fallback, ScaleRules
from tests.formats.handmade import DATA, MODEL, linear_stats, write_scales


def _per_rank(rank: int, keys: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Give layer 0 as typed and layer 1 doubled, as `handmade` makes them."""
    return {
        str(layer): {name: scales[rank] * (layer + 1) for name, scales in keys.items()}
        for layer in range(2)
    }


def _write(
    stats: CalibrationStats,
    path: Path,
    *,
    tp: int = 1,
    fmt: Fp8Format = E4M3FN,
    fallback: Fallback | None = None,
) -> dict[str, Any]:
    kv = compute_kv_scales(stats, fmt, tp=tp)
    linears = compute_linear_scales(stats, fmt, tp=tp, rules=ScaleRules(fallback=fallback))
    write_scales("rfc", kv, path, linears=linears)
    document: dict[str, Any] = json.loads(path.read_text())
    return document


EXPECTED = json.loads(Path(__file__).with_name("rfc_expected.json").read_text())
"""By degree: the scales of every rank in layer 0."""


def _section(
    inputs: dict[str, list[float]], weights: dict[str, list[float]], tp: int
) -> dict[str, Any]:
    return {
        "activation": {
            "dtype": "bfloat16",
            "target_dtype": "float8_e4m3fn",
            "scaling_factor": {f"rank{rank}": _per_rank(rank, inputs) for rank in range(tp)},
        },
        "weight": {
            "dtype": "float8_e4m3fn",
            "scaling_factor": {f"rank{rank}": _per_rank(rank, weights) for rank in range(tp)},
        },
    }


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_rank_has_the_scales_of_its_rows_columns_and_heads(
    tmp_path: Path, tp: int, is_fused: bool
) -> None:
    document = _write(linear_stats(is_fused=is_fused), tmp_path / "rfc.json", tp=tp)

    n = EXPECTED[str(tp)]
    factors = {
        f"rank{rank}": {"0": scales[0], "1": scales[1]} for rank, scales in enumerate(n["kv"])
    }
    assert document == {
        "model_type": "llama",
        "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": factors},
        "mlp": _section(
            {"gate_proj": n["gate_in"], "up_proj": n["gate_in"], "down_proj": n["down_in"]},
            {"gate_proj": n["gate"], "up_proj": n["up"], "down_proj": n["down"]},
            tp,
        ),
        "attention": _section(
            dict.fromkeys(("q_proj", "k_proj", "v_proj"), n["qkv_in"]) | {"o_proj": n["o_in"]},
            {"q_proj": n["q"], "k_proj": n["k"], "v_proj": n["v"], "o_proj": n["o"]},
            tp,
        ),
        "_fp8calib": {"model": MODEL, "data": DATA, "text_start": "fedcba9876543210"},
    }
