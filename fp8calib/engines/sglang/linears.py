"""How SGLang creates the linears of a checkpoint, from the quantization config alone.

`srt/layers/quantization/`: `compressed_tensors/` (compressed_tensors.py, compressed_tensors_moe.py,
utils.py), `fp8.py`, `modelopt_quant.py` and `utils.py` (is_layer_skipped), compared between the
wheels. The functions that match names were run in each, and those that choose a scheme of
compressed-tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

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

    engine = "sglang"

    @classmethod
    def open(cls, folder: ScaleFolder, geometry: ModelGeometry, release: Release) -> SglangReader:
        """Find the config, or refuse it as SGLang does."""
        quantization = find_sglang_config(folder) or {}
        if quantization.get("quant_method") == "auto-round":
            require_auto_round(quantization, release)
        is_replaced = quantization.get("quant_method") == "w4afp8"
        section = _W4AFP8_LINEARS if is_replaced else quantization
        return cls(folder, section, geometry, release)

    @property
    def _is_mx(self) -> bool:
        return self.method == "mxfp8" or self.algorithm == "MXFP8"

    def _list_excluded(self) -> list[str]:
        """List what the config leaves unquantized.

        Of the list of the `fp8` method, the first that there is, each entry counts with and without
        a root. So does that of MXFP8, which has ModelOpt's name in its config (`model_config.py`).
        """
        section, keys = self.section, ("ignored_layers", "modules_to_not_convert")
        if self.method == "compressed-tensors":
            return list_strings(section, "ignore")
        if self._is_mx and self.method != "mxfp8":
            keys = ("exclude_modules", "ignore")
        elif self.method.startswith("modelopt"):
            return list_strings(section, "exclude_modules" if self.is_nested else "ignore")
        elif self.method not in ("fp8", "mxfp8"):
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
        if isinstance(self.find_configured(group), Unquantized) is is_quantized:
            raise Unjudged(f"lists of the config may have to name {group.path} {group.listed}")
        return found

    def find_configured(self, group: LinearGroup) -> Found:
        """Find the scheme that the config gives to a group."""
        found = self._find_fp8(group) if self._is_mx else super().find_configured(group)
        if not isinstance(found, StoredScheme):
            return found
        if found.is_mx:
            if self.algorithm == "MIXED_PRECISION":
                raise Unjudged("MXFP8 in a mixed precision, whose scales few models find")
            self._require_mx(self.method, group, _MX_ERRORS.get(self.method, ""))
        is_compressed = self.method == "compressed-tensors"
        if is_compressed and group.kind == "head" and found.weights is Granularity.BLOCK:
            why = "compressed-tensors' output layer in blocks is not supported"
            raise Refusal(f"{why} (NotImplementedError)", fix="leave it out of the targets")
        return found

    def _find_compressed(self, group: LinearGroup) -> Found:
        is_head = group.kind == "head"
        if is_head and not self.release.has(_HEAD_COMPRESSED):
            return Unquantized(why="this release does not quantize the output layer")
        probe, is_expert = group, group.kind == "experts"
        if is_expert:  # its names of projections, whatever the model's (`get_moe_scheme`)
            first = group.members[0]
            names = (f"{group.path}.0.{each}" for each in ("gate_proj", "up_proj", "down_proj"))
            probe = replace(group, members=tuple(replace(first, module=name) for name in names))

        def find(path: str) -> str | None:
            return self._find_entry(self._ignores, path, self.excluded)

        # projections count in some classes alone
        is_named = any(path in self.excluded for path in self._spell(group.path))
        is_whole = not is_expert and (is_named or group.state == "joined")
        entry = find(group.path) if is_whole else find_for_parts(probe, find)
        if entry is not None:
            return Unquantized.excluded_by(entry)
        if is_expert:
            target = self._find_expert_target(probe)
        elif is_head:
            target = next((each for each in self.targets if self._ignores(each, group.path)), None)
        else:
            by_name = self._find_path_target(group.path) or self._find_class_target(group)
            target = by_name or (self._find_part_target(group) if group.state != "joined" else None)
        if target is not None:
            return self._read_own(target, is_expert=is_expert)
        if is_head or not self.targets:
            return Unquantized(why="no config group has it")
        why = f"no config group has {group.members[0].module} (ValueError)"
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

    def _find_skip(self, group: LinearGroup) -> str | None:
        """Replay `is_layer_skipped` for linears other than experts."""

        def find(path: str) -> str | None:
            return self._find_entry(_skips, path, self.excluded)

        name = group.path.rpartition(".")[2]
        is_joined = len(group.members) > 1
        if is_joined and (group.state != "joined" or name in _FALLBACK_PROJECTIONS):
            return find_for_parts(group, find)
        if "experts" in group.path and not is_joined:
            names = [entry for entry in self.excluded if "experts" in entry]
            entry = self._find_entry(lambda entry, path: path in entry, group.path, names)
            if entry is not None:
                return entry
        return find(group.path)

    @staticmethod
    def _skips_experts(entry: str, path: str) -> bool:
        """Match the experts of a layer, also with an entry for one of them."""
        return _skips(entry, path) or LinearReader._skips_experts(entry, path)

    def _find_exclusion(self, group: LinearGroup) -> str | None:
        skip = None if group.kind == "experts" else self._find_skip(group)
        entry = self._find_entry(_matches_glob, group.path, self.excluded)
        return entry if skip is None else skip

    def _quantizes_mixed(self, group: LinearGroup, algorithm: str) -> bool:
        layers = self.section.get("quantized_layers")
        is_found = group.state != "joined" or (isinstance(layers, dict) and group.path in layers)
        is_read = super()._quantizes_mixed(group, algorithm)
        return is_found and (is_read or algorithm != "FP8_PB_WO")


def _skips(entry: str, path: str) -> bool:
    """Match a module with its path, or whole parts of it."""
    return f".{entry.rstrip('.')}." in f".{path}."


def _matches_glob(entry: str, path: str) -> bool:
    """Match a path, or one of its parts, with an entry in which `*` stands for anything."""
    pattern = re.escape(entry).replace(r"\*", ".*")
    parts = path.split(".")
    if any(re.fullmatch(pattern, text) for text in (path, *parts)):
        return True
    tail = entry.rpartition(".")[2]
    return tail in _FUSED_PARTS and tail in parts[-1]
