"""How an engine reads the linears of a checkpoint folder by its quantization config.

vLLM 0.32.0: `layers/quantization/`: `compressed_tensors/compressed_tensors.py` (get_scheme_dict,
_get_scheme_from_parts), `compressed_tensors/utils.py`, `utils/config_utils.py`, `fp8.py`,
`modelopt.py` (is_layer_excluded, _resolve_quant_algo) and `utils/quant_utils.py`
(is_layer_skipped); run on tiny models. SGLang 0.5.23 adapted these files; where an engine differs,
its own module overrides a method.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatch

from fp8calib.engines.facts.classes import ClassMap
from fp8calib.engines.facts.release import Release
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.module_targets import matches_target
from fp8calib.engines.replay.verdicts import Refusal, Unjudged
from fp8calib.engines.weights.compressed_groups import read_compressed_group
from fp8calib.engines.weights.expected import Expected, OtherScheme, list_expected
from fp8calib.engines.weights.linears import GroupKind, LinearGroup, StoredLinear
from fp8calib.errors import ModelError
from fp8calib.formats.fp8.compressed_tensors import COMPRESSED_TENSORS, FORMATS
from fp8calib.formats.fp8.modelopt import read_algorithm
from fp8calib.formats.fp8.quantization_config import (
    ContradictionError,
    FindScheme,
    StoredScheme,
)
from fp8calib.formats.fp8.registry import FP8_DIALECTS, load_finder
from fp8calib.model.module_paths import name_fused_group
from fp8calib.numerics.schemes import MX_BLOCK, Granularity, InputScaling

Section = Mapping[str, object]
_METHODS = {"compressed_tensors": "compressed-tensors", "deepseek_v4_fp8": "fp8"}
"""Other names of methods; the second is a subclass (vLLM 0.32.0 `deepseek_v4/quant_config.py`)."""
_VISION = ("vision_tower", "vision_model", "vit_large_projector")
_TEXT_KEYS = ("text_config", "llm_config", "language_config")
_WRAPPERS = ("model", "language_model", "text_model", "llm")
_PREFIXES = ("", "model.", "language_model.", "language_model.model.", "model.language_model.")
_PART_FIX = "quantize all of these projections, or none"
_NO_CONFIG = "there is no quantization config"
_LOADS_MX = "MXFP8 is loaded as MXFP8"
_KINDS = {
    GroupKind.LINEAR: "linears",
    GroupKind.EXPERTS: "experts",
    GroupKind.HEAD: "output layer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unquantized:
    """A group that the engine creates without quantization."""

    why: str
    """What of the config says so."""


Found = StoredScheme | OtherScheme | Unquantized


class LinearReader:
    """The linears that an engine creates by a folder's config; engines override what differs.

    Args:
        folder: the checkpoint. Paths of the text part of a multimodal model are compared in all
            spellings, which engines map to their own.
        section: the config that the engine uses; empty where there is none.
        classes: what the engine's class of the model creates.
    """

    formats: Collection[str] = FORMATS
    """The formats of compressed-tensors for which the engine has schemes of FP8 weights."""

    def __init__(self, folder: ScaleFolder, section: Section, classes: ClassMap) -> None:
        self.classes = classes
        self._is_wrapped = any(isinstance(folder.config.get(key), dict) for key in _TEXT_KEYS)
        nested = section.get("quantization")
        self._is_nested = isinstance(nested, dict)
        method = section.get("quant_method") or ("modelopt" if self._is_nested else "")
        self.method = _METHODS.get(str(method).lower(), str(method).lower())
        self.section: Section = nested if isinstance(nested, dict) else section
        self.targets: dict[str, Section] = {}
        self._algorithms: Section = {}
        self.excluded: list[str] = []
        if self.method == "compressed-tensors":
            self.excluded = list_strings(section, "ignore")
            self.targets = _list_targets(section)
        elif self.method == "fp8":
            self.excluded = self.read_ignored_layers(section)
        elif self.method.startswith("modelopt"):
            self.excluded = self.read_exclusions(self.section, is_nested=self._is_nested)
            layers = self.section.get("quantized_layers")
            self._algorithms = layers if isinstance(layers, dict) else {}
        dialects = FP8_DIALECTS.values()
        own = next((each for each in dialects if each.has_method(self.method)), None)
        self._dialect = own or COMPRESSED_TENSORS
        self._find_stored: FindScheme | None = None
        with suppress(ModelError):  # a config that the methods with rules here may still read
            dialect, self._find_stored = load_finder(folder.path, folder.config)
            self._dialect = own or dialect

    def require_judged(self, folder: ScaleFolder) -> None:
        """Raise `Unjudged` where more than the stored linears tells what the engine does."""

    def list_expected(
        self, group: LinearGroup, linear: StoredLinear, scheme: StoredScheme | OtherScheme
    ) -> Mapping[str, Expected]:
        """List the tensors that a linear quantized by this scheme has to have."""
        return list_expected(group, linear, scheme, self._dialect)

    def find_scheme(self, group: LinearGroup) -> Found:
        """Find the scheme by which the engine creates a group.

        Raises:
            Refusal: the engine does not start, or that cannot be told.
        """
        if group.state == "plain":
            return Unquantized(why="the engine's class creates it without the config")
        return self.find_configured(self.name_as_listed(group))

    def name_as_listed(self, group: LinearGroup) -> LinearGroup:
        """Give a group the paths that the engine compares with the lists of a config."""
        path = group.listed or group.path
        if path == group.path:
            return group
        parent = path.rpartition(".")[0]

        def rename(linear: StoredLinear) -> StoredLinear:
            name = path if len(group.members) == 1 else f"{parent}.{linear.projection}"
            if group.kind is GroupKind.EXPERTS:
                name = f"{path}{linear.module.removeprefix(group.path)}"
            return replace(linear, module=name)

        return replace(group, path=path, members=tuple(map(rename, group.members)))

    def find_configured(self, group: LinearGroup) -> Found:
        """Find the scheme that the config gives to a group.

        Raises:
            Refusal: the engine does not start, or its method is not known offline.
        """
        if not self.method:
            return Unquantized(why=_NO_CONFIG)
        if self.method == "compressed-tensors":
            return self._find_compressed(group)
        if self.method == "fp8":
            return self.find_fp8(group)
        if self.method.startswith("modelopt"):
            return self._find_modelopt(group)
        if self._find_stored is None:
            raise Unjudged(f"weights of quant_method {self.method!a:.40} are not judged offline")
        return self._find_named(group, self._find_stored)

    def _find_named(self, group: LinearGroup, find: FindScheme) -> Found:
        """Find the scheme of a group by the config's own words, each linear by its path."""
        schemes: dict[str, StoredScheme] = {}
        why = ""
        for each in group.members:
            try:
                schemes[each.module] = find(each.module)
            except ContradictionError as error:
                why = error.message.partition("is FP8, but ")[2] or error.message
            except ModelError as error:
                raise Unjudged(error.message) from error
        if covers_parts(group, lambda path: path not in schemes):
            return Unquantized(why=why)
        found = set(schemes.values())
        if len(found) > 1:
            raise Unjudged(f"the linears of {group.path} have several schemes")
        return found.pop()

    def read_ignored_layers(self, section: Section) -> list[str]:
        """Read the list of the `fp8` method."""
        ignored = list_strings(section, "ignored_layers")
        return ignored or list_strings(section, "modules_to_not_convert")

    def read_exclusions(self, section: Section, *, is_nested: bool) -> list[str]:
        """Read ModelOpt's list, which has another name in the file of its own."""
        return list_strings(section, "exclude_modules" if is_nested else "ignore")

    def ignores(self, entry: str, path: str) -> bool:
        """Match a module with an entry of compressed-tensors' `ignore`."""
        return matches_target(entry, path)

    def skips(self, entry: str, path: str) -> bool:
        """Match a module with an entry of the `fp8` method's list."""
        return entry == path

    def skips_experts(self, entry: str, path: str) -> bool:
        """Match the experts of a layer with an entry of the `fp8` method's list."""
        return "experts" in entry and path in entry

    def find_exclusion(self, group: LinearGroup) -> str | None:
        """Find the entry of ModelOpt's list that excludes a group: a name, a part of it, a glob."""
        if group.kind is not GroupKind.EXPERTS:
            exact = frozenset(self.excluded)
            if self.covers(group, lambda path: not exact.isdisjoint(self.spell(path))):
                return group.path
        pairs = ((entry, name) for entry in self.excluded for name in self.spell(group.path))
        for entry, name in pairs:
            is_part = entry != name and entry in name
            is_expert = group.kind is GroupKind.EXPERTS and self.skips_experts(entry, name)
            if is_part or is_expert or fnmatch(name, entry):
                return entry
        return None

    def find_target(self, group: LinearGroup) -> str | None:
        """Find the first target of compressed-tensors: by path, all projections, or class.

        Experts have no path of their own: those of the first expert's projections count.
        """
        if group.kind is GroupKind.EXPERTS:
            return self.find_path_target(group.members[0].module) or self.find_class_target(group)
        return (
            self.find_path_target(group.path)
            or self.find_part_target(group)
            or self.find_class_target(group)
        )

    def find_path_target(self, path: str) -> str | None:
        """Find the first target that matches a module's path."""
        names = self.spell(path)
        return next((target for target in self.targets if matches_target(target, *names)), None)

    def spell(self, path: str) -> list[str]:
        """List the spellings of a module's path."""
        if not self._is_wrapped:
            return [path]
        parts = path.split(".")
        while len(parts) > 1 and parts[0] in _WRAPPERS:
            del parts[0]
        tail = ".".join(parts)
        return [path, *(f"{prefix}{tail}" for prefix in _PREFIXES)]

    def find_part_target(self, group: LinearGroup) -> str | None:
        """Find the target of the first projection, where all of them have one."""
        parts = [self.find_path_target(each.module) for each in group.members]
        return parts[0] if None not in parts else None

    def find_class_target(self, group: LinearGroup) -> str | None:
        """Find the class `Linear` among the targets, of which the output layer is not.

        Raises:
            Refusal: there is a target that engines compare with their own classes.
        """
        for target in self.targets:
            is_known = target == "Linear" or "." in target or target.endswith("Attention")
            if not is_known and not target.startswith("re:"):
                raise Unjudged(f"which linears the target {target!a:.40} means is not known")
        is_linear = group.kind is not GroupKind.HEAD
        return "Linear" if is_linear and "Linear" in self.targets else None

    def read_group(self, group: Section) -> StoredScheme | OtherScheme:
        """Read a config group of compressed-tensors.

        Raises:
            Refusal: the engine has no scheme for it, or it is of no form that is known.
        """
        own = self.find_own_format(group)
        form = self.section.get("format") if own is None else own
        return read_compressed_group(group, form, self.formats)

    def probe_expert(self, group: LinearGroup) -> LinearGroup:
        """Take the projections of the first expert, by which engines decide for a layer's."""
        first = f"{group.members[0].module.rpartition('.')[0]}."
        members = tuple(each for each in group.members if each.module.startswith(first))
        return replace(group, members=members)

    def find_own_format(self, group: Section) -> object:
        """Find the format of a config group; None where that of the whole config holds."""
        return group.get("format")

    def quantizes(self, group: LinearGroup, algorithm: str) -> bool:
        """Tell whether the engine's ModelOpt method has an FP8 algorithm for a group."""
        del group, algorithm
        return True

    def covers(self, group: LinearGroup, matches: Callable[[str], bool]) -> bool:
        """Check whether a list of a config covers a group."""
        return covers_group(group, matches)

    def judge_untargeted(self, group: LinearGroup) -> Unquantized:
        """Judge a group that no target of compressed-tensors matches.

        Raises:
            Refusal: the engine does not start.
        """
        del group
        return Unquantized(why="no config group has it")

    def _find_compressed(self, group: LinearGroup) -> Found:
        probe = group if group.kind is not GroupKind.EXPERTS else self.probe_expert(group)

        def find_entry(path: str) -> str | None:
            names = self.spell(path)
            return next((e for e in self.excluded if any(self.ignores(e, n) for n in names)), None)

        if self.covers(probe, lambda path: find_entry(path) is not None):
            return exclude(find_entry(probe.members[0].module) or probe.path)
        if group.kind is GroupKind.EXPERTS:
            self._require_one(probe)
        target = self.find_target(probe)
        if target is None:
            return self.judge_untargeted(group)
        return self.read_group(self.targets[target])

    def _require_one(self, probe: LinearGroup) -> None:
        """Refuse projections of experts in several config groups.

        Raises:
            Refusal: they are.
        """
        targets = (self.find_path_target(each.module) for each in probe.members)
        found = [self.targets.get(each or self.find_class_target(probe) or "") for each in targets]
        if any(each != found[0] for each in found[1:]):
            raise Refusal(
                f"the projections of {probe.path} are in several config groups (ValueError: All "
                "MoE projections need to have same quantization scheme)",
                fix=_PART_FIX,
            )

    def find_fp8(self, group: LinearGroup) -> Found:
        """Find a group's scheme by the rules of the `fp8` method."""
        if group.kind is GroupKind.HEAD:
            return Unquantized(why="the engine's fp8 method does not quantize the output layer")
        if group.kind is GroupKind.EXPERTS:
            names = self.spell(group.path)
            entries = (e for e in self.excluded if any(self.skips_experts(e, n) for n in names))
            entry = next(entries, None)
            return _read_fp8(self.section) if entry is None else exclude(entry)
        exact = frozenset(self.excluded)

        def skipped(path: str) -> bool:
            names = self.spell(path)
            is_named = any(name in exact for name in names)
            return is_named or any(self.skips(e, n) for n in names for e in self.excluded)

        is_skipped = self.covers(group, skipped)
        return exclude(group.path) if is_skipped else _read_fp8(self.section)

    def _find_modelopt(self, group: LinearGroup) -> Found:
        if (entry := self.find_exclusion(group)) is not None:
            return exclude(entry)
        if any(part in group.path for part in _VISION):
            return Unquantized(why="the engine's ModelOpt method does not quantize vision towers")
        algorithm = str(self.section.get("quant_algo")).upper()
        if algorithm == "MIXED_PRECISION":
            algorithm = _find_algorithm(group, self._algorithms)
            if not algorithm:
                return Unquantized(why="quantized_layers does not list it")
        if algorithm == "NONE":
            return Unquantized(why="the config names no quant_algo")
        scheme = read_algorithm(algorithm)
        if scheme is not None and not self.quantizes(group, algorithm):
            return Unquantized(why=f"this release does not quantize {algorithm} here")
        if scheme is None:
            raise Unjudged(f"weights of quant_algo {algorithm!a:.40} are not judged offline")
        return scheme


def require_mx(release: Release, form: str, group: LinearGroup, error: str) -> None:
    """Require that a release loads MXFP8 of a dialect in a group.

    Raises:
        Refusal: it stops, with this error.
    """
    values = release.list_values(_LOADS_MX)
    if f"{form} {group.kind}" in values:
        return
    first = release.begins[_LOADS_MX].get(f"{form} {group.kind}")
    others = dict.fromkeys(each.partition(" ")[0] for each in values)
    fixes = (
        f"serve it with {release.engine} {first}" if first else "",
        f"write it as {' or '.join(others)}, if check finds that its class of the model loads that"
        if others
        else "",
    )
    raise Refusal(
        f"{release.title} loads no {_KINDS[group.kind]} in MXFP8 of {form} ({error})",
        fix=", or ".join(filter(None, fixes)),
    )


def covers_group(group: LinearGroup, matches: Callable[[str], bool]) -> bool:
    """Check whether a list covers a group: the fused path, or all projections.

    Raises:
        Refusal: it covers some of them.
    """
    return (len(group.members) > 1 and matches(group.path)) or covers_parts(group, matches)


def covers_parts(group: LinearGroup, matches: Callable[[str], bool]) -> bool:
    """Check whether a list covers all projections of a group.

    Raises:
        Refusal: it covers some of them.
    """
    found = {matches(each.module) for each in group.members}
    if len(found) > 1:
        joined = name_fused_group(group.members[0].module)
        raise Refusal(
            f"{joined} becomes one weight in the engine, and only a part of it is quantized by the "
            "config (ValueError)",
            fix=_PART_FIX,
        )
    return found == {True}


def list_strings(section: Section, key: str) -> list[str]:
    """List the texts of a list in a config."""
    value = section.get(key)
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def exclude(entry: str) -> Unquantized:
    """Say that a config excludes a group."""
    return Unquantized(why=f"the config excludes {entry!a:.80}")


def _list_targets(section: Section) -> dict[str, Section]:
    groups = section.get("config_groups")
    return {
        target: group
        for group in (groups.values() if isinstance(groups, dict) else ())
        if isinstance(group, dict)
        for target in list_strings(group, "targets")
    }


def _read_fp8(section: Section) -> StoredScheme:
    block = section.get("weight_block_size")
    names = (section.get("quant_method"), section.get("quant_algo"))
    if "MXFP8" in (str(name).upper() for name in names):
        block = list(MX_BLOCK)
    if block is None:
        is_static = section.get("activation_scheme") == "static"
        inputs = InputScaling.STATIC if is_static else InputScaling.TOKEN
        return StoredScheme(weights=Granularity.TENSOR, inputs=inputs)
    if not isinstance(block, list) or len(block) != 2 or not all(type(s) is int for s in block):
        raise Unjudged(f"weight_block_size is {block!a:.40}, and engines need two sizes")
    return StoredScheme(
        weights=Granularity.BLOCK, block=(block[0], block[1]), inputs=InputScaling.GROUP
    )


def _find_algorithm(group: LinearGroup, layers: Section) -> str:
    """Find a group's algorithm in a mixed precision; empty where it is not listed.

    Raises:
        Refusal: its projections have several.
    """
    names = [group.path, *(each.module for each in group.members)]
    if group.kind is GroupKind.EXPERTS:
        starts = (f"{group.path}.", group.path.removesuffix("experts"))
        names = [name for start in starts for name in layers if name.startswith(start)][:1]
    found = {
        str(fields.get("quant_algo")).upper()
        for name in names
        if isinstance(fields := layers.get(name), dict)
    }
    if len(found) > 1:
        joined = name_fused_group(group.members[0].module)
        raise Refusal(
            f"{joined} becomes one weight, and its projections have several quant_algo "
            f"({', '.join(sorted(found))}): ValueError",
            fix=_PART_FIX,
        )
    return found.pop() if found else ""
