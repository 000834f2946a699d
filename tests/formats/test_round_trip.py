"""Scales written in any dialect read back equal, as far as the dialect can hold them."""

import dataclasses
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from fp8calib.calibration.calibration_stats import RunStats, SiteStats
from fp8calib.errors import ExportError, UsageError
from fp8calib.formats.compute import compute_kv_scales, write_formats
from fp8calib.formats.convert import convert_table
from fp8calib.formats.dialect import WriteJob
from fp8calib.formats.read import read_scales
from fp8calib.formats.registry import find_dialect, list_format_names
from fp8calib.formats.table import Scale, ScaleTable
from fp8calib.formats.write import check_export, check_overlay_source, write_table
from fp8calib.model.geometry import Role, Site
from fp8calib.numerics.formats import E4M3FN, E4M3FNUZ, Fp8Format
from fp8calib.numerics.rules import Fallback, ScaleRules
from tests.formats.foreign import FOLDER, find_geometry
from tests.formats.handmade import (
    amax_of,
    expert_stats,
    latent_stats,
    make_attention,
    make_geometry,
    make_stats,
    plain_stats,
    save_source,
    write_scales,
)
from tests.kit.minutes import HAS_MINUTES

HEADS, KV_HEADS = 8, 4
WIDE = {"num_heads": HEADS, "num_kv_heads": KV_HEADS}
PLAIN = make_geometry([make_attention(index, **WIDE) for index in range(3)])
HYBRID = make_geometry([None, make_attention(1, **WIDE), None, make_attention(3, **WIDE)])
SHARED = make_geometry(
    [make_attention(index, producer=who, **WIDE) for index, who in enumerate((None, None, 1, 0))]
)
GPT2 = make_geometry(
    [
        make_attention(i, module=f"transformer.h.{i}.attn", checkpoint_module=f"h.{i}.attn", **WIDE)
        for i in range(2)
    ],
    model_type="gpt2",
)
"""Its checkpoint leaves the model's prefix out, and vLLM reads its scales under a second name."""
FILES: Mapping[str, str] = {
    "kv-scales": "kv_scales.safetensors",
    "vllm-json": "scales.json",
    "rfc": "rfc.json",
    "lightllm": "kv_cache_calib.json",
    "lightllm-head": "kv_cache_calib.json",
}
PER_HEAD = {"kv-overlay-head", "lightllm-head"}
LIGHTLLM = {"lightllm", "lightllm-head"}
"""Only for e4m3fn, without shared caches, and with one scale of q for the heads of a group."""
JOINT = {"tgi", "vllm-json", "rfc"}
RANKED = {"vllm-json", "rfc"}

# What fp32 holds, and twice and half of it: scales of real models lie far inside.
scales = st.floats(2.0**-100, 2.0**100, width=32)


@st.composite
def tables(draw: st.DrawFn) -> ScaleTable:
    """Draw a table of any shape: ranks or heads, shared and missing caches, q or none."""
    geometry = draw(st.sampled_from([PLAIN, HYBRID, SHARED, GPT2]))
    per_head = draw(st.booleans())
    tp = 1 if per_head else draw(st.sampled_from([1, 2, 4, 8]))
    roles = (Role.K, Role.V, Role.Q) if draw(st.booleans()) else (Role.K, Role.V)
    found: dict[Site, Scale] = {}
    for _, attention in geometry.attentions():
        for role in roles:
            heads = HEADS if role is Role.Q else KV_HEADS
            count = heads if per_head else tp
            values = torch.tensor(draw(st.lists(scales, min_size=count, max_size=count)))
            found[attention.site(role)] = Scale(
                values=values.unsqueeze(0) if per_head else values, source="observed"
            )
    for _, attention in geometry.attentions():
        if attention.producer is not None:
            producer = geometry.layers[attention.producer].attention
            assert producer is not None
            for role in (Role.K, Role.V):
                found[attention.site(role)] = found[producer.site(role)]
    fmt = draw(st.sampled_from([E4M3FN, E4M3FNUZ]))
    return ScaleTable(geometry=geometry, fmt=fmt, tp=tp, per_head=per_head, scales=found)


def _spread(table: ScaleTable, site: Site) -> list[float]:
    """Give the scale of every head: by hand, for 4 or 8 heads on 1, 2, 4 or 8 ranks."""
    numbers = table.scales[site].values.flatten().tolist()
    heads = HEADS if site.role is Role.Q else KV_HEADS
    if table.per_head:
        return [float(number) for number in numbers]
    if len(numbers) > heads:  # 8 ranks, 4 heads: two ranks hold the same head
        return [max(numbers[2 * head : 2 * head + 2]) for head in range(heads)]
    return [numbers[head * len(numbers) // heads] for head in range(heads)]


def _expect(table: ScaleTable, name: str, fmt: Fp8Format, tp: int) -> dict[Site, list[float]]:
    """Compute by hand what a dialect keeps of a table: heads or ranks, k and v or one of both."""
    factor = {(E4M3FN, E4M3FNUZ): 2.0, (E4M3FNUZ, E4M3FN): 0.5}.get((table.fmt, fmt), 1.0)
    kept: dict[Site, list[float]] = {}
    for site in table.scales:
        spread = _spread(table, site)
        if name in PER_HEAD:
            kept[site] = spread
        elif tp == table.tp and not table.per_head:
            kept[site] = table.scales[site].values.tolist()
        else:
            step = len(spread) / tp
            kept[site] = [
                max(spread[int(rank * step) : max(int((rank + 1) * step), int(rank * step) + 1)])
                for rank in range(tp)
            ]
    if name == "lightllm":
        kept = {site: numbers for site, numbers in kept.items() if site.role is not Role.Q}
    if name == "lightllm-head":
        group = HEADS // KV_HEADS
        for site in (site for site in kept if site.role is Role.Q):
            numbers = kept[site]
            kept[site] = [max(numbers[i // group * group :][:group]) for i in range(HEADS)]
    if name in JOINT:
        kept = {site: numbers for site, numbers in kept.items() if site.role is not Role.Q}
        for module in {site.module for site in kept}:
            pair = [kept[Site(module, role)] for role in (Role.K, Role.V)]
            both = [max(numbers) for numbers in zip(*pair, strict=True)]
            kept |= {Site(module, role): both for role in (Role.K, Role.V)}
    return {site: [number * factor for number in numbers] for site, numbers in kept.items()}


def _round_trip(table: ScaleTable, name: str, tmp_path: Path) -> ScaleTable:
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        stats, model_type = make_stats(table.geometry, {}), table.geometry.model_type
        source = save_source(stats, Path(folder) / "source", model_type=model_type)
        target = Path(folder) / "out" / FILES.get(name, "")
        target.parent.mkdir(exist_ok=True)
        with source:
            write_table(table, name, target, source=source)
        return read_scales(target, table.geometry, needs_dtype=True)


@pytest.mark.parametrize("name", list_format_names())
@settings(max_examples=60 if HAS_MINUTES else 20, deadline=None, derandomize=True)
@given(data=st.data(), table=tables(), fmt=st.sampled_from([E4M3FN, E4M3FNUZ]))
def test_every_dialect_reads_back_what_it_can_hold(
    data: st.DataObject,
    table: ScaleTable,
    fmt: Fp8Format,
    name: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    place = tmp_path_factory.getbasetemp()
    tp = data.draw(st.sampled_from([1, 2, 4, 8])) if name in RANKED else 1
    if name in LIGHTLLM:
        fmt = E4M3FN
        if table.geometry == SHARED:
            with pytest.raises(UsageError, match="counts layers that read another layer's cache"):
                _round_trip(convert_table(table, fmt=fmt, per_head=False), name, place)
            return
    fitted = convert_table(table, fmt=fmt, tp=tp, per_head=name in PER_HEAD)

    back = _round_trip(fitted, name, place)

    expected = _expect(table, name, fmt, tp)
    read = {site: scale.values.flatten().tolist() for site, scale in back.scales.items()}
    assert read == expected
    assert (back.fmt, back.tp, back.per_head) == (fmt, tp, name in PER_HEAD)
    assert back.geometry == table.geometry


@pytest.mark.parametrize("name", sorted(set(list_format_names()) - LIGHTLLM))
def test_a_latent_cache_has_one_scale_under_both_names_and_on_every_rank(
    name: str, tmp_path: Path
) -> None:
    ranks = {"tp": 2} if name in RANKED else {"per_head": name in PER_HEAD}
    table = compute_kv_scales(latent_stats(), E4M3FN, **ranks)
    back = _round_trip(table, name, tmp_path).scales
    assert back.keys() == table.scales.keys()
    assert {number for scale in back.values() for number in scale.values.flatten().tolist()} == {
        0.5
    }
    assert {scale.values.numel() for scale in back.values()} == {2 if name in RANKED else 1}


JSON = """{
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
    assert (tmp_path / "a.json").read_text() == JSON


def test_numbers_that_are_no_json_are_refused(tmp_path: Path) -> None:
    job = WriteJob(table=compute_kv_scales(plain_stats(), E4M3FN))
    with pytest.raises(ValueError, match="not JSON compliant"):
        job.save_json(tmp_path / "a.json", {"scale": float("nan")})
    assert not (tmp_path / "a.json").exists()


def test_scales_that_were_taken_from_a_quantized_model_say_so(tmp_path: Path) -> None:
    table = read_scales(FOLDER / "modelopt-fp8-kv", find_geometry("llama"))
    write_scales("kv-scales", table, tmp_path / FILES["kv-scales"])
    with safe_open(tmp_path / FILES["kv-scales"], "pt") as file:
        said = json.loads(file.metadata()["fp8calib.provenance"])
    assert (said["taken_from"], said["dialect"]) == ("a quantized model", "modelopt")
    assert said["has_fp8_weights"]


def _write(
    stats: RunStats,
    out: Path,
    formats: tuple[str, ...],
    *,
    tps: tuple[int, ...] = (1,),
    fallback: Fallback | None = None,
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
        query=False,
        rules=ScaleRules(fallback=fallback),
    )


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Make an empty output folder."""
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def _with_dead_v(stats: RunStats, *, scales: tuple[float, float]) -> RunStats:
    site = stats.geometry.layers[0].attention.site(Role.V)  # type: ignore[union-attr]
    return dataclasses.replace(
        stats, sites={**stats.sites, site: SiteStats(count=8, amax=amax_of(scales))}
    )


@pytest.mark.parametrize(
    ("fallback", "expected"), [(None, 0.75), ("layer-max", 0.75), ("one", 1.0)]
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
    notes = _write(stats, out, ("kv-scales",), fallback="one")
    assert load_file(out / "kv_scales.safetensors")[f"{site}_scale"].item() == 1.0
    why = "no token reached it, so its scale is the fallback, 1"
    assert notes == [f"{site}: {why}"]


def test_a_file_that_no_engine_of_today_reads_is_written_with_a_warning(out: Path) -> None:
    notes = _write(plain_stats(), out, ("vllm-json", "rfc", "kv-scales"))

    assert [note.partition(":")[0] for note in notes] == ["vllm-json", "rfc"]
    assert all(note.endswith("they load kv-overlay") for note in notes)


def test_an_expert_no_token_reached_is_named_once_for_all_degrees(out: Path) -> None:
    notes = _write(expert_stats(), out, ("rfc",), tps=(1, 2))

    assert [note.partition(":")[0] for note in notes] == [
        "rfc",
        *(f"model.layers.0.mlp.experts.1.{name}_proj.input" for name in ("gate", "up", "down")),
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
