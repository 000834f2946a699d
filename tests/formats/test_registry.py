"""Write several formats at once, and refuse what cannot be written."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fp8calib.calibration.calibration_stats import CalibrationStats, SiteStats
from fp8calib.errors import ExportError, UsageError
from fp8calib.formats.registry import find_dialect
from fp8calib.formats.write import (
    check_export,
    check_overlay_source,
    write_formats,
)
from fp8calib.model.geometry import Role
from fp8calib.numerics.formats import E4M3FN
from fp8calib.numerics.rules import AMAX, Fallback, Rule, ScaleRules
from tests.formats.handmade import (
    amax_of,
    expert_stats,
    latent_stats,
    plain_stats,
    save_source,
)


def _write(
    stats: CalibrationStats,
    out: Path,
    formats: tuple[str, ...],
    *,
    tps: tuple[int, ...] = (1,),
    query: bool = False,
    fallback: Fallback | None = None,
    rule: Rule = AMAX,
) -> list[str]:
    needs_model = any(find_dialect(name).needs_model for name in formats)
    source = save_source(stats, out.with_name(f"{out.name}-source")) if needs_model else None
    return write_formats(
        stats,
        formats,
        out,
        fmt=E4M3FN,
        tps=tps,
        source=source,
        query=query,
        rules=ScaleRules(rule=rule, fallback=fallback),
    )


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Make an empty output folder."""
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def _with_dead_v(stats: CalibrationStats, *, scales: tuple[float, float]) -> CalibrationStats:
    site = stats.geometry.layers[0].attention.site(Role.V)  # type: ignore[union-attr]
    return dataclasses.replace(
        stats, sites={**stats.sites, site: SiteStats(count=8, amax=amax_of(scales))}
    )


@pytest.mark.parametrize(
    ("fallback", "expected"), [(None, 0.75), (Fallback.LAYER_MAX, 0.75), (Fallback.ONE, 1.0)]
)
def test_a_dead_head_takes_the_fallback_and_is_named(
    out: Path, fallback: Fallback | None, expected: float
) -> None:
    stats = _with_dead_v(plain_stats(), scales=(0.0, 0.75))
    notes = _write(stats, out, ("kv-overlay-head",), fallback=fallback)

    scales = load_file(out / "kv-overlay-head" / "model-00002-of-00002.safetensors")
    assert scales["model.layers.0.self_attn.v_scale"].flatten().tolist() == [expected, 0.75]
    why = "only zeros were seen, so its scale is the fallback"
    assert f"model.layers.0.self_attn.v: {why}" in notes


def test_a_layer_no_token_reached_is_refused_unless_a_fallback_is_named(out: Path) -> None:
    stats = plain_stats()
    site = stats.geometry.layers[0].attention.site(Role.K)  # type: ignore[union-attr]
    unseen = SiteStats(count=0, amax=torch.zeros(2))
    stats = dataclasses.replace(stats, sites={**stats.sites, site: unseen})

    with pytest.raises(ExportError, match=r"no token reached model\.layers\.0\.self_attn\.k"):
        _write(stats, out, ("kv-scales",))
    notes = _write(stats, out, ("kv-scales",), fallback=Fallback.ONE)
    assert load_file(out / "kv_scales.safetensors")[f"{site}_scale"].item() == 1.0
    why = "no token reached it, so its scale is the fallback, 1"
    assert notes == [f"{site}: {why}"]


def test_an_expert_no_token_reached_is_named_once_for_all_degrees(out: Path) -> None:
    notes = _write(expert_stats(), out, ("rfc",), tps=(1, 2))

    assert [note.partition(":")[0] for note in notes] == [
        f"model.layers.0.mlp.experts.1.{name}_proj.input" for name in ("gate", "up", "down")
    ]


def test_a_degree_that_cuts_no_weight_evenly_matters_to_the_rfc_alone() -> None:
    geometry = expert_stats().geometry
    layer = geometry.layers[0]
    narrow = [linear.model_copy(update={"expert_block": 8}) for linear in layer.linears]
    layer = layer.model_copy(update={"linears": tuple(narrow)})
    geometry = geometry.model_copy(update={"layers": (layer,)})

    check_export(geometry, ["vllm-json"], [2], E4M3FN)
    with pytest.raises(UsageError, match="does not divide the 1 blocks"):
        check_export(geometry, ["vllm-json", "rfc"], [2], E4M3FN)


def test_another_model_than_the_calibrated_one_is_refused(tmp_path: Path) -> None:
    source = save_source(latent_stats(), tmp_path / "model")  # it has one layer only

    with pytest.raises(ExportError, match=r"no tensor is under model\.layers\.1\.self_attn"):
        check_overlay_source(plain_stats().geometry, ["kv-overlay"], source)
    check_overlay_source(plain_stats().geometry, ["kv-scales"], source)
