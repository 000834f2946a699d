"""How SGLang creates the linears of a checkpoint, from the quantization config alone.

`srt/layers/quantization/`: `compressed_tensors/` (compressed_tensors.py, compressed_tensors_moe.py,
utils.py), `fp8.py`, `modelopt_quant.py` and `utils.py` (is_layer_skipped), compared between the
wheels. The functions that match names were run in each, and those that choose a scheme of
compressed-tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from fp8calib.engines.facts.classes import find_class_map
from fp8calib.engines.facts.release import Release
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.module_targets import matches_target
from fp8calib.engines.replay.verdicts import Refusal, Unjudged
from fp8calib.engines.sglang.replay import find_sglang_config
from fp8calib.engines.weights.expected import OtherScheme
from fp8calib.engines.weights.linears import GroupKind, LinearGroup
from fp8calib.engines.weights.reader import (
    Found,
    LinearReader,
    Section,
    Unquantized,
    covers_parts,
    list_strings,
    require_mx,
)
from fp8calib.formats.fp8.compressed_tensors import FORMATS
from fp8calib.formats.fp8.quantization_config import StoredScheme
from fp8calib.model.shapes import ModelGeometry
from fp8calib.numerics.schemes import Granularity, InputScaling

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
_UNMATCHED_FIX = "list it in `ignore`, or in a config group"


class SglangReader(LinearReader):
    """The linears that a release creates.

    Args:
        folder: the checkpoint.
        section: the config that SGLang uses; empty where there is none.
        geometry: the model's.
        release: whose rules hold.
    """

    formats = (*FORMATS, "pack-quantized")

    @classmethod
    def open(cls, folder: ScaleFolder, geometry: ModelGeometry, release: Release) -> SglangReader:
        """Find the config.

        Raises:
            Refusal: SGLang refuses it.
        """
        quantization = find_sglang_config(folder) or {}
        is_replaced = quantization.get("quant_method") == "w4afp8"
        section = _W4AFP8_LINEARS if is_replaced else quantization
        return cls(folder, section, geometry, release)

    def __init__(
        self, folder: ScaleFolder, section: Section, geometry: ModelGeometry, release: Release
    ) -> None:
        self._release = release
        classes = find_class_map("sglang", release.version, geometry.architecture)
        super().__init__(folder, section, classes or {})
        algorithm = str(self.section.get("quant_algo")).upper()
        self._is_mx = self.method == "mxfp8" or algorithm == "MXFP8"
        self._is_mixed = algorithm == "MIXED_PRECISION"
        if self._is_mx:
            self.excluded = self._read_mx_exclusions(self.section)

    def find_scheme(self, group: LinearGroup) -> Found:
        """Find the scheme by which SGLang creates a group.

        Raises:
            Refusal: it does not start, or that cannot be told: its names are read, not run.
        """
        found = super().find_scheme(group)
        own = group.path.rpartition(".")[2]
        if not group.is_by_config or group.kind is not GroupKind.LINEAR:
            return found
        is_quantized = not isinstance(found, Unquantized)
        if is_quantized and len(group.members) == 1 and group.members[0].projection != own:
            raise Unjudged(f"{group.path} is joined of more than the checkpoint has")
        beside = self.find_configured(group)
        if isinstance(found, Unquantized) is not isinstance(beside, Unquantized):
            raise Unjudged(f"lists of the config may have to name {group.path} {group.listed}")
        return found

    def find_configured(self, group: LinearGroup) -> Found:
        """Find the scheme that the config gives to a group."""
        is_compressed = self.method == "compressed-tensors"
        is_head = group.kind is GroupKind.HEAD
        if is_head and is_compressed and not self._release.has(_HEAD_COMPRESSED):
            return Unquantized(why="this release does not quantize the output layer")
        found = self.find_fp8(group) if self._is_mx else super().find_configured(group)
        if not isinstance(found, StoredScheme):
            return found
        if found.is_mx:
            if self._is_mixed:
                raise Unjudged("MXFP8 in a mixed precision, whose scales few models find")
            require_mx(self._release, self.method, group, _MX_ERRORS[self.method])
        if is_head and is_compressed and found.weights is Granularity.BLOCK:
            why = "compressed-tensors' output layer in blocks is not supported"
            raise Refusal(f"{why} (NotImplementedError)", fix="leave it out of the targets")
        return found

    def _read_mx_exclusions(self, section: Section) -> list[str]:
        """Read the list of MXFP8, which has ModelOpt's name in its config (`model_config.py`)."""
        if self.method == "mxfp8":
            return self.read_ignored_layers(section)
        key = "exclude_modules" if "exclude_modules" in section else "ignore"
        return self.read_ignored_layers({"ignored_layers": list_strings(section, key)})

    def find_own_format(self, group: Section) -> object:
        """Find the format of a config group, which older releases do not read."""
        return super().find_own_format(group) if self._release.has(_GROUP_FORMATS) else None

    def read_group(self, group: Section) -> StoredScheme:
        """Read a config group, for which older releases have fewer schemes."""
        scheme = super().read_group(group)
        if isinstance(scheme, OtherScheme):
            raise Unjudged(f"weights of the form {scheme.form} are not judged offline")
        is_alone = scheme.inputs is InputScaling.NONE
        if is_alone and scheme.weights is Granularity.BLOCK:
            raise Unjudged("weights in blocks whose inputs are not quantized")
        is_channel = scheme.weights is Granularity.CHANNEL
        if is_alone and is_channel and not self._release.has(_CHANNELS_ALONE):
            why = (
                "it takes FP8 weights per channel whose inputs are not quantized for packed "
                "integers (ImportError: W4A16Sparse24 is not supported)"
            )
            raise Refusal(why, fix="quantize the inputs too, or use a newer SGLang")
        return scheme

    def covers(self, group: LinearGroup, matches: Callable[[str], bool]) -> bool:
        """Check whether a list covers a group; its projections count in some classes alone."""
        if self.method == "fp8" or self._is_mx:
            return self._skips_group(group, matches)
        is_named = any(path in self.excluded for path in self.spell(group.path))
        is_linear = group.kind is not GroupKind.EXPERTS
        if is_linear and (is_named or group.state == "joined"):
            return matches(group.path)
        return covers_parts(group, matches)

    def _skips_group(self, group: LinearGroup, matches: Callable[[str], bool]) -> bool:
        """Replay `is_layer_skipped` for linears that are no experts."""
        name = group.path.rpartition(".")[2]
        is_joined = len(group.members) > 1
        if is_joined and (group.state != "joined" or name in _FALLBACK_PROJECTIONS):
            return covers_parts(group, matches)
        if "experts" in group.path and not is_joined:
            paths = self.spell(group.path)
            entries = [entry for entry in self.excluded if "experts" in entry]
            if any(path in entry for path in paths for entry in entries):
                return True
        return matches(group.path)

    def read_ignored_layers(self, section: Section) -> list[str]:
        """Read the `fp8` method's list, the first there is; each entry with and without a root."""
        keys = ("ignored_layers", "modules_to_not_convert")
        key = next((key for key in keys if key in section), keys[0])
        bare = [entry.removeprefix("model.") for entry in list_strings(section, key)]
        return [spelling for entry in bare for spelling in (entry, f"model.{entry}")]

    def ignores(self, entry: str, path: str) -> bool:
        """Match a module with an expression, its path, a part or the end of it."""
        if entry.startswith("re:"):
            return matches_target(entry, path)
        if not self._release.has(_ENDS_IGNORED):
            return entry.lower() in path.lower()
        return entry == path or path.endswith(f".{entry}")

    def skips(self, entry: str, path: str) -> bool:
        """Match a module with its path, or whole parts of it."""
        return f".{entry.rstrip('.')}." in f".{path}."

    def skips_experts(self, entry: str, path: str) -> bool:
        """Match the experts of a layer, also with an entry for one of them."""
        return self.skips(entry, path) or super().skips_experts(entry, path)

    def find_exclusion(self, group: LinearGroup) -> str | None:
        """Find the entry of ModelOpt's list that excludes a group."""
        names = self.spell(group.path)
        globs = (e for e in self.excluded if any(_matches_glob(e, n) for n in names))
        entry = next(globs, None)
        if group.kind is GroupKind.EXPERTS:
            return entry

        def skipped(path: str) -> bool:
            return any(self.skips(e, name) for e in self.excluded for name in self.spell(path))

        return group.path if self._skips_group(group, skipped) else entry

    def quantizes(self, group: LinearGroup, algorithm: str) -> bool:
        """Tell whether a layer of a mixed precision may have an algorithm."""
        what = "expert" if group.kind is GroupKind.EXPERTS else "linear"
        layers = self.section.get("quantized_layers")
        if not self._is_mixed:
            return True
        is_found = group.state != "joined" or (isinstance(layers, dict) and group.path in layers)
        is_read = algorithm in self._release.list_values(f"mixed precision {what}")
        return is_found and (is_read or algorithm != "FP8_PB_WO")

    def find_target(self, group: LinearGroup) -> str | None:
        """Find the first target: by path, by class, then by all projections; the head's by path."""
        if group.kind is GroupKind.HEAD:
            return next((each for each in self.targets if self.ignores(each, group.path)), None)
        if group.kind is GroupKind.EXPERTS:
            return super().find_target(group)
        parts = self.find_part_target(group) if group.state != "joined" else None
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


def _matches_glob(entry: str, path: str) -> bool:
    """Match a path, or one of its parts, with an entry in which `*` stands for anything."""
    pattern = re.escape(entry).replace(r"\*", ".*")
    parts = path.split(".")
    if any(re.fullmatch(pattern, text) for text in (path, *parts)):
        return True
    tail = entry.rpartition(".")[2]
    return tail in _FUSED_PARTS and tail in parts[-1]
