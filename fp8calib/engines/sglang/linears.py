"""How SGLang creates the linears of a checkpoint, from the quantization config alone.

`srt/layers/quantization/`: `compressed_tensors/` (compressed_tensors.py, compressed_tensors_moe.py,
utils.py), `fp8.py`, `modelopt_quant.py` and `utils.py` (is_layer_skipped), compared between the
wheels. The functions that match names were run in each, and those that choose a scheme of
compressed-tensors.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from fp8calib.engines.facts.classes import BY_CONFIG
from fp8calib.engines.facts.release import Release
from fp8calib.engines.replay.declared import matches_target
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.verdicts import Refusal, Unjudged
from fp8calib.engines.sglang.replay import find_sglang_config
from fp8calib.engines.weights.forms import CompressedGroup, read_compressed_group
from fp8calib.engines.weights.linears import LinearGroup
from fp8calib.engines.weights.reader import (
    Found,
    LinearReader,
    Unquantized,
    find_for_parts,
    list_strings,
    require_auto_round,
)
from fp8calib.formats.fp8.compressed_tensors import CONFIG_FORMATS
from fp8calib.formats.fp8.quantization_config import StoredScheme
from fp8calib.model.geometry import ModelGeometry
from fp8calib.numerics.schemes import Granularity, InputScaling

_FORMATS = (*CONFIG_FORMATS, "pack-quantized")
_GROUP_FORMATS = "the format of a config group is read"
_CHANNELS_ALONE = "FP8 weights alone, per channel, are not taken for packed integers"
_ENDS_IGNORED = "an entry of ignore matches the end of a path, and no part of it in either case"
_HEAD_COMPRESSED = "compressed-tensors quantizes the output layer"
_W4AFP8_LINEARS: Mapping[str, object] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
"""How w4afp8 creates all linears but experts, which it reads as int4 (`w4afp8.py`)."""
_FALLBACK_PROJECTIONS = ("qkv_proj", "gate_up_proj")
_FUSED_PARTS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
_MX_ERRORS = {
    "compressed-tensors": "NotImplementedError",
    "modelopt": "it takes it for FP8 with a scale per tensor: AssertionError",
    "mxfp8": "ValueError",
}


class SglangReader(LinearReader):
    """The linears that a release creates."""

    fp8_methods = ("fp8", "mxfp8")
    fp8_algorithms = ("MXFP8",)
    requantizes_fp8 = False

    @classmethod
    def open(cls, release: Release, folder: ScaleFolder, geometry: ModelGeometry) -> SglangReader:
        """Find the config, or refuse it as SGLang does."""
        quantization = find_sglang_config(folder) or {}
        if quantization.get("quant_method") == "auto-round":
            require_auto_round(quantization, release)
        is_replaced = quantization.get("quant_method") == "w4afp8"
        section = _W4AFP8_LINEARS if is_replaced else quantization
        return cls(folder, section, geometry, release)

    def _list_excluded(self) -> list[str]:
        """List what the config leaves unquantized.

        Of the list of the `fp8` method, the first that there is, each entry counts with and without
        a root. So does that of MXFP8, which has ModelOpt's name in its config (`model_config.py`).
        """
        section, keys = self.section, ("ignored_layers", "modules_to_not_convert")
        if self.method == "compressed-tensors":
            return list_strings(section, "ignore")
        if self.is_fp8 and self.method not in self.fp8_methods:
            keys = ("exclude_modules", "ignore")
        elif self.method.startswith("modelopt"):
            return list_strings(section, "exclude_modules" if self.is_nested else "ignore")
        elif not self.is_fp8:
            return []
        entries = list_strings(section, next((key for key in keys if key in section), keys[0]))
        bare = [entry.removeprefix("model.") for entry in entries]
        return [spelling for entry in bare for spelling in (entry, f"model.{entry}")]

    def find_scheme(self, group: LinearGroup) -> Found:
        """Find the scheme by which SGLang creates a group; its names are read, not run."""
        found = super().find_scheme(group)
        if group.state not in BY_CONFIG or group.kind != "linear":
            return found
        is_quantized = not isinstance(found, Unquantized)
        own = group.path.rpartition(".")[2]
        if is_quantized and len(group.members) == 1 and group.members[0].projection != own:
            raise Unjudged(f"{group.path} is joined of more than the checkpoint has")
        stored = self.find_configured(replace(group, listed=group.path))
        if isinstance(stored, Unquantized) is is_quantized:
            listed = "" if group.listed == group.path else group.listed
            raise Unjudged(f"lists of the config may have to name {group.path} {listed}")
        return found

    def find_configured(self, group: LinearGroup) -> Found:
        """Find the scheme that the config gives to a group."""
        is_head, is_compressed = group.kind == "head", self.method == "compressed-tensors"
        if is_compressed and is_head and not self.release.has(_HEAD_COMPRESSED):
            return Unquantized(why="this release does not quantize the output layer")
        found = super().find_configured(group)
        if not isinstance(found, StoredScheme):
            return found
        if found.is_mx:
            if self.algorithm == "MIXED_PRECISION":
                raise Unjudged("MXFP8 in a mixed precision, whose scales few models find")
            self.require_mx(self.method, group.kind, _MX_ERRORS.get(self.method, ""))
        if is_compressed and is_head and found.weights is Granularity.BLOCK:
            why = "compressed-tensors' output layer in blocks is not supported"
            raise Refusal(f"{why} (NotImplementedError)", fix="leave it out of the targets")
        return found

    def _find_excluded(self, group: LinearGroup) -> str | None:
        """Find the entry of the config's list that excludes a group."""
        path, parts, is_expert = group.listed, self.list_parts(group), group.kind == "experts"
        if self.method == "compressed-tensors":
            find = partial(self.find_entry, self._ignores, entries=self.excluded)
            # projections count in some classes alone
            is_named = self.find_entry(operator.eq, path, self.excluded) is not None
            if is_expert:
                return find_for_parts(_name_expert(path), find)
            is_whole = is_named or group.state == "joined"
            return find(path) if is_whole else find_for_parts(parts, find)
        find_glob = partial(self.find_entry, _matches_glob, entries=self.excluded)
        if is_expert and not self.is_fp8:
            return find_glob(path)
        # `is_layer_skipped`
        is_joined = len(parts) > 1
        has_experts = is_expert or (not is_joined and "experts" in path)
        matches = _skips_experts if has_experts else _skips
        find = partial(self.find_entry, matches, entries=self.excluded)
        own = path.rpartition(".")[2]
        is_split = group.state != "joined" or own in _FALLBACK_PROJECTIONS
        is_for_parts = is_joined and is_split and not is_expert
        entry = find_for_parts(parts, find) if is_for_parts else find(path)
        return find_glob(path) if entry is None and not self.is_fp8 else entry

    def _find_compressed(self, group: LinearGroup) -> Found:
        is_expert, is_head = group.kind == "experts", group.kind == "head"
        path, parts = group.listed, self.list_parts(group)
        if is_expert:
            target = self.find_expert_target(path, _name_expert(path))
        elif is_head:
            target = next((each for each in self.targets if self._ignores(each, path)), None)
        else:
            last = ("parts",) if group.state != "joined" else ()
            target = self.find_target(group.kind, path, "path", "class", *last, parts=parts)
        if target is not None:
            return self._read_own(target, is_expert=is_expert)
        if is_head or not self.targets:
            return Unquantized(why="no config group has it")
        why = f"no config group has {parts[0]} (ValueError)"
        raise Refusal(why, fix="list it in `ignore`, or in a config group")

    def _read_own(self, target: str, *, is_expert: bool) -> StoredScheme:
        """Read a config group, for which older releases have fewer schemes."""
        scheme = read_compressed_group(
            *(self.targets[target], self.section.get("format"), _FORMATS),
            reads_own_format=self.release.has(_GROUP_FORMATS),
        )
        if isinstance(scheme, CompressedGroup):
            raise Unjudged(f"weights of the form {scheme.format} are not judged offline")
        if scheme.inputs is not InputScaling.NONE:
            return scheme
        is_channel = scheme.weights is Granularity.CHANNEL
        if (is_channel or scheme.is_mx) and not self.release.has(_CHANNELS_ALONE):
            if is_expert and scheme.is_mx:
                raise Unjudged("MXFP8 of experts whose inputs are not quantized")
            kind = "FP8 weights per channel" if is_channel else "MXFP8 weights"
            why = f"it takes {kind} alone for packed integers (ImportError: W4A16Sparse24)"
            newer = ", or use a newer SGLang" if is_channel else ""
            raise Refusal(why, fix=f"quantize the inputs too{newer}")
        if scheme.weights is Granularity.BLOCK:
            # `_get_scheme_from_parts` and `get_moe_scheme` end in an error: read
            why = "it has no scheme for weights in blocks whose inputs are not quantized"
            raise Refusal(f"{why} (NotImplementedError)", fix="quantize the inputs too")
        return scheme

    def _ignores(self, entry: str, path: str) -> bool:
        """Match a module with an expression, its path, a part or the end of it."""
        if entry.startswith("re:"):
            return matches_target(entry, path)
        if not self.release.has(_ENDS_IGNORED):
            return entry.lower() in path.lower()
        return entry == path or path.endswith(f".{entry}")

    def _quantizes_mixed(self, group: LinearGroup, algorithm: str) -> bool:
        layers = self.section.get("quantized_layers")
        is_found = group.state != "joined" or (isinstance(layers, dict) and group.listed in layers)
        is_read = super()._quantizes_mixed(group, algorithm)
        return is_found and (is_read or algorithm != "FP8_PB_WO")


def _name_expert(path: str) -> list[str]:
    """Name the first expert's projections as SGLang does, whatever the model's (get_moe_scheme)."""
    return [f"{path}.0.{each}" for each in ("gate_proj", "up_proj", "down_proj")]


def _skips(entry: str, path: str) -> bool:
    """Match a module with its path, or whole parts of it."""
    return f".{entry.rstrip('.')}." in f".{path}."


def _skips_experts(entry: str, path: str) -> bool:
    """Match the experts of a layer, also with an entry for one of them."""
    return _skips(entry, path) or ("experts" in entry and path in entry)


def _matches_glob(entry: str, path: str) -> bool:
    """Match a path, or one of its parts, with an entry in which `*` stands for anything."""
    pattern = re.escape(entry).replace(r"\*", ".*")
    parts = path.split(".")
    if any(re.fullmatch(pattern, text) for text in (path, *parts)):
        return True
    tail = entry.rpartition(".")[2]
    return tail in _FUSED_PARTS and tail in parts[-1]
