"""The geometry of a model with code of its own, from its config and tensor names.

The code is not run. The geometry tells which layer a scale belongs to, not what an engine does.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from fp8calib.checkpoint.model_config import LAYER_COUNTS, MAX_LAYERS, find_dtype
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.errors import ModelError, shorten
from fp8calib.formats.kv.parse_names import parse_name
from fp8calib.model.drafters import count_layers
from fp8calib.model.shapes import Attention, Layer, ModelGeometry

_DRAFTS = ("num_nextn_predict_layers",)
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_head_kv")
_KEYS = re.compile(
    r"(?P<module>.+)\.(?:k_proj|qkv_proj|c_attn|W_pack|Wqkv|wqkv|query_key_value|qkv|key|wk"
    r"|kv_a_proj_with_mqa)\.(?:weight|weight_packed|qweight)",
    re.DOTALL,
)
_INDEX = re.compile(r"(?P<root>.*?)(?P<index>[0-9]{1,4})\.(?P<rest>[^0-9].*)", re.DOTALL)
_LATENT = ".kv_a_proj_with_mqa."


def read_replayed_geometry(model: ScaleFolder) -> tuple[ModelGeometry, bool]:
    """Find the shape of a model, and whether its type is unknown to this tool.

    Raises:
        NotUnderstoodError: its layers are not understood.
        ModelError: it is no language model that generates from left to right.
    """
    from fp8calib.model.geometry_from_config import (  # noqa: PLC0415 -- imports transformers
        is_known,
        read_geometry,
    )

    if "auto_map" in model.config and not is_known(model.config):
        return read_named_geometry(model), True
    return read_geometry(model.path, model.config), False


def imagine_geometry(model: ScaleFolder) -> ModelGeometry:
    """Make the shape of a model of which nothing is known but the number of its layers."""
    count = count_layers(model.config) or _find_number(model.config, LAYER_COUNTS) or 1
    layers = (_make_layer(index, str(index), 1, 1, is_latent=False) for index in range(count))
    named = model.config.get("architectures")
    return ModelGeometry(
        architecture=str(named[0]) if isinstance(named, list) and named else "",
        model_type=str(model.config.get("model_type")),
        checkpoint_dtype=find_dtype(model.config),
        layers=tuple(layers),
    )


def read_named_geometry(folder: ScaleFolder) -> ModelGeometry:
    """Find the attention modules by the names of their key projections and of their scales.

    Raises:
        ModelError: config and names do not suffice.
    """
    names = {name for stored in folder.tensors.values() for name in stored}
    weight_map = folder.index.get("weight_map") if isinstance(folder.index, dict) else None
    names |= weight_map.keys() if isinstance(weight_map, dict) else set()
    modules = _find_modules(names)
    heads = _find_number(folder.config, _HEADS)
    if not modules or heads is None:
        raise _unknown(folder.path, folder.config)
    kv_heads = _find_number(folder.config, _KV_HEADS) or heads
    is_latent = any(_LATENT in name for name in names)
    drafts = _find_number(folder.config, _DRAFTS) or 0
    count = max(_find_number(folder.config, LAYER_COUNTS) or 0, max(modules) + 1 - drafts)
    if count > MAX_LAYERS:
        raise _unknown(folder.path, folder.config)
    return ModelGeometry(
        architecture="by names",
        model_type=str(folder.config.get("model_type")),
        checkpoint_dtype=find_dtype(folder.config),
        layers=tuple(
            _make_layer(index, modules.get(index), heads, kv_heads, is_latent=is_latent)
            for index in range(count)
        ),
        num_draft_layers=drafts,
    )


def _find_modules(names: Collection[str]) -> dict[int, str]:
    """Find one attention module per layer, under the root that has most of them."""
    paths = {match["module"] for match in map(_KEYS.fullmatch, names) if match}
    parsed = (parse_name(name) for name in names)
    paths = paths or {item.path.removesuffix(".attn") for item in parsed if item is not None}
    places = [match for match in map(_INDEX.fullmatch, paths) if match]
    kinds = Counter((match["root"], match["rest"]) for match in places)
    if not kinds:
        return {}
    best = max(kinds, key=lambda kind: (kinds[kind], kind))
    return {
        int(match["index"]): match[0] for match in places if (match["root"], match["rest"]) == best
    }


def _find_number(config: Mapping[str, object], keys: Iterable[str]) -> int | None:
    found = (config.get(key) for key in keys)
    return next((value for value in found if type(value) is int and 0 < value < 1 << 16), None)


def _make_layer(
    index: int, module: str | None, heads: int, kv_heads: int, *, is_latent: bool
) -> Layer:
    attention = None
    if module is not None:
        attention = Attention(
            module=module,
            checkpoint_module=module,
            kind="latent" if is_latent else "heads",
            num_heads=heads,
            num_kv_heads=1 if is_latent else kv_heads,
            k_head_dim=1,
            v_head_dim=1,
        )
    return Layer(
        index=index,
        module=(module or "").rpartition(".")[0],
        mixer="unknown",
        attention=attention,
        linears=(),
    )


def _unknown(path: Path, config: Mapping[str, object]) -> ModelError:
    model_type = shorten(str(config.get("model_type")))
    return ModelError(
        f"{path}: model_type {model_type} is unknown to this tool, and the names of its tensors do "
        "not show which modules are attention",
        hint="name a model of a known type with the same layers by --model",
    )
