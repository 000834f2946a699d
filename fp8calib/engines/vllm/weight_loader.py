"""How vLLM's weight loader treats the names of scales: it loads, ignores or refuses each.

Sources (vLLM 0.32.0, run; the same in 0.33.0): `models/utils.py` (`WeightsMapper`,
`AutoWeightsLoader`), `quantization/base_config.py` (`get_cache_scale_mapper`,
`_ignore_unexpected_suffixes`), `quantization/fp8.py`, `quantization/quark/quark.py`,
`quantization/kv_cache.py`, and the models' own `load_weights`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fp8calib.engines.replay.load_context import LoadContext, Slot
from fp8calib.engines.vllm.kv_method import KvMethod
from fp8calib.engines.vllm.model_types import (
    ADDED_ROOTS,
    FUSING_LENIENT_TYPES,
    LENIENT_TO_COMPANIONS,
    LOADERS,
    NATIVE_WRAPPERS,
    SKIPPED_ROOTS,
    LoaderKind,
)
from fp8calib.model.shapes import KV_ROLES, ModelGeometry, Role

_ROLES = ("q", "k", "v")
_REGEXES = (
    (re.compile(r"\.kv_scale$"), ".attn.k_scale"),
    (re.compile(r"\.self_attn\.[kv]_proj\.([kv])_scale$"), r".self_attn.attn.\1_scale"),
    (re.compile(r"\.self_attn\.qk(?:qk)?v_proj\.([kv])_scale$"), r".self_attn.attn.\1_scale"),
    (re.compile(r"\.mixer\.[kv]_proj\.([kv])_scale$"), r".mixer.attn.\1_scale"),
    (re.compile(r"\.self_attn\.q\.scale$"), ".self_attn.attn.q_scale"),
    (re.compile(r"\.self_attn\.([kv])_cache\.scale$"), r".self_attn.attn.\1_scale"),
    (re.compile(r"(?<!\.attn)\.([qkv])_scale$"), r".attn.\1_scale"),
    (re.compile(r"(?<!\.attn)\.([qkv])_zero_point$"), r".attn.\1_zero_point"),
)
"""`QuantizationConfig.get_cache_scale_mapper`, in its order, applied one after another."""
_PROJECTION = re.compile(r"\.[qkv]_proj\.")
_RENAMED = re.compile(r"(?:^|\.)(?:[qkv]_proj|gate_proj|up_proj|experts|lm_head)\.")
"""Modules that loaders rename before they look for a parameter, which is then an error; and the
output layer, which the outermost loader fills."""
_OUTPUTS = {
    **{f".{role}_proj.output_scale": f".attn.{role}_scale" for role in _ROLES},
    ".self_attn.prob_output_scale": ".self_attn.attn.prob_scale",
}
"""What fp8 and quark map in addition."""
_SCALES = tuple(f"{role}_scale" for role in _ROLES)
_ZERO_POINTS = tuple(f"{role}_zero_point" for role in _ROLES)
_IGNORED = (*_SCALES, *_ZERO_POINTS)
"""`_ignore_unexpected_suffixes`: parameters that need not exist."""
_UNMAPPED = (".kv_scale", ".q.scale", ".k_cache.scale", ".v_cache.scale")
"""More of what `maybe_remap_kv_scale_name` skips; under a quant_method they are mapped before."""
_PARAMETERS: Mapping[KvMethod | None, tuple[str, ...]] = {
    KvMethod.COMPRESSED_TENSORS: (*_SCALES, *_ZERO_POINTS),
    KvMethod.FP8: (*_SCALES, "prob_scale"),
    KvMethod.MODELOPT: (*_SCALES, "prob_scale"),
    KvMethod.QUARK: (*_SCALES, "prob_scale"),
}
"""The parameters that a method creates in `Attention`."""
_ROOT = "model."
_KV_NAME = re.compile(
    r"_*(?:[qkv]|kv|qkv|key|value|query|prob)(?:_cache|_proj|_output)*"
    r"_(?:scales?|scale_inv|zero_points?|amax)",
    re.IGNORECASE,
)
_COMPANION = re.compile(r"(?:weight|input|output|activation)_(?:scale(?:_inv|_2)?|zero_point)")
_OWNERS_OF_SCALE = re.compile(r"[qkv]|[kv]_cache|[qkv]_proj")
"""Modules whose parameter `scale` is one of keys and values."""


def is_scale_name(name: str) -> bool:
    """Check whether a name is that of a scale or zero point, in a spelling known or not."""
    parent, _, leaf = name.rpartition(".")
    if leaf == "scale":
        return _OWNERS_OF_SCALE.fullmatch(parent.rpartition(".")[2]) is not None
    return is_companion(name) or _KV_NAME.fullmatch(leaf) is not None


def is_companion(name: str) -> bool:
    """Check whether a name is that of the scale or zero point of a weight or of its input."""
    return _COMPANION.fullmatch(name.rpartition(".")[2]) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightLoader:
    """The loader of one model."""

    kind: LoaderKind
    model_type: str
    method: KvMethod | None
    """None where the model is loaded unquantized: names are not mapped, and few are ignored."""
    places: Mapping[str, int]
    """The layer of each `Attention` with parameters for scales, by its path."""
    attends: Collection[str]
    """Paths that end in `.attn` and exist in the model's attention."""
    stored: Collection[str]
    """Paths of the modules that have weights in the checkpoint."""
    skips: str = ""
    """The beginning of names that are skipped; empty for none."""

    def find_slot(self, name: str) -> Slot | None:
        """Find the k, v or q that a tensor of this name is loaded into."""
        parent, _, leaf = self.map_name(name).rpartition(".")
        role = next((role for role in (*KV_ROLES, Role.Q) if leaf == f"{role}_scale"), None)
        index = self.places.get(parent)
        return None if role is None or index is None else (index, role)

    def map_name(self, name: str) -> str:
        """Give the name of the parameter that the loader looks for."""
        root = ADDED_ROOTS.get(self.model_type, "")
        if self.kind is LoaderKind.BACKEND:  # what the checkpoint calls its `model.`
            root = next((f"{path.partition('.')[0]}." for path in self.attends), _ROOT)
        if root and not self._has_root(name):
            name = f"{root}{name}"
        if self.method is None:
            return name
        for pattern, new in _REGEXES:
            name = pattern.sub(new, name)
        suffix = next((each for each in _OUTPUTS if name.endswith(each)), "")
        if suffix and self.method in (KvMethod.FP8, KvMethod.QUARK) and not self._fuses(name):
            return name.removesuffix(suffix) + _OUTPUTS[suffix]
        return name

    def _is_parameter(self, name: str) -> bool:
        parent, _, leaf = name.rpartition(".")
        return parent in self.places and leaf in _PARAMETERS.get(self.method, ())

    def find_fault(self, name: str) -> str:
        """Say why the loader raises an error for a tensor of this name; empty where it does not."""
        mapped = self.map_name(name)
        if self._is_parameter(mapped) or self._skips(mapped):
            return ""
        if self.kind in (LoaderKind.STRICT, LoaderKind.LENIENT):
            return "the model has no such parameter (KeyError)"
        if self.method is None:
            return "without a quantization_config no module has a place for it (ValueError)"
        if self._fuses(mapped):
            return "k_proj becomes qkv_proj before this quant_method maps names (AttributeError)"
        return "this quant_method maps it to no module or parameter of the model (ValueError)"

    def _skips(self, mapped: str) -> bool:
        """Check whether the loader skips a name that it finds no parameter for."""
        parent, _, leaf = mapped.rpartition(".")
        if self.skips and mapped.startswith(self.skips):
            return True
        is_of_weight = mapped.endswith((".weight_scale", ".input_scale"))
        is_lenient = self.model_type in LENIENT_TO_COMPANIONS
        if is_of_weight and is_lenient and not _RENAMED.search(mapped):
            return parent in self.stored
        if self.kind is LoaderKind.LENIENT:
            is_mapped = leaf in _IGNORED or (self.method is None and mapped.endswith(_UNMAPPED))
            fuses = self.model_type in FUSING_LENIENT_TYPES or not _PROJECTION.search(mapped)
            is_renamed = bool(_RENAMED.search(mapped)) and fuses
            return is_mapped and self._has_root(mapped) and not is_renamed
        if self.kind in (LoaderKind.STRICT, LoaderKind.UNFORGIVING) or self.method is None:
            return False
        return parent in self.attends and leaf in _IGNORED

    def _has_root(self, name: str) -> bool:
        root = name.partition(".")[0]
        return any(path.partition(".")[0] == root for path in self.attends)

    def _fuses(self, name: str) -> bool:
        """Check whether the projection is renamed to qkv_proj before its scale is mapped."""
        is_first = self.kind in (LoaderKind.BACKEND, LoaderKind.FUSES_FIRST)
        return (
            is_first and bool(_PROJECTION.search(name)) and name.rpartition(".")[0] in self.stored
        )


def make_loader(
    context: LoadContext, method: KvMethod | None, places: Mapping[str, int]
) -> WeightLoader:
    """Make the loader of a model from the names in its checkpoint.

    Args:
        context: the checkpoint.
        method: what creates the parameters for scales.
        places: the layers of the `Attention` modules that have them, by path.
    """
    geometry = context.geometry
    modules = [attention.checkpoint_module for _, attention in geometry.attentions()]
    return WeightLoader(
        kind=_find_kind(geometry),
        model_type=geometry.model_type,
        method=method,
        places=places,
        attends={f"{path}.attn" for path in modules}
        | {path for path in modules if path.endswith(".attn")},
        skips="" if geometry.is_wrapped else SKIPPED_ROOTS.get(geometry.model_type, ""),
        stored={name.rpartition(".")[0] for name in context.tensors if not is_scale_name(name)},
    )


def _find_kind(geometry: ModelGeometry) -> LoaderKind:
    kind = LOADERS.get(geometry.model_type, LoaderKind.BACKEND)
    if not geometry.is_wrapped:
        return kind
    if geometry.architecture not in NATIVE_WRAPPERS:
        return LoaderKind.BACKEND
    is_inner = kind in (LoaderKind.BACKEND, LoaderKind.FUSES_FIRST)
    return LoaderKind.NAMES_FIRST if is_inner else kind
