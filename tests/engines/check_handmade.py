"""Checkpoint folders written by hand for `check`, and helpers for expected results."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fp8calib.engines.check import check_folder
from fp8calib.engines.replay.folder import ScaleFolder, open_folder
from fp8calib.engines.replay.verdicts import EngineReport
from fp8calib.formats.kv.overlay import make_quantization_config
from fp8calib.model.geometry import ModelGeometry
from tests.formats.handmade import make_attention, make_geometry

WEIGHTS = "model-00001-of-00002.safetensors"
SCALES = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"

PER_TENSOR = make_quantization_config("tensor")
PER_HEAD = make_quantization_config("attn_head")
FP8 = {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"}
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
}
_KV_OUTPUTS = {"output_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}
QUARK = {
    "exclude": [],
    "quant_method": "quark",
    "export": {"kv_cache_group": ["*k_proj", "*v_proj"]},
    "layer_quant_config": {"*k_proj": _KV_OUTPUTS, "*v_proj": _KV_OUTPUTS},
}

Numbers = Mapping[str, object]
"""By tensor name: a number, or a list of any depth."""


def plain_geometry(**changes: Any) -> ModelGeometry:
    """Two layers of 4 heads and 2 KV heads."""
    return make_geometry([make_attention(0), make_attention(1)], **changes)


def moved_geometry(pattern: str, **changes: str) -> ModelGeometry:
    """Two layers whose attention modules have other names."""
    paths = [pattern.format(index) for index in range(2)]
    attentions = [
        make_attention(index, module=path, checkpoint_module=path)
        for index, path in enumerate(paths)
    ]
    return make_geometry(attentions, **changes)


def spell(
    *suffixes: str, value: object = 0.25, layers: int = 2, path: str = "model.layers.{}.self_attn"
) -> dict[str, object]:
    """Give every layer the same number under each suffix."""
    return {f"{path.format(i)}.{suffix}": value for i in range(layers) for suffix in suffixes}


def save_folder(
    folder: Path,
    scales: Numbers,
    *,
    quantization: object = None,
    listed: bool = True,
    shape: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float32,
    **config: object,
) -> Path:
    """Write a checkpoint of two shards, the second of which holds the scales.

    Args:
        folder: where to.
        scales: the second shard.
        quantization: the `quantization_config`; none where None.
        listed: whether the index names the second shard.
        shape: the shape of every scale; that of the numbers where None, but [1] for a number.
        dtype: what the scales are stored in.
        config: more of config.json.
    """
    folder.mkdir()
    weights = {"model.norm.weight": torch.ones(8)}
    tensors = {name: _to_tensor(value, shape, dtype) for name, value in scales.items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    save_file(tensors, folder / SCALES, metadata={"format": "pt"})
    weight_map = dict.fromkeys(weights, WEIGHTS)
    weight_map |= dict.fromkeys(tensors, SCALES) if listed else {}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    document = {"model_type": "llama", **config}
    if quantization is not None:
        document["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(document))
    return folder


def _to_tensor(value: object, shape: tuple[int, ...] | None, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.tensor(value, dtype=torch.float32)
    if shape is None:
        shape = tuple(tensor.shape) or (1,)
    return tensor.reshape(shape).to(dtype)


def ask(
    engine: str, folder: Path, geometry: ModelGeometry | None = None, *, tp: int = 1
) -> EngineReport:
    """Check a folder for one engine."""
    return check_folder(open_folder(folder), geometry or plain_geometry(), [engine], tp)[engine]


def ask_sglang_json(
    path: Path, geometry: ModelGeometry, tp: int, *, quantization: object = None
) -> EngineReport:
    """Check a JSON file for SGLang, with a model that has this `quantization_config`."""
    config = {} if quantization is None else {"quantization_config": quantization}
    model = ScaleFolder(path=path.parent, config=config, tensors={}, scales={})
    return check_folder(model, geometry, ["sglang"], tp, file=path)["sglang"]


def statuses(report: EngineReport) -> list[tuple[str, str]]:
    """Return the status of k and v, layer by layer."""
    return [(layer.k.status.value, layer.v.status.value) for layer in report.layers]


def values(report: EngineReport) -> list[tuple[float | None, float | None]]:
    """Return the numbers that the engine uses for k and v, layer by layer."""
    return [(layer.k.value, layer.v.value) for layer in report.layers]


def both(status: str) -> list[tuple[str, str]]:
    """Return one status for k and v of two layers."""
    return [(status, status)] * 2
