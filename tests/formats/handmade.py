"""Geometries and statistics written by hand, whose scales are exact binary fractions."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from fp8calib.calibration.calibration_stats import RunStats, SiteStats
from fp8calib.calibration.stats_header import StatsHeader
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.tensor_file import save_tensors
from fp8calib.formats.dialect import WriteJob
from fp8calib.formats.registry import find_dialect
from fp8calib.formats.table import ScaleTable
from fp8calib.model.geometry import Attention, Layer, Linear, ModelGeometry, Part, Role, Site

Sites = dict[Site, SiteStats]

MODEL, DATA = "0123456789abcdef" * 4, "fedcba9876543210" * 4
MEASURED = f'{{"model": "{MODEL}", "data": "{DATA}", "text_start": "fedcba9876543210"}}'
"""What a file of these statistics' scales records."""


# amax / 448 of every KV head, layer by layer.
KV_SCALES = {
    0: {Role.K: (0.25, 0.5), Role.V: (0.125, 0.75)},
    1: {Role.K: (2.0, 0.0625), Role.V: (0.03125, 0.015625)},
}
Q_SCALES = {0: (0.5, 4.0, 1.0, 2.0), 1: (8.0, 1.0, 1.0, 1.0)}


def amax_of(scales: Sequence[float]) -> torch.Tensor:
    """Return the magnitudes whose e4m3fn scales are `scales`."""
    return torch.tensor(scales, dtype=torch.float32) * 448


def make_attention(index: int, **changes: object) -> Attention:
    """Describe an attention of 4 heads and 2 KV heads of 2 elements."""
    module = f"model.layers.{index}.self_attn"
    values = {
        "module": module,
        "checkpoint_module": module,
        "kind": "heads",
        "num_heads": 4,
        "num_kv_heads": 2,
        "k_head_dim": 2,
        "v_head_dim": 2,
    }
    return Attention.model_validate(values | changes)


def make_geometry(
    attentions: Sequence[Attention | None],
    linears: Sequence[Sequence[Linear]] = (),
    *,
    model_type: str = "llama",
    checkpoint_dtype: str = "bfloat16",
    architecture: str = "LlamaForCausalLM",
    num_draft_layers: int = 0,
) -> ModelGeometry:
    """Make a geometry of layers."""
    layers = tuple(
        Layer(
            index=index,
            module=f"model.layers.{index}",
            mixer="Attention" if attention else "GatedDeltaNet",
            attention=attention,
            linears=tuple(linears[index]) if linears else (),
        )
        for index, attention in enumerate(attentions)
    )
    return ModelGeometry(
        architecture=architecture,
        num_draft_layers=num_draft_layers,
        model_type=model_type,
        checkpoint_dtype=checkpoint_dtype,
        layers=layers,
    )


def make_stats(geometry: ModelGeometry, sites: Mapping[Site, SiteStats]) -> RunStats:
    """Make statistics of sites, with the header fields that an export reads."""
    header = StatsHeader.model_construct(
        geometry=geometry,
        model_fingerprint=MODEL,
        data_fingerprint=DATA,
        skipped=(),
        text_start="fedcba9876543210",
    )
    return RunStats(header=header, sites=sites)


def make_kv_sites(geometry: ModelGeometry) -> Sites:
    """Make K, V and q sites with the scales of KV_SCALES and Q_SCALES for layers with a cache."""
    sites: Sites = {}
    for layer, attention in geometry.attentions():
        sites[attention.site(Role.Q)] = SiteStats(count=8, amax=amax_of(Q_SCALES[layer.index % 2]))
        if attention.producer is None:
            for role, scales in KV_SCALES[layer.index % 2].items():
                sites[attention.site(role)] = SiteStats(count=8, amax=amax_of(scales))
    return sites


def plain_stats(**changes: str) -> RunStats:
    """Two layers with attention, and no linears."""
    geometry = make_geometry([make_attention(0), make_attention(1)], **changes)
    return make_stats(geometry, make_kv_sites(geometry))


def shared_stats() -> RunStats:
    """Four layers; layer 2 reads the cache of layer 1, and layer 3 that of layer 0."""
    producers = (None, None, 1, 0)
    attentions = [make_attention(index, producer=who) for index, who in enumerate(producers)]
    geometry = make_geometry(attentions)
    return make_stats(geometry, make_kv_sites(geometry))


def hybrid_stats() -> RunStats:
    """Two layers; the first caches no K and V."""
    geometry = make_geometry([None, make_attention(1)], model_type="qwen3_next")
    return make_stats(geometry, make_kv_sites(geometry))


def latent_stats() -> RunStats:
    """One layer of latent attention: latent of 4 elements, rotary part of 2."""
    attention = make_attention(0, kind="latent", num_kv_heads=1, k_head_dim=4)
    geometry = make_geometry([attention], model_type="deepseek_v3")
    sites = {
        attention.site(Role.K): SiteStats(count=8, amax=amax_of((0.25,))),
        attention.site(Role.V): SiteStats(count=8, amax=amax_of((0.5,))),
    }
    return make_stats(geometry, sites)


EXPERT_WEIGHTS = {
    "gate_proj": ((1, 2, 3, 4), (5, 6, 7, 8)),
    "up_proj": ((4, 3, 2, 1), (1, 1, 1, 2)),
    "down_proj": ((2, 4, 8, 16), (1, 1, 1, 1)),
}
EXPERT_INPUTS = {
    "gate_proj": ((2,), (0,)),
    "up_proj": ((2,), (0,)),
    "down_proj": ((1, 2, 3, 4), (0, 0, 0, 0)),
}


def expert_stats() -> RunStats:
    """One layer with two experts; no token reached the second."""
    root = "model.layers.0.mlp"
    linears = [
        Linear(
            module=f"{root}.experts.{name}",
            section="mlp",
            root=root,
            in_features=8,
            out_features=8,
            shard="row" if name == "down_proj" else "column",
            parts=(Part(name=name, count=8, unit=1, first=0, per_group=8),),
            num_experts=2,
            expert_block=2,
            weight_name=f"{root}.experts.{name}",
        )
        for name in EXPERT_WEIGHTS
    ]
    geometry = make_geometry([make_attention(0)], [linears], model_type="mixtral")
    sites = make_kv_sites(geometry)
    for linear, name in zip(linears, EXPERT_WEIGHTS, strict=True):
        sites[Site(linear.module, Role.INPUT)] = SiteStats(
            count=8,
            amax=amax_of((2,) * 8),
            experts=amax_of(EXPERT_INPUTS[name]),
            expert_counts=torch.tensor([8, 0]),
        )
        sites[Site(linear.module, Role.WEIGHT)] = SiteStats(
            count=0, amax=amax_of((8,) * 8), experts=amax_of(EXPERT_WEIGHTS[name])
        )
    return make_stats(geometry, sites)


def write_scales(name: str, table: ScaleTable, target: Path) -> None:
    write = find_dialect(name).write
    assert write is not None
    write(WriteJob(table=table), target)


def save_source(stats: RunStats, folder: Path, **config: object) -> Checkpoint:
    """Save and open a checkpoint with one weight in every attention module."""
    folder.mkdir()
    weights = {
        f"{attention.checkpoint_module}.o_proj.weight": torch.ones(2, 2)
        for _, attention in stats.geometry.attentions()
    }
    save_tensors(folder / "model.safetensors", weights, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.gguf").write_text("x")
    return Checkpoint.open(folder)
