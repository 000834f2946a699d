"""How vLLM 0.32.0 loads the linears of a checkpoint. Run on tiny models."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from fp8calib.dialects.fp8.quantization_config import StoredScheme
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.module_targets import matches_target
from fp8calib.engines.replay.quantization_config import find_quantization
from fp8calib.engines.replay.verdicts import Refusal
from fp8calib.engines.vllm.model_types import (
    CREATED_LINEARS,
    PLAIN_HEAD_TYPES,
    RENAMED_LINEARS,
    SEPARATE_TYPES,
    UNPACKED_TYPES,
    UNQUANTIZED_LINEARS,
)
from fp8calib.engines.vllm.quantization_config import CONFIG_KEYS, find_exclusions, name_method
from fp8calib.engines.vllm.releases import Release
from fp8calib.engines.vllm.weight_loader import ignores_companion
from fp8calib.engines.weights.group_schemes import (
    GroupSchemes,
    Section,
    covers_group,
    covers_parts,
    list_strings,
)
from fp8calib.engines.weights.linear_loader import (
    Foreign,
    Found,
    GroupKind,
    LinearGroup,
    LinearLoader,
    StoredLinear,
    Unquantized,
)
from fp8calib.engines.weights.linear_parameters import (
    judge_gate_and_up,
    list_expert_parameters,
    list_linear_parameters,
    slice_experts,
)
from fp8calib.engines.weights.parameters import WEIGHT, Parameter
from fp8calib.engines.weights.weight_rule import Effect, Outcome
from fp8calib.fp8.schemes import Granularity
from fp8calib.geometry.model_geometry import ModelGeometry

_LOADER = "vLLM 0.32.0 models/utils.py (AutoWeightsLoader), run"
_EXPERTS = "vLLM 0.32.0 fused_moe/routed_experts.py (weight_loader), run"
_COPY = "vLLM 0.32.0 model_executor/parameter.py, layers/linear.py (weight_loader_v2), run"
_CREATE = "vLLM 0.32.0 quantization/utils/fp8_utils.py (create_fp8_scale_parameter), run"
_RENAMED = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}
_CAST_EXACTLY = ("F8_E4M3", "F8_E4M3FNUZ")
_OLD_EXPERTS = ("re:.*down_proj.*", "re:.*gate_proj.*", "re:.*up_proj.*")
"""What vLLM before 0.12 looks for among the targets, besides `Linear`, to create experts
(`compressed_tensors_moe.py` get_moe_method)."""


class VllmLinearLoader(LinearLoader):
    """The linears that vLLM creates by a folder's quantization config."""

    engine = "vllm"
    title = "vLLM"
    shape_source = _COPY
    unfilled_source = _CREATE

    def __init__(self, folder: ScaleFolder, geometry: ModelGeometry, release: Release) -> None:
        section = find_quantization(folder, keys=CONFIG_KEYS) or {}
        section = section if name_method(section, release) else {}
        self._schemes = VllmSchemes(section, folder.config, release)
        self._model_type = geometry.model_type
        self._release = release
        self._renames = geometry.model_type in release.renamed_types
        self._has_plain_head = geometry.model_type in PLAIN_HEAD_TYPES
        self._is_separate = geometry.model_type in SEPARATE_TYPES
        self._is_unpacked = geometry.model_type in UNPACKED_TYPES
        self._renamings = RENAMED_LINEARS.get(geometry.model_type, ())
        self._plain = UNQUANTIZED_LINEARS.get(geometry.model_type, ())
        self._created = CREATED_LINEARS.get(geometry.model_type, ())

    def joins(self, group: LinearGroup) -> bool:
        """Tell whether vLLM joins a group."""
        return not (self._is_separate and group.path.endswith("qkv_proj"))

    def find_scheme(self, group: LinearGroup) -> Found:
        """Find the scheme by which vLLM creates a group."""
        if group.kind is GroupKind.HEAD and self._has_plain_head:
            return Unquantized(why="vLLM does not quantize the output layer of this model")
        if group.path.endswith(self._plain):
            return Unquantized(why="vLLM does not quantize this linear")
        if self._schemes.method == "quark" and self.creates(group):
            self._require_excluded(self._rename(group))
        found = self._schemes.find(self._rename(group))
        if group.kind is GroupKind.HEAD and getattr(found, "weights", None) is Granularity.BLOCK:
            return Foreign(why="vLLM stops at an output layer in blocks", effect=Effect.UNKNOWN)
        return found

    def _require_excluded(self, group: LinearGroup) -> None:
        """Check that a Quark config that is for the KV cache alone excludes a group.

        vLLM 0.32.0 quantization/quark/quark.py (_find_matched_config), run.

        Raises:
            Refusal: it does not.
        """
        section = self._schemes.section
        is_whole = isinstance(section.get("layer_type_quant_config"), dict)
        if is_whole or group.kind is GroupKind.HEAD:
            return
        entries = list_strings(section, "exclude")

        def is_excluded(path: str) -> bool:
            names = self._schemes.spell(path)
            return any(self._schemes.ignores(entry, name) for entry in entries for name in names)

        has_parts = any(entry.startswith(f"{group.path}.") for entry in entries)
        if is_excluded(group.path) or (group.kind is GroupKind.EXPERTS and has_parts):
            return
        if group.kind is GroupKind.EXPERTS or not covers_group(group, is_excluded):
            why = (
                f"the Quark config excludes no {group.path}, as vLLM calls it (AttributeError: no "
            )
            fix = "exclude it by this name, or export with Quark 0.13"
            raise Refusal(f"{why}layer_type_quant_config)", fix=fix)

    def _rename(self, group: LinearGroup) -> LinearGroup:
        """Give a group the paths that vLLM compares with the lists of a config."""
        members = group.members
        if self._is_unpacked and group.kind is GroupKind.LINEAR:
            members = (replace(members[0], module=group.path),)
        return replace(
            group,
            path=self._rename_path(group.path),
            members=tuple(replace(m, module=self._rename_path(m.module)) for m in members),
        )

    def _rename_path(self, path: str) -> str:
        for pattern, new in self._renamings:
            path = re.sub(pattern, new, path)
        return path

    def creates(self, group: LinearGroup) -> bool:
        """Tell whether vLLM creates a group by the config: some routers and mixers too."""
        return super().creates(group) or group.path.endswith(self._created)

    def list_parameters(
        self, group: LinearGroup, linear: StoredLinear, scheme: StoredScheme
    ) -> Mapping[str, Parameter]:
        """List what the method of a scheme registers (create_weights)."""
        method = self._schemes.method
        if group.kind is GroupKind.EXPERTS:
            created = list_expert_parameters(linear, scheme, method)
            if not self._release.cuts_experts:
                return created
            return slice_experts(created, linear, narrows=self._release.narrows_experts)
        created = list_linear_parameters(group, linear, scheme, method)
        if not self._renames:
            return created
        return {_find_spelling(linear, name): each for name, each in created.items()}

    def judge_values(
        self, group: LinearGroup, scheme: StoredScheme, numbers: Mapping[str, float]
    ) -> Outcome | None:
        """Judge whether gate and up of an expert have one input scale."""
        del scheme
        return judge_gate_and_up(group, self._schemes.method, numbers, source=_EXPERTS)

    def judge_stray(self, group: LinearGroup, suffix: str) -> Outcome | None:
        """Judge a tensor without a parameter: most models' loaders stop."""
        names = (member.name(suffix) for member in group.members)
        if all(ignores_companion(self._model_type, each) for each in names):
            return None
        error = "AttributeError" if len(group.members) > 1 else "ValueError"
        what = f"has no parameter in vLLM ({error})"
        return Outcome(effect=Effect.REFUSED, what=what, source=_LOADER)

    def judge_plain(self, group: LinearGroup) -> Outcome | None:
        """Judge a weight that is not FP8 in an FP8 parameter: it is cast."""
        del group
        what = "is not FP8, but the config quantizes it: vLLM casts it without a scale"
        return Outcome(effect=Effect.MISREAD, what=what, source=_COPY)

    def judge_dtype(self, group: LinearGroup, suffix: str, dtype: str) -> Outcome | None:
        """Judge the dtype of a weight: any other than FP8 is cast to e4m3fn, value by value."""
        del group
        if suffix != WEIGHT or dtype in _CAST_EXACTLY:
            return None
        what = f"is {dtype}: vLLM casts its values to float8_e4m3fn"
        return Outcome(effect=Effect.MISREAD, what=what, source=_COPY)


class VllmSchemes(GroupSchemes):
    """The schemes of a release."""

    def __init__(self, section: Section, config: Section, release: Release) -> None:
        self._release = release
        super().__init__(section, config)

    def find(self, group: LinearGroup) -> Found:
        """Find a group's scheme."""
        method = "modelopt" if self.method.startswith("modelopt") else self.method
        is_read = method in ("compressed-tensors", "modelopt")
        if group.kind is GroupKind.HEAD and is_read and method not in self._release.head_methods:
            return Unquantized(why="this release does not quantize the output layer")
        is_compressed = method == "compressed-tensors"
        if group.kind is GroupKind.EXPERTS and is_compressed and self._release.joins_experts:
            return self._find_old_experts()
        return super().find(group)

    def _find_old_experts(self) -> Found:
        """Find the scheme of all experts, which is that of `Linear`, whatever is ignored."""
        targets = [self._find_old_target(name) for name in _OLD_EXPERTS]
        target = "Linear" if "Linear" in self.targets else targets[0]
        if target is None or any(each is None for each in targets):
            why = "no config group has the target Linear, by which it creates experts (ValueError)"
            raise Refusal(why, fix="use vLLM 0.12 or later")
        return self.read_group(self.targets[target])

    def _find_old_target(self, name: str) -> str | None:
        if "Linear" in self.targets:
            return "Linear"
        return next((target for target in self.targets if matches_target(target, name)), None)

    def covers(self, group: LinearGroup, matches: Callable[[str], bool]) -> bool:
        """Check whether a list covers a group: in which cases it may name the joined module."""
        if group.kind is GroupKind.EXPERTS or len(group.members) == 1:
            return covers_parts(group, matches)
        is_named = any(path in self.excluded for path in self.spell(group.path))
        is_compressed = self.method == "compressed-tensors"
        if is_compressed and self._release.ignores_joined:
            is_named = matches(group.path)
        takes_name = is_compressed or self._release.skips_joined
        return (is_named and takes_name) or covers_parts(group, matches)

    def find_target(self, group: LinearGroup) -> str | None:
        """Find the first target: by path, and then in the order of the release."""
        if group.kind is GroupKind.EXPERTS or not self._release.finds_classes_first:
            return super().find_target(group)
        by_name = self.find_path_target(group.path) or self.find_class_target(group)
        return by_name or self.find_part_target(group)

    def read_exclusions(self, section: Section, *, is_nested: bool) -> list[str]:
        """Read ModelOpt's list, which a release reads by its own name of it."""
        whole = {"quantization": section} if is_nested else section
        return list_strings(section, find_exclusions(whole, section, self._release))

    def read_group(self, group: Section) -> Found:
        """Read a config group, for which older releases have fewer schemes."""
        scheme = super().read_group(group)
        weights = getattr(scheme, "weights", None)
        if weights is Granularity.BLOCK and not self._release.has_compressed_blocks:
            why = "compressed-tensors' FP8 weights in blocks have no scheme (NotImplementedError)"
            raise Refusal(why, fix="use vLLM 0.11 or later")
        return scheme

    def judge_untargeted(self, group: LinearGroup) -> Unquantized:
        """Judge a group that no target matches: older releases stop."""
        is_head = group.kind is GroupKind.HEAD
        if is_head or not self.targets or not self._release.needs_targets:
            return super().judge_untargeted(group)
        why = f"no config group has {group.members[0].module} (ValueError: Unable to find matching"
        raise Refusal(f"{why} target)", fix="list it in `ignore`, or use vLLM 0.21 or later")

    def skips_experts(self, entry: str, path: str) -> bool:
        """Match the experts of a layer with an entry of the `fp8` method's list."""
        return self._release.skips_fp8_experts and super().skips_experts(entry, path)

    def find_exclusion(self, group: LinearGroup) -> str | None:
        """Find the entry of ModelOpt's list that excludes a group."""
        if group.kind is GroupKind.EXPERTS and not self._release.excludes_experts:
            return None
        return super().find_exclusion(group)

    def matches_glob(self, entry: str, path: str) -> bool:
        """Match a path with an entry of ModelOpt's list as a glob."""
        if entry == path:
            return self._release.excludes_joined
        return self._release.excludes_globs and super().matches_glob(entry, path)

    def quantizes(self, group: LinearGroup, algorithm: str) -> bool:
        """Tell whether a layer of a mixed precision may have an algorithm."""
        is_expert = group.kind is GroupKind.EXPERTS
        release = self._release
        algorithms = release.mixed_experts if is_expert else release.mixed_linears
        is_mixed = str(self.section.get("quant_algo")).upper() == "MIXED_PRECISION"
        return not is_mixed or algorithm in algorithms


def _find_spelling(linear: StoredLinear, name: str) -> str:
    other = _RENAMED.get(name, name)
    return other if other in linear.tensors else name
