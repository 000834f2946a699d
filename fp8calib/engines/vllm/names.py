"""How vLLM's weight loader treats the names of scales: it loads, ignores or refuses each.

Sources (vLLM 0.32.0, run; the same in 0.33.0): `models/utils.py` (`WeightsMapper`,
`AutoWeightsLoader`), `quantization/base_config.py` (`get_cache_scale_mapper`,
`_ignore_unexpected_suffixes`), `quantization/fp8.py`, `quantization/quark/quark.py`,
`quantization/kv_cache.py`, and the models' own `load_weights`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cached_property

from fp8calib.engines.facts.classes import find_class_map, make_pattern
from fp8calib.engines.facts.release import ADDED_ROOTS, PLACELESS, Release
from fp8calib.engines.replay.loaded_scales import LoadContext
from fp8calib.engines.replay.verdicts import Refusal, Slot, Unjudged
from fp8calib.engines.vllm.kv_method import KvMethod
from fp8calib.engines.weights.layers import PLAIN_DTYPES
from fp8calib.errors import ModelError, shorten
from fp8calib.formats.fp8.quantization_config import ContradictionError
from fp8calib.formats.fp8.registry import load_finder
from fp8calib.formats.fp8.weights import WEIGHT_FORMATS
from fp8calib.formats.kv.parse_names import is_of_draft_layer, parse_name
from fp8calib.model.geometry import Role
from fp8calib.model.module_paths import split_expert

WRAPPERS = "class with other inputs beside text"
_SKIPPED_ROOTS = "loader of this model type skips names that begin with"
_SKIPS_ALL = "lenient loader of this model type skips every name that it does not rename"
_IGNORES_COMPANIONS = (
    "loader of this model type ignores a weight_scale or input_scale without a parameter"
)
NAMES_FIX = "name it as kv-overlay does: the attention module's path, then .k_scale or .v_scale"
_STRAY_FIX = "give it the name that vLLM reads, or remove it if nothing needs it"
_CONFIG_FIX = "add the quantization_config of kv-overlay to config.json"
_INNER_FIX = "name it .attn.attn.k_scale: vLLM's attention layer is inside .attn"
_PLACELESS_FIX = "serve the model without scales: --kv-cache-dtype fp8 then multiplies by 1.0"
_WEIGHTS = (".weight", ".weight_packed", ".qweight")
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
_IGNORED = (*_SCALES, *(f"{role}_zero_point" for role in _ROLES))
"""`_ignore_unexpected_suffixes`: parameters that need not exist."""
_UNMAPPED = (".kv_scale", ".q.scale", ".k_cache.scale", ".v_cache.scale")
"""More of what `maybe_remap_kv_scale_name` skips; under a quant_method they are mapped before."""
_BASE_PARAMETERS = (*_SCALES, "prob_scale")
_PARAMETERS: Mapping[KvMethod | None, tuple[str, ...]] = {
    KvMethod.COMPRESSED_TENSORS: _IGNORED,
    **dict.fromkeys((KvMethod.FP8, KvMethod.MODELOPT, KvMethod.QUARK), _BASE_PARAMETERS),
}
"""The parameters that a method creates in `Attention`."""
_KV_NAME = re.compile(
    r"_*(?:[qkv]|kv|qkv|key|value|query|prob)(?:_cache|_proj|_output)*"
    r"_(?:scales?|scale_inv|zero_points?|amax)",
    re.IGNORECASE,
)
_COMPANION = re.compile(r"(?:weight|input|output|activation)_(?:scale(?:_inv|_2)?|zero_point)")
"""Scales and zero points of weights and of their inputs."""
_OWNERS_OF_SCALE = re.compile(r"[qkv]|[kv]_cache|[qkv]_proj")
"""Modules whose parameter `scale` is one of keys and values."""


LOADER = "loader of this model type"
"""How the loader of a model treats the names of scales, as one of these kinds; no value where vLLM
has no class. All but `strict` and `lenient` are `AutoWeightsLoader` (`models/utils.py`)."""
_BACKEND = ""
"""vLLM runs transformers' own class. It renames k_proj to qkv_proj before the quantization method
renames scales, and adds the root `model.` to a name that has none."""
_FUSES_FIRST = "fuses-first"
"""The outermost loader has the model's mapper of k_proj to qkv_proj, which goes first."""
_NAMES_FIRST = "names-first"
"""The outermost loader renames scales; the mapper of k_proj belongs to an inner one."""
_UNFORGIVING = "unforgiving"
"""So it is, but the inner loader sees no `quant_config`: it ignores no scale without a
parameter."""
_STRICT = "strict"
"""`load_weights` of its own: a name without a parameter is a KeyError."""
_LENIENT = "lenient"
"""`load_weights` of its own, which skips k_scale, v_scale, q_scale and their zero points where
there is no parameter (`maybe_remap_kv_scale_name`); another name is a KeyError."""


class WeightLoader:
    """The loader of one model, made from the names in its checkpoint.

    `method` creates the parameters for scales; without one the model is loaded unquantized: names
    are not mapped, and few are ignored. `places` are the layers of the `Attention` modules that
    have such parameters, by path.
    """

    def __init__(
        self,
        context: LoadContext,
        method: KvMethod | None,
        places: Mapping[str, int],
        release: Release,
    ) -> None:
        geometry = context.geometry
        self._context = context
        self._method = method
        self._places = places
        self._release = release
        self._kind = release.find_value(LOADER, geometry.model_type)
        self._skipped_root = release.find_value(_SKIPPED_ROOTS, geometry.model_type)
        if geometry.is_wrapped:
            self._skipped_root = ""
            if not release.has(WRAPPERS, geometry.architecture):
                self._kind = _BACKEND
            elif self._kind in (_BACKEND, _FUSES_FIRST):
                self._kind = _NAMES_FIRST
        modules = [attention.checkpoint_module for _, attention in geometry.attentions()]
        self._attends = {f"{path}.attn" for path in modules}
        self._attends |= {path for path in modules if path.endswith(".attn")}
        """Paths that end in `.attn` and exist in the model's attention."""
        self._roots = {path.partition(".")[0] for path in self._attends}
        self._root_in_memory, self._root = self._find_roots()
        names = (name for name in context.tensors if not _is_scale_name(name))
        self._stored = {name.rpartition(".")[0] for name in names}
        """Paths of the modules that have weights in the checkpoint."""

    def _find_roots(self) -> tuple[str, str]:
        """Find how names begin in memory and on disk; both are empty where that is the same."""
        for _, attention in self._context.geometry.attentions():
            inner, outer = attention.module.split("."), attention.checkpoint_module.split(".")
            if inner != outer:
                while inner[-1:] == outer[-1:]:
                    inner, outer = inner[:-1], outer[:-1]
                return f"{'.'.join(inner)}.", f"{'.'.join(outer)}."
        return "", ""

    @cached_property
    def _takes_names_in_memory(self) -> bool:
        """Whether the class is known to load weights under the names in memory too."""
        geometry = self._context.geometry
        known = find_class_map(self._release, geometry.architecture)
        attentions = (make_pattern(each.module) for _, each in geometry.attentions())
        return any(path.startswith(f"{each}.") for each in {*attentions} for path in known)

    def _map_name(self, name: str) -> str:
        """Give the name of the parameter that the loader looks for."""
        if self._is_in_memory(name) and self._takes_names_in_memory:
            name = f"{self._root}{name.removeprefix(self._root_in_memory)}"
        root = self._release.find_value(ADDED_ROOTS, self._context.geometry.model_type)
        if self._kind == _BACKEND:  # what the checkpoint calls its `model.`
            root = next((f"{path.partition('.')[0]}." for path in self._attends), "model.")
        if root and name.partition(".")[0] not in self._roots:
            name = f"{root}{name}"
        if self._method is None:
            return name
        for pattern, new in _REGEXES:
            name = pattern.sub(new, name)
        suffix = next((each for each in _OUTPUTS if name.endswith(each)), "")
        if suffix and self._method in (KvMethod.FP8, KvMethod.QUARK) and not self._fuses(name):
            return name.removesuffix(suffix) + _OUTPUTS[suffix]
        return name

    def _is_in_memory(self, name: str) -> bool:
        """Check whether a name begins as in memory, where that is not as on disk."""
        return bool(self._root_in_memory) and name.startswith(self._root_in_memory)

    def look_up(self, name: str) -> tuple[Slot | None, str]:
        """Find the k, v or q that a tensor of this name is loaded into.

        Returns:
            It, None for another tensor; and why the loader raises an error, empty if it does not.
        """
        mapped = self._map_name(name)
        parent, _, leaf = mapped.rpartition(".")
        index, role = self._places.get(parent), leaf.removesuffix("_scale")
        if index is not None and leaf in _SCALES:
            return (index, Role(role)), ""
        is_parameter = index is not None and leaf in _PARAMETERS.get(self._method, ())
        why = ""
        if is_parameter or self._skips(mapped):
            pass
        elif self._kind in (_STRICT, _LENIENT):
            why = "the model has no such parameter (KeyError)"
        elif self._method is None:
            why = "without a quantization_config no module has a place for it (ValueError)"
        elif self._fuses(mapped):
            why = "k_proj becomes qkv_proj before this quant_method maps names (AttributeError)"
        else:
            why = "this quant_method maps it to no module or parameter of the model (ValueError)"
        return None, why

    def _skips(self, mapped: str) -> bool:
        """Check whether the loader skips a name that it finds no parameter for."""
        parent, _, leaf = mapped.rpartition(".")
        if self._skipped_root and mapped.startswith(self._skipped_root):
            return True
        is_renamed = bool(_RENAMED.search(mapped))
        is_of_weight = mapped.endswith((".weight_scale", ".input_scale"))
        model_type = self._context.geometry.model_type
        ignores_companions = self._release.has(_IGNORES_COMPANIONS, model_type)
        if is_of_weight and not is_renamed and ignores_companions:
            return parent in self._stored
        if self._kind == _LENIENT:
            has_root = mapped.partition(".")[0] in self._roots
            if self._release.has(_SKIPS_ALL, model_type):
                return has_root and not is_renamed
            is_mapped = leaf in _IGNORED or (self._method is None and mapped.endswith(_UNMAPPED))
            is_left = not is_renamed or bool(_PROJECTION.search(mapped))
            return is_mapped and has_root and is_left
        if self._kind in (_STRICT, _UNFORGIVING) or self._method is None:
            return False
        return parent in self._attends and leaf in _IGNORED

    def _fuses(self, name: str) -> bool:
        """Check whether the projection is renamed to qkv_proj before its scale is mapped."""
        is_first = self._kind in (_BACKEND, _FUSES_FIRST)
        parent = name.rpartition(".")[0]
        return is_first and bool(_PROJECTION.search(name)) and parent in self._stored

    def refuse_faults(self) -> None:
        """Refuse a folder where the name of a scale stops the loader.

        Scales of quantized weights are judged elsewhere (`weight_replay.py`).
        """
        geometry = self._context.geometry
        for name in sorted(filter(_is_scale_name, self._context.tensors)):
            module, _, leaf = name.rpartition(".")
            is_companion = _COMPANION.fullmatch(leaf) is not None
            is_of_weight = is_companion and parse_name(name) is None
            if is_of_draft_layer(geometry, module) or (is_of_weight and self._is_quantized(module)):
                continue
            _, why = self.look_up(name)
            if not why:
                continue
            if self._is_in_memory(name) and not self._takes_names_in_memory:
                text = "is named as in transformers' memory, and not as the weights are"
                raise Unjudged(f"{shorten(name)} {text}: only vLLM's loader can tell")
            stored = self._context.scales.get(name)
            is_inner = self._kind == _UNFORGIVING and module in self._attends
            fix = _INNER_FIX if is_inner else NAMES_FIX
            if self._release.has(PLACELESS, geometry.model_type) and not is_companion:
                owner = f"vLLM's attention of {geometry.model_type}"
                why, fix = f"{owner} has no parameters for scales (ValueError)", _PLACELESS_FIX
            elif self._method is None:
                fix = _CONFIG_FIX
            elif stored is None:
                fix = _STRAY_FIX
            raise Refusal(f"{shorten(name) if stored is None else stored}: {why}", fix=fix)

    @cached_property
    def _is_quantized(self) -> Callable[[str], bool]:
        """Tells whether vLLM may have parameters for the scales of a module's weight."""
        tensors, folder = self._context.tensors, self._context.folder
        has_codes = any(
            (name.endswith(_WEIGHTS) and entry.dtype not in PLAIN_DTYPES)
            or (entry.dtype in WEIGHT_FORMATS and not _is_scale_name(name))
            for name, entry in tensors.items()
        )
        if has_codes:
            matrices = (name for name, each in tensors.items() if len(each.shape) > 1)
            linears = {name.rpartition(".")[0] for name in matrices}
            meant = (linear.checkpoint_name for _, linear in self._context.geometry.linears())
            linears |= {(name or "").removesuffix(".weight") for name in meant}
            return lambda module: module in linears or split_expert(module) is not None
        try:
            _, find_scheme = load_finder(folder.path, folder.config)
        except ModelError:
            return lambda _: False

        def is_quantized(module: str) -> bool:
            if f"{module}.weight" not in tensors:
                return False
            try:
                find_scheme(module)
            except ModelError as error:
                return not isinstance(error, ContradictionError)
            return True

        return is_quantized


def _is_scale_name(name: str) -> bool:
    """Check whether a name is that of a scale or zero point, in a spelling known or not."""
    parent, _, leaf = name.rpartition(".")
    if leaf == "scale":
        return _OWNERS_OF_SCALE.fullmatch(parent.rpartition(".")[2]) is not None
    return any(each.fullmatch(leaf) for each in (_COMPANION, _KV_NAME))
