"""How SGLang creates the linears of a checkpoint, from the quantization config alone.

`srt/layers/quantization/`: `compressed_tensors/` (compressed_tensors.py, compressed_tensors_moe.py,
utils.py), `fp8.py`, `modelopt_quant.py` and `utils.py` (is_layer_skipped), compared between the
wheels. The functions that match names were run in each, and those that choose a scheme of
compressed-tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from fp8calib.engines.facts.classes import BY_CONFIG
from fp8calib.engines.facts.release import Release
from fp8calib.engines.replay.declared import matches_target
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.verdicts import Refusal, Unjudged
from fp8calib.engines.sglang.replay import find_sglang_config
from fp8calib.engines.weights.forms import OtherScheme, read_compressed_group
from fp8calib.engines.weights.linears import LinearGroup
from fp8calib.engines.weights.reader import (
    Found,
    LinearReader,
    Names,
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
        parts = tuple(each.module for each in group.members)
        stored = Names(group.path, parts, group.kind, group.state)
        if isinstance(self.find_configured(stored), Unquantized) is is_quantized:
            raise Unjudged(f"lists of the config may have to name {group.path} {group.listed}")
        return found

    def find_configured(self, names: Names) -> Found:
        """Find the scheme that the config gives to a group."""
        is_head, is_compressed = names.kind == "head", self.method == "compressed-tensors"
        if is_compressed and is_head and not self.release.has(_HEAD_COMPRESSED):
            return Unquantized(why="this release does not quantize the output layer")
        found = super().find_configured(names)
        if not isinstance(found, StoredScheme):
            return found
        if found.is_mx:
            if self.algorithm == "MIXED_PRECISION":
                raise Unjudged("MXFP8 in a mixed precision, whose scales few models find")
            self.require_mx(self.method, names.kind, _MX_ERRORS.get(self.method, ""))
        if is_compressed and is_head and found.weights is Granularity.BLOCK:
            why = "compressed-tensors' output layer in blocks is not supported"
            raise Refusal(f"{why} (NotImplementedError)", fix="leave it out of the targets")
        return found

    def _find_excluded(self, names: Names) -> str | None:
        """Find the entry of the config's list that excludes a group."""
        is_expert, is_joined = names.kind == "experts", len(names.parts) > 1

        def find(path: str) -> str | None:
            return self.find_entry(matches, path, self.excluded)

        if self.method == "compressed-tensors":
            matches = self._ignores
            # projections count in some classes alone
            is_named = any(path in self.excluded for path in self.spell(names.path))
            if is_expert:
                return find_for_parts(_name_expert(names), find)
            is_whole = is_named or names.state == "joined"
            return find(names.path) if is_whole else find_for_parts(names, find)
        if is_expert and not self.is_fp8:
            return self.find_entry(_matches_glob, names.path, self.excluded)
        # `is_layer_skipped`
        has_experts = is_expert or (not is_joined and "experts" in names.path)
        matches = _skips_experts if has_experts else _skips
        own = names.path.rpartition(".")[2]
        is_split = names.state != "joined" or own in _FALLBACK_PROJECTIONS
        if is_joined and is_split and not is_expert:
            entry = find_for_parts(names, find)
        else:
            entry = find(names.path)
        if entry is None and not self.is_fp8:
            return self.find_entry(_matches_glob, names.path, self.excluded)
        return entry

    def _find_compressed(self, names: Names) -> Found:
        is_expert, is_head = names.kind == "experts", names.kind == "head"
        if is_expert:
            target = self.find_expert_target(_name_expert(names))
        elif is_head:
            target = next((each for each in self.targets if self._ignores(each, names.path)), None)
        else:
            last = ("parts",) if names.state != "joined" else ()
            target = self.find_target(names, "path", "class", *last)
        if target is not None:
            return self._read_own(target, is_expert=is_expert)
        if is_head or not self.targets:
            return Unquantized(why="no config group has it")
        why = f"no config group has {names.parts[0]} (ValueError)"
        raise Refusal(why, fix="list it in `ignore`, or in a config group")

    def _read_own(self, target: str, *, is_expert: bool) -> StoredScheme:
        """Read a config group, for which older releases have fewer schemes."""
        scheme = read_compressed_group(
            *(self.targets[target], self.section.get("format"), _FORMATS),
            reads_own_format=self.release.has(_GROUP_FORMATS),
        )
        if isinstance(scheme, OtherScheme):
            raise Unjudged(f"weights of the form {scheme.form} are not judged offline")
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

    def _quantizes_mixed(self, names: Names, algorithm: str) -> bool:
        layers = self.section.get("quantized_layers")
        is_found = names.state != "joined" or (isinstance(layers, dict) and names.path in layers)
        is_read = super()._quantizes_mixed(names, algorithm)
        return is_found and (is_read or algorithm != "FP8_PB_WO")


def _name_expert(names: Names) -> Names:
    """Name the first expert's projections as SGLang does, whatever the model's (get_moe_scheme)."""
    parts = (f"{names.path}.0.{each}" for each in ("gate_proj", "up_proj", "down_proj"))
    return names._replace(parts=tuple(parts))


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
