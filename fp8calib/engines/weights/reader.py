"""How an engine reads the linears of a checkpoint folder by its quantization config.

vLLM 0.32.0: `layers/quantization/`: `compressed_tensors/compressed_tensors.py` (get_scheme_dict,
_get_scheme_from_parts), `compressed_tensors/utils.py`, `utils/config_utils.py`, `fp8.py`,
`modelopt.py` (is_layer_excluded, _resolve_quant_algo) and `utils/quant_utils.py`
(is_layer_skipped); run on tiny models. SGLang 0.5.23 adapted these files.

Both engines check the config of auto-round before they read a weight: vLLM 0.32.0 in
`quantization/inc/inc.py` (INCConfig; run), SGLang 0.5.23 in `quantization/auto_round.py`
(AutoRoundConfig; read).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType

from fp8calib.checkpoint.header import TensorEntry
from fp8calib.checkpoint.model_config import TEXT_KEYS
from fp8calib.engines.facts.classes import find_class_map
from fp8calib.engines.facts.release import Release
from fp8calib.engines.replay.declared import matches_target
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.verdicts import Refusal, Unjudged
from fp8calib.engines.weights.forms import CompressedGroup
from fp8calib.engines.weights.linears import LinearGroup
from fp8calib.errors import ModelError
from fp8calib.formats.fp8.auto_round import AUTO_ROUND, AUTO_ROUND_MX, is_mx
from fp8calib.formats.fp8.compressed_tensors import COMPRESSED_TENSORS
from fp8calib.formats.fp8.modelopt import read_algorithm
from fp8calib.formats.fp8.quantization_config import ContradictionError, FindScheme, StoredScheme
from fp8calib.formats.fp8.registry import FP8_DIALECTS, load_finder
from fp8calib.model.geometry import ModelGeometry
from fp8calib.model.module_paths import name_fused_group
from fp8calib.numerics.schemes import MX_BLOCK, Granularity, InputScaling

ConfigSection = Mapping[str, object]
_METHODS = {"compressed_tensors": "compressed-tensors", "deepseek_v4_fp8": "fp8"}
"""Other names of methods; the second is a subclass (vLLM 0.32.0 `deepseek_v4/quant_config.py`)."""
_KNOWN = ("", "compressed-tensors", "fp8")
"""Methods whose config is read here; so is that of `modelopt` with its variants."""
_VISION = ("vision_tower", "vision_model", "vit_large_projector")
_WRAPPERS = ("model", "language_model", "llm")
_PREFIXES = ("", "model.", "language_model.", "language_model.model.", "model.language_model.")
"""What transformers renames in models with towers, and engines with it: a config may have either
name of a linear."""
_TARGET_FIX = "name Linear, or paths of modules, in the targets of the config group"
_PART_FIX = "quantize all of these projections, or none"
_LOADS_MX = "MXFP8 is loaded as MXFP8"
_MX_FORMS = ("compressed-tensors", "modelopt", "mxfp8")
_KINDS = {
    "linear": "linears",
    "experts": "experts",
    "head": "output layer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unquantized:
    """A group that the engine creates without quantization."""

    why: str
    is_excluded: bool = False
    """Whether the config lists it among what is not quantized."""


Found = StoredScheme | CompressedGroup | Unquantized
"""How an engine creates a group."""


class LinearReader(ABC):
    """Finds the scheme by which an engine creates each linear of a folder.

    Each engine has a subclass, which matches paths of modules with the config's lists as it does.
    For a multimodal model, paths of its text part are compared in every spelling, because engines
    map them to their own. `section` is the quantization config that the engine uses.
    """

    fp8_methods: tuple[str, ...] = ("fp8",)
    fp8_algorithms: tuple[str, ...] = ()
    """By what the engine reads a config as one of its `fp8` method."""
    requantizes_fp8: bool = True
    """That method quantizes joined linears again with the largest of their scales."""
    joins_names: bool = False
    """The config has to name a joined linear; if not, it may name its parts."""
    renamed: Mapping[str, str] = MappingProxyType({})
    """Names of scales, and others that the model's loader takes too."""

    def __init__(
        self, folder: ScaleFolder, section: ConfigSection, geometry: ModelGeometry, release: Release
    ) -> None:
        self.release = release
        self.classes = find_class_map(release, geometry.architecture)
        self._is_wrapped = any(isinstance(folder.config.get(key), dict) for key in TEXT_KEYS)
        nested = section.get("quantization")
        self.is_nested = isinstance(nested, dict)
        method = str(section.get("quant_method") or ("modelopt" if self.is_nested else "")).lower()
        self.method = _METHODS.get(method, method)
        self._has_rules = self.method in _KNOWN or self.method.startswith("modelopt")
        self.section: ConfigSection = nested if isinstance(nested, dict) else section
        self.algorithm = str(self.section.get("quant_algo")).upper()
        self.is_fp8 = self.method in self.fp8_methods or self.algorithm in self.fp8_algorithms
        self.excluded = self._list_excluded()
        groups = section.get("config_groups")
        self.targets = {
            target: group
            for group in (groups.values() if isinstance(groups, dict) else ())
            if isinstance(group, dict)
            for target in list_strings(group, "targets")
        }
        own = next((each for each in FP8_DIALECTS.values() if each.has_method(self.method)), None)
        self.dialect = own or COMPRESSED_TENSORS
        self._find_stored: FindScheme | None = None
        with suppress(ModelError):  # a config that the methods with rules here may still read
            dialect, self._find_stored = load_finder(folder.path, folder.config)
            self.dialect = own or dialect
        if self.dialect is AUTO_ROUND and is_mx(self.section):
            self.dialect = AUTO_ROUND_MX

    @abstractmethod
    def _list_excluded(self) -> list[str]:
        """List what the config leaves unquantized."""

    @abstractmethod
    def _find_excluded(self, group: LinearGroup) -> str | None:
        """Find the entry of that list that excludes a group, by the rules of the method."""

    @abstractmethod
    def _find_compressed(self, group: LinearGroup) -> Found:
        """Find the scheme of a group that compressed-tensors does not exclude."""

    def _quantizes_mixed(self, group: LinearGroup, algorithm: str) -> bool:
        """Check whether the release quantizes a group of mixed precision by `algorithm`."""
        what = "expert" if group.kind == "experts" else "linear"
        return algorithm in self.release.values[f"mixed precision {what}"]

    def require_judged(self, tensors: Mapping[str, TensorEntry]) -> None:
        """Require a quantization method that this tool reads, if the folder has weights.

        Other methods may name codes and scales in another way, so that not all of their linears
        are found among the tensors.
        """
        if tensors and not self._has_rules and self._find_stored is None:
            raise Unjudged(f"weights of quant_method {self.method!a:.40} are not judged offline")

    def find_scheme(self, group: LinearGroup) -> Found:
        """Find the scheme by which the engine creates a group; `Refusal` where it does not."""
        if group.state == "plain":
            return Unquantized(why="the engine's class creates it without the config")
        return self.find_configured(group)

    def list_parts(self, group: LinearGroup) -> list[str]:
        """Name the projections of a group as the engine does in the lists of a config."""
        path = group.listed
        if self.joins_names and group.state == "joined":
            return [path]
        if path == group.path:
            return [each.module for each in group.members]
        if group.kind == "experts":
            return [f"{path}{each.module.removeprefix(group.path)}" for each in group.members]
        if len(group.members) == 1:
            return [path]
        return [f"{path.rpartition('.')[0]}.{each.projection}" for each in group.members]

    def find_configured(self, group: LinearGroup) -> Found:
        """Find the scheme that the config gives to a group; refuse it as the engine does."""
        if self.is_fp8 and group.kind == "head":
            return Unquantized(why="the engine's fp8 method does not quantize the output layer")
        if not self.method and not self.is_fp8:
            return Unquantized(why="config.json names no quant_method")
        if not self._has_rules and not self.is_fp8:
            return self._find_named(group)
        if (entry := self._find_excluded(group)) is not None:
            return Unquantized(why=f"the config excludes {entry!a:.80}", is_excluded=True)
        if self.is_fp8:
            return self._find_fp8()
        is_compressed = self.method == "compressed-tensors"
        return self._find_compressed(group) if is_compressed else self._find_modelopt(group)

    def _find_fp8(self) -> StoredScheme:
        """Find the scheme of the `fp8` method, which has one for all linears."""
        block = self.section.get("weight_block_size")
        if "MXFP8" in (str(self.section.get("quant_method")).upper(), self.algorithm):
            block = list(MX_BLOCK)
        if block is None:
            is_static = self.section.get("activation_scheme") == "static"
            inputs = InputScaling.STATIC if is_static else InputScaling.TOKEN
            return StoredScheme(weights=Granularity.TENSOR, inputs=inputs)
        if not isinstance(block, list) or len(block) != 2 or not all(type(s) is int for s in block):
            raise Unjudged(f"weight_block_size is {block!a:.40}, and engines need two sizes")
        size = (block[0], block[1])
        return StoredScheme(weights=Granularity.BLOCK, block=size, inputs=InputScaling.GROUP)

    def _find_modelopt(self, group: LinearGroup) -> Found:
        """Find a group's scheme by ModelOpt's rules: one algorithm for all, or mixed precision."""
        if any(part in group.listed for part in _VISION):
            return Unquantized(why="the engine's ModelOpt method does not quantize vision towers")
        is_mixed = self.algorithm == "MIXED_PRECISION"
        algorithm = self._find_algorithm(group) if is_mixed else self.algorithm
        if algorithm in ("", "NONE"):
            unlisted = "quantized_layers does not list it"
            return Unquantized(why="the config names no quant_algo" if algorithm else unlisted)
        scheme = read_algorithm(algorithm)
        if scheme is None:
            raise Unjudged(f"weights of quant_algo {algorithm!a:.40} are not judged offline")
        if is_mixed and not self._quantizes_mixed(group, algorithm):
            return Unquantized(why=f"this release does not quantize {algorithm} here")
        return scheme

    def _find_algorithm(self, group: LinearGroup) -> str:
        """Find a group's algorithm in a mixed precision; empty if it is not listed."""
        listed = self.section.get("quantized_layers")
        layers = listed if isinstance(listed, dict) else {}
        path, parts = group.listed, self.list_parts(group)
        keys = [path, *parts]
        if group.kind == "experts":
            starts = (f"{path}.", path.removesuffix("experts"))
            keys = [name for start in starts for name in layers if name.startswith(start)][:1]
        found = {
            str(fields.get("quant_algo")).upper()
            for name in keys
            if isinstance(fields := layers.get(name), dict)
        }
        if len(found) > 1:
            joined, algorithms = name_fused_group(parts[0]), " and ".join(sorted(found))
            why = f"{joined} becomes one weight, but has the quant_algo {algorithms} (ValueError)"
            raise Refusal(why, fix=_PART_FIX)
        return found.pop() if found else ""

    def _find_named(self, group: LinearGroup) -> Found:
        """Find a group's scheme by what the folder's dialect says of the path of each linear."""
        if self._find_stored is None:
            raise Unjudged(f"weights of quant_method {self.method!a:.40} are not judged offline")
        schemes: dict[str, StoredScheme] = {}
        why, parts = "", self.list_parts(group)
        for part in parts:
            try:
                schemes[part] = self._find_stored(part)
            except ContradictionError as error:
                why = error.message.partition("is FP8, but ")[2] or error.message
            except ModelError as error:
                raise Unjudged(error.message) from error
        if find_for_parts(parts, lambda part: None if part in schemes else part) is not None:
            return Unquantized(why=why)
        if len(set(schemes.values())) > 1:
            raise Unjudged(f"the linears of {group.listed} have several schemes")
        return next(iter(schemes.values()))

    def find_entry(
        self, matches: Callable[[str, str], bool], path: str, entries: Iterable[str]
    ) -> str | None:
        """Find the first entry of a list that matches a module's path in one of its spellings."""
        spellings, parts = [path], path.split(".")
        if self._is_wrapped:
            while len(parts) > 1 and parts[0] in _WRAPPERS:
                del parts[0]
            spellings += [f"{prefix}{'.'.join(parts)}" for prefix in _PREFIXES]
        return next((each for each in entries if any(matches(each, s) for s in spellings)), None)

    def find_target(
        self, kind: str, path: str, *ways: str, parts: Sequence[str] = ()
    ) -> str | None:
        """Find the target of a config group for a linear, in several ways one after another.

        The ways are `path`, that of the whole; `parts`, that of the first projection, where all
        have one; `class`, Linear, of which the output layer is not. Another class is not judged:
        engines compare it with classes of their own.
        """
        for way in ways:
            if way != "class":
                paths = parts if way == "parts" else (path,)
                found = [self.find_entry(matches_target, each, self.targets) for each in paths]
                if None not in found:
                    return found[0]
                continue
            for target in self.targets:
                is_known = target == "Linear" or "." in target or target.endswith("Attention")
                if not is_known and not target.startswith("re:"):
                    why = f"the target {target!a:.40} is neither a path nor the class Linear"
                    raise Unjudged(why, fix=_TARGET_FIX)
            if kind != "head" and "Linear" in self.targets:
                return "Linear"
        return None

    def find_expert_target(self, path: str, parts: Sequence[str]) -> str | None:
        """Find the target of a layer's experts; `parts` are the projections of the first one."""
        targets = [self.find_target("experts", part, "path", "class") for part in parts]
        found = [self.targets.get(each or "") for each in targets]
        if any(each != found[0] for each in found[1:]):
            why = f"the projections of {path} are in several config groups (ValueError)"
            raise Refusal(why, fix=_PART_FIX)
        return targets[0]

    def require_mx(self, form: str, kind: str, error: str) -> None:
        """Require that the release loads MXFP8 of a dialect in a group; else it raises `error`."""
        if form not in _MX_FORMS:
            raise Unjudged(f"blocks of 1 x 32 under quant_method {form!a:.40}")
        values = self.release.values[_LOADS_MX]
        if f"{form} {kind}" in values:
            return
        first = self.release.begins[_LOADS_MX].get(f"{form} {kind}")
        fixes = [f"serve it with {self.release.engine} {first}"] if first else []
        if others := dict.fromkeys(each.partition(" ")[0] for each in values):
            forms = " or ".join(others)
            fixes += [f"write it as {forms}, if check finds that its class of the model loads that"]
        what = f"{self.release.title} loads no {_KINDS[kind]} in MXFP8 of {form}"
        raise Refusal(f"{what} ({error})", fix=", or ".join(fixes))


def find_for_parts(parts: Sequence[str], find: Callable[[str], str | None]) -> str | None:
    """Find the entry of a list for the projections of a group; refuse one that covers only some.

    `find` gives the entry for the path of a projection, or None.
    """
    found = [find(part) for part in parts]
    if None in found and any(each is not None for each in found):
        joined = name_fused_group(parts[0])
        why = f"{joined} becomes one weight, and the config quantizes a part of it (ValueError)"
        raise Refusal(why, fix=_PART_FIX)
    return found[0]


def list_strings(section: ConfigSection, key: str) -> list[str]:
    """List the texts of a list in a config."""
    value = section.get(key)
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


# --- auto-round -----------------------------------------------------------------------------------

ACCEPTED = "auto-round: accepted"
"""The fact with the types of weights and the packing formats that a release accepts."""
AUTO_ROUND_FIX = "export it with --format llm_compressor, or fp8 where weights are in blocks"
_MX = "data_type mx_fp"
_PACKINGS = {"fp": "auto_round:fp8", "mx_fp": "auto_round:llm_compressor"}


def require_auto_round(config: ConfigSection, release: Release) -> None:
    """Require that a release accepts the config of auto-round."""
    if (fault := next(_list_auto_round_faults(config, release), None)) is not None:
        raise Refusal(f"{release.title} refuses {fault}", fix=AUTO_ROUND_FIX)


def _list_auto_round_faults(config: ConfigSection, release: Release) -> Iterator[str]:
    accepted = release.values[ACCEPTED]
    named = config.get("data_type", "int")
    kind = "fp" if named == "fp8" else str(named)
    if f"data_type {kind}" not in accepted and ("mx_fp" not in kind or _MX not in accepted):
        yield f"data_type {named!a:.40} of auto-round (ValueError)"
    form = config.get("packing_format") or _PACKINGS.get(kind, "auto_round:auto_gptq")
    if f"packing_format {form}" not in accepted:
        yield f"packing_format {form!a:.60} of auto-round (ValueError)"
    size = config.get("group_size")
    wanted: dict[str, object] = {"sym": True, "act_bits": 8, "act_sym": True, "act_dynamic": True}
    if kind == "fp":
        if not isinstance(size, list) or len(size) != 2:
            yield f"FP8 weights of auto-round in other groups than blocks (group_size {size!a:.40})"
            return
        wanted |= {"act_group_size": size[0], "activation_scheme": "dynamic", "fmt": "e4m3"}
    elif kind == "mx_fp" and config.get("bits") == 8:
        wanted |= {"group_size": MX_BLOCK[1], "act_group_size": MX_BLOCK[1]}
    else:
        return
    wanted |= {"bits": 8, "act_data_type": kind, "packing_format": _PACKINGS[kind]}
    for key, value in wanted.items():
        if config.get(key) not in (None, value):
            yield f"auto-round's {key} {config[key]!a:.40} (AssertionError)"
