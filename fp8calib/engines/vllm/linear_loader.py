"""How vLLM 0.32.0 loads the linears of a checkpoint. Run on tiny models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from fp8calib.dialects.fp8.quantization_config import StoredScheme
from fp8calib.engines.replay.folder import ScaleFolder
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
    list_strings,
)
from fp8calib.engines.weights.linear_loader import (
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
)
from fp8calib.engines.weights.parameters import WEIGHT, Parameter, Unfilled
from fp8calib.engines.weights.weight_rule import Effect, Outcome
from fp8calib.geometry.model_geometry import ModelGeometry

_LOADER = "vLLM 0.32.0 models/utils.py (AutoWeightsLoader), run"
_EXPERTS = "vLLM 0.32.0 fused_moe/routed_experts.py (weight_loader), run"
_COPY = "vLLM 0.32.0 model_executor/parameter.py, layers/linear.py (weight_loader_v2), run"
_TRACK = "vLLM 0.32.0 model_loader/default_loader.py (track_weights_loading), run"
_CREATE = "vLLM 0.32.0 quantization/utils/fp8_utils.py (create_fp8_scale_parameter), run"
_RENAMED = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}
_RENAMING_TYPES = ("mistral3",)
"""Model types whose `load_weights` takes these names too (`models/mistral3.py`)."""
_CAST_EXACTLY = ("F8_E4M3", "F8_E4M3FNUZ")
_DROPPED = ("g_idx",)
"""Tensors that vLLM drops by name (`base_config.py`, get_checkpoint_weight_mapper)."""


class VllmLinearLoader(LinearLoader):
    """The linears that vLLM creates by a folder's quantization config."""

    engine = "vllm"
    title = "vLLM"
    shape_source = _COPY
    unfilled_source = _CREATE

    def __init__(self, folder: ScaleFolder, geometry: ModelGeometry, release: Release) -> None:
        section = find_quantization(folder, keys=CONFIG_KEYS) or {}
        section = section if name_method(section, release) else {}
        self._schemes = _Schemes(section, folder.config, release)
        self._model_type = geometry.model_type
        self._renames = geometry.model_type in _RENAMING_TYPES
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
        return self._schemes.find(self._rename(group))

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
            return list_expert_parameters(linear, scheme, method)
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
        if suffix in _DROPPED or all(ignores_companion(self._model_type, each) for each in names):
            return None
        error = "AttributeError" if len(group.members) > 1 else "ValueError"
        what = f"has no parameter in vLLM ({error})"
        return Outcome(effect=Effect.REFUSED, what=what, source=_LOADER)

    def judge_plain(self, group: LinearGroup) -> Outcome | None:
        """Judge a weight that is not FP8 in an FP8 parameter: it is cast."""
        del group
        what = "is not FP8, but the config quantizes it: vLLM casts it without a scale"
        return Outcome(effect=Effect.MISREAD, what=what, source=_COPY)

    def judge_absent(self, group: LinearGroup) -> Outcome | None:
        """Judge a linear that is not quantized and has no weight."""
        del group
        what = f"is missing: {Unfilled.MEMORY}"
        return Outcome(effect=Effect.MISREAD, what=what, source=_TRACK)

    def judge_dtype(self, group: LinearGroup, suffix: str, dtype: str) -> Outcome | None:
        """Judge the dtype of a weight: any other than FP8 is cast to e4m3fn, value by value."""
        del group
        if suffix != WEIGHT or dtype in _CAST_EXACTLY:
            return None
        what = f"is {dtype}: vLLM casts its values to float8_e4m3fn"
        return Outcome(effect=Effect.MISREAD, what=what, source=_COPY)

    def judge_surplus(self) -> Outcome:
        """Judge tensors of a layer that the model does not have: vLLM stops."""
        what = "is in a layer that the model does not have (ValueError)"
        return Outcome(effect=Effect.REFUSED, what=what, source=_LOADER)


class _Schemes(GroupSchemes):
    """The schemes of a release, which reads ModelOpt's list by its own name of it."""

    def __init__(self, section: Section, config: Section, release: Release) -> None:
        self._release = release
        super().__init__(section, config)

    def read_exclusions(self, section: Section, *, is_nested: bool) -> list[str]:
        """Read ModelOpt's list."""
        whole = {"quantization": section} if is_nested else section
        return list_strings(section, find_exclusions(whole, section, self._release))


def _find_spelling(linear: StoredLinear, name: str) -> str:
    other = _RENAMED.get(name, name)
    return other if other in linear.tensors else name
