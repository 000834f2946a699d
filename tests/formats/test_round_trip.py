"""Scales written in any dialect read back equal, as far as the dialect can hold them."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8calib.errors import UsageError
from fp8calib.formats.compute import compute_kv_scales
from fp8calib.formats.convert import convert_table
from fp8calib.formats.read import read_scales
from fp8calib.formats.registry import list_format_names
from fp8calib.formats.table import Scale, ScaleSource, ScaleTable
from fp8calib.formats.write import write_table
from fp8calib.model.geometry import Role, Site
from fp8calib.numerics.formats import E4M3FN, E4M3FNUZ, Fp8Format
from tests.formats.handmade import (
    latent_stats,
    make_attention,
    make_geometry,
    make_stats,
    save_source,
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
                values=values.unsqueeze(0) if per_head else values, source=ScaleSource.OBSERVED
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
        return read_scales(target, table.geometry, needs_dtype=True).table


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
