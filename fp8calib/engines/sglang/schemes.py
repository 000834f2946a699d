"""By which scheme SGLang creates a linear, from the quantization config alone.

`srt/layers/quantization/`: `compressed_tensors/` (compressed_tensors.py, compressed_tensors_moe.py,
utils.py), `fp8.py`, `modelopt_quant.py` and `utils.py` (is_layer_skipped), compared between the
wheels of 0.5.1 to 0.5.23. The functions that match names were run in each, and those that choose a
scheme of compressed-tensors. The numbers are of the releases 0.5.N that changed something.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import replace

from fp8calib.dialects.fp8.compressed_tensors import FORMATS
from fp8calib.engines.replay.module_targets import matches_target
from fp8calib.engines.replay.verdicts import Refusal
from fp8calib.engines.weights.group_schemes import (
    GroupSchemes,
    Section,
    covers_parts,
    exclude,
    list_strings,
)
from fp8calib.engines.weights.linear_loader import Found, GroupKind, LinearGroup, Unquantized
from fp8calib.fp8.schemes import Granularity, InputScaling

_PACKED_FORMAT_SINCE = 16
_NVFP4_FORMAT_SINCE = 7
"""Formats of a whole config that hold FP8 groups too (`is_activation_quantization_format`)."""
_OWN_FORMATS_SINCE = 17
"""The first release that reads the format of a config group."""
_BLOCKS_SINCE = 6
"""The first release with blocks in compressed-tensors."""
_WEIGHTS_ALONE_SINCE = 4
"""The first release that needs no vLLM beside it for FP8 weights alone."""
_CHANNELS_ALONE_SINCE = 22
"""The first release that does not take FP8 weights alone, per channel, for packed integers."""
_PARTS_IGNORED_SINCE, _ENDS_IGNORED_SINCE = 7, 17
"""Entries of `ignore` match a part of a path, in either case; and the end of a path."""
_EXPERTS_BY_PROJECTION_SINCE, _EXPERTS_IGNORED_SINCE = 9, 4
"""Experts have the scheme of their projections; before, that of the target `Linear`."""
_HEADS_SINCE = {"compressed-tensors": 19, "modelopt": 15}
"""The first releases that quantize the output layer."""
_OTHER_LIST_SINCE = 6
"""The first release in which the `fp8` method reads `modules_to_not_convert`."""
_ROOT_KEPT_SINCE, _ROOT_BOTH_SINCE = 9, 10
"""0.5.6 to 0.5.8 drop `model.` of entries; from 0.5.10 on each holds with and without it."""
_PARTS_SKIPPED_SINCE, _WHOLE_PARTS_SINCE = 6, 11
"""Entries of the `fp8` method's list match a part of a path; and whole parts of it alone."""
_GATE_AND_UP_SINCE = 2
_EXPERTS_SKIPPED_SINCE = 10
"""The first release in which that list may have experts."""
_MODELOPT_EXCLUDES_SINCE = 4
"""Before, an excluded linear has no method (AssertionError)."""
_GLOBS_SINCE = 9
"""Entries of ModelOpt's list are globs, and may exclude experts."""
_BLOCK_LINEARS_SINCE, _BLOCK_EXPERTS_SINCE = 18, 21
"""The first releases in which a layer of a mixed precision may be FP8_PB_WO."""
_FALLBACK_PROJECTIONS = ("qkv_proj", "gate_up_proj")
_FUSED_PARTS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
_NEWER_FIX = "use a newer SGLang"
_UNMATCHED_FIX = "list it in `ignore`, or in a config group"


class SglangSchemes(GroupSchemes):
    """The schemes of a release.

    Args:
        section: the config that SGLang uses; empty where there is none.
        config: the model's config.json.
        number: N of the release 0.5.N.
        unlisted: the names of what the model's class joins without saying of which projections.
    """

    def __init__(
        self, section: Section, config: Section, number: int, unlisted: Collection[str]
    ) -> None:
        self._number = number
        self._unlisted = unlisted
        super().__init__(section, config)
        packed = ("pack-quantized",) if number >= _PACKED_FORMAT_SINCE else ()
        own = FORMATS if number >= _NVFP4_FORMAT_SINCE else FORMATS[:3]
        self.formats = (*own, *packed)

    def find(self, group: LinearGroup) -> Found:
        """Find a group's scheme."""
        method = self.method.partition("_")[0]
        is_compressed = method == "compressed-tensors"
        if group.kind is GroupKind.HEAD and self._number < _HEADS_SINCE.get(method, 0):
            return Unquantized(why="this release does not quantize the output layer")
        is_old = self._number < _EXPERTS_BY_PROJECTION_SINCE
        if group.kind is GroupKind.EXPERTS and is_compressed and is_old:
            return self._find_old_experts(group)
        found = super().find(group)
        has_blocks = getattr(found, "weights", None) is Granularity.BLOCK
        if group.kind is GroupKind.HEAD and is_compressed and has_blocks:
            why = "compressed-tensors' output layer in blocks is not supported"
            raise Refusal(f"{why} (NotImplementedError)", fix="leave it out of the targets")
        return found

    def find_own_format(self, group: Section) -> object:
        """Find the format of a config group, which older releases do not read."""
        return super().find_own_format(group) if self._number >= _OWN_FORMATS_SINCE else None

    def read_group(self, group: Section) -> Found:
        """Read a config group, for which older releases have fewer schemes."""
        scheme = super().read_group(group)
        weights = getattr(scheme, "weights", None)
        if weights is Granularity.BLOCK and self._number < _BLOCKS_SINCE:
            why = "compressed-tensors' FP8 weights in blocks have no scheme (NotImplementedError)"
            raise Refusal(why, fix=_NEWER_FIX)
        if weights is None or getattr(scheme, "inputs", None) is not InputScaling.NONE:
            return scheme
        if self._number < _WEIGHTS_ALONE_SINCE:
            why = "FP8 weights whose inputs are not quantized need vLLM beside it (ImportError)"
            raise Refusal(why, fix=_NEWER_FIX)
        if weights is Granularity.CHANNEL and self._number < _CHANNELS_ALONE_SINCE:
            why = (
                "it takes FP8 weights per channel whose inputs are not quantized for packed "
                "integers (ImportError: W4A16Sparse24 is not supported)"
            )
            raise Refusal(why, fix=f"quantize the inputs too, or {_NEWER_FIX}")
        return scheme

    def _find_old_experts(self, group: LinearGroup) -> Found:
        """Find the scheme of experts where it is that of the target `Linear`."""
        entry = next((e for e in self.excluded if self._ignores_any(e, group.path)), None)
        if entry is not None and self._number >= _EXPERTS_IGNORED_SINCE:
            return exclude(entry)
        if entry is not None:
            why = f"the config ignores {group.path}, which has no other method (TypeError)"
            raise Refusal(why, fix=_NEWER_FIX)
        if "Linear" not in self.targets:
            why = "no config group has the target Linear, by which it creates experts (KeyError)"
            raise Refusal(why, fix=_NEWER_FIX)
        return self.read_group(self.targets["Linear"])

    def _ignores_any(self, entry: str, path: str) -> bool:
        return any(self.ignores(entry, name) for name in self.spell(path))

    def covers(self, group: LinearGroup, matches: Callable[[str], bool]) -> bool:
        """Check whether a list covers a group; its projections count in some classes alone."""
        if self.method != "fp8":
            is_named = any(path in self.excluded for path in self.spell(group.path))
            is_linear = group.kind is not GroupKind.EXPERTS
            if is_linear and (is_named or not self._lists_parts(group)):
                return matches(group.path)
            return covers_parts(group, matches)
        return self._skips_group(group, _EXPERTS_SKIPPED_SINCE, matches)

    def _lists_parts(self, group: LinearGroup) -> bool:
        """Tell whether the model's class says which projections a module joins."""
        return group.path.rpartition(".")[2] not in self._unlisted

    def _skips_group(
        self, group: LinearGroup, parts_since: int, matches: Callable[[str], bool]
    ) -> bool:
        """Replay `is_layer_skipped`.

        Args:
            group: linears that are no experts.
            parts_since: the first release in which the method hands over what a class joins.
            matches: whether an entry matches a path.
        """
        name = group.path.rpartition(".")[2]
        is_joined = len(group.members) > 1
        has_parts = self._lists_parts(group) and self._number >= parts_since
        has_fallback = name in _FALLBACK_PROJECTIONS and self._number >= _WHOLE_PARTS_SINCE
        if is_joined and (has_parts or has_fallback):
            return covers_parts(group, matches)
        is_listed = [
            any(path in self.excluded for path in self.spell(each.module)) for each in group.members
        ]
        if self._number >= _GATE_AND_UP_SINCE and name == "gate_up_proj" and all(is_listed):
            return True
        if self._number >= _GATE_AND_UP_SINCE and "experts" in group.path and not is_joined:
            paths = self.spell(group.path)
            entries = [entry for entry in self.excluded if "experts" in entry]
            if any(path in entry for path in paths for entry in entries):
                return True
            return self._number >= _EXPERTS_SKIPPED_SINCE and matches(group.path)
        return matches(group.path)

    def read_ignored_layers(self, section: Section) -> list[str]:
        """Read the `fp8` method's list: the first there is."""
        number = self._number
        keys = ("ignored_layers", "modules_to_not_convert")[: 1 + (number >= _OTHER_LIST_SINCE)]
        key = next((key for key in keys if key in section), keys[0])
        entries = list_strings(section, key)
        if _OTHER_LIST_SINCE <= number < _ROOT_KEPT_SINCE:
            return [entry.replace("model.", "") for entry in entries]
        if number < _ROOT_BOTH_SINCE:
            return entries
        bare = [entry.removeprefix("model.") for entry in entries]
        return [spelling for entry in bare for spelling in (entry, f"model.{entry}")]

    def ignores(self, entry: str, path: str) -> bool:
        """Match a module with an expression, its path, a part or the end of it."""
        if entry.startswith("re:") or self._number < _PARTS_IGNORED_SINCE:
            return matches_target(entry, path)
        if self._number < _ENDS_IGNORED_SINCE:
            return entry.lower() in path.lower()
        return entry == path or path.endswith(f".{entry}")

    def skips(self, entry: str, path: str) -> bool:
        """Match a module with its path, a part of it, or whole parts of it."""
        if self._number < _PARTS_SKIPPED_SINCE:
            return entry == path
        if self._number < _WHOLE_PARTS_SINCE:
            return entry in path
        return f".{entry.rstrip('.')}." in f".{path}."

    def skips_experts(self, entry: str, path: str) -> bool:
        """Match the experts of a layer, also with an entry for one of them."""
        if self._number < _EXPERTS_SKIPPED_SINCE:
            return False
        return self.skips(entry, path) or super().skips_experts(entry, path)

    def find_exclusion(self, group: LinearGroup) -> str | None:
        """Find the entry of ModelOpt's list that excludes a group."""
        number = self._number
        names = self.spell(group.path)
        matches = _matches_glob if number >= _GLOBS_SINCE else _matches_part
        entry = next((e for e in self.excluded if any(matches(e, n) for n in names)), None)
        if group.kind is GroupKind.EXPERTS:
            is_left = _MODELOPT_EXCLUDES_SINCE <= number < _GLOBS_SINCE
            entry = None if is_left else entry
        if entry is not None and number < _MODELOPT_EXCLUDES_SINCE:
            why = f"ModelOpt's list excludes {group.path}, which has no other method"
            raise Refusal(f"{why} (AssertionError)", fix=_NEWER_FIX)
        if group.kind is GroupKind.EXPERTS or number < _MODELOPT_EXCLUDES_SINCE:
            return entry

        def skipped(path: str) -> bool:
            return any(self.skips(e, name) for e in self.excluded for name in self.spell(path))

        is_skipped = self._skips_group(group, _MODELOPT_EXCLUDES_SINCE, skipped)
        return group.path if is_skipped else entry

    def quantizes(self, group: LinearGroup, algorithm: str) -> bool:
        """Tell whether a layer of a mixed precision may have an algorithm."""
        is_expert = group.kind is GroupKind.EXPERTS
        since = _BLOCK_EXPERTS_SINCE if is_expert else _BLOCK_LINEARS_SINCE
        layers = self.section.get("quantized_layers")
        if str(self.section.get("quant_algo")).upper() != "MIXED_PRECISION":
            return True
        is_found = self._lists_parts(group) or (isinstance(layers, dict) and group.path in layers)
        return is_found and (algorithm != "FP8_PB_WO" or self._number >= since)

    def find_target(self, group: LinearGroup) -> str | None:
        """Find the first target: by path, by class, then by all projections; the head's by path."""
        if group.kind is GroupKind.HEAD:
            return next((each for each in self.targets if self.ignores(each, group.path)), None)
        if group.kind is GroupKind.EXPERTS:
            return super().find_target(group)
        parts = self.find_part_target(group) if self._lists_parts(group) else None
        return self.find_path_target(group.path) or self.find_class_target(group) or parts

    def probe_expert(self, group: LinearGroup) -> LinearGroup:
        """Name the projections as SGLang does for every model (`get_moe_scheme`)."""
        first = group.members[0]
        names = (f"{group.path}.0.{each}" for each in ("gate_proj", "up_proj", "down_proj"))
        return replace(group, members=tuple(replace(first, module=name) for name in names))

    def judge_untargeted(self, group: LinearGroup) -> Unquantized:
        """Judge a group that no target matches: SGLang stops, but for the output layer."""
        if group.kind is GroupKind.HEAD or not self.targets:
            return super().judge_untargeted(group)
        raise Refusal(
            f"no config group has {group.members[0].module} (ValueError: Unable to find matching "
            "target)",
            fix=_UNMATCHED_FIX,
        )


def _matches_part(entry: str, path: str) -> bool:
    return entry in path


def _matches_glob(entry: str, path: str) -> bool:
    """Match a path, or one of its parts, with an entry in which `*` stands for anything."""
    pattern = re.escape(entry).replace(r"\*", ".*")
    parts = path.split(".")
    if any(re.fullmatch(pattern, text) for text in (path, *parts)):
        return True
    tail = entry.rpartition(".")[2]
    return tail in _FUSED_PARTS and tail in parts[-1]
