"""How SGLang 0.5.23 loads the linears of a checkpoint. Read in its wheel.

`srt/layers/quantization/` (fp8.py, modelopt_quant.py, compressed_tensors/, utils.py),
`srt/layers/parameter.py`, `srt/layers/linear.py` and the models' `load_weights`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from fp8calib.dialects.fp8.compressed_tensors import FORMATS
from fp8calib.dialects.fp8.quantization_config import StoredScheme
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.module_targets import matches_target
from fp8calib.engines.replay.verdicts import Refusal
from fp8calib.engines.sglang.model_types import (
    FUSING_TYPES,
    INDEXING_TYPES,
    STRICT_TYPES,
    find_sglang_type,
)
from fp8calib.engines.sglang.releases import NEWEST
from fp8calib.engines.sglang.replay import find_sglang_config
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
from fp8calib.engines.weights.parameters import Fit, Parameter
from fp8calib.engines.weights.weight_rule import Effect, Outcome
from fp8calib.geometry.model_geometry import ModelGeometry

_EXPERTS = "SGLang 0.5.23 layers/moe/fused_moe_triton/layer.py (weight_loader), read"
_COPY = "SGLang 0.5.23 srt/layers/parameter.py (copy_with_check, pad_or_narrow_weight), read"
_CREATE = "SGLang 0.5.23 srt/layers/quantization/ (create_weights), read"
_MODELS = "SGLang 0.5.23 srt/models/ (load_weights), read"
_STRICT_WHEN_FUSED = ("gemma3_text", "qwen3")
"""More model types that raise a KeyError for a tensor beside fused projections (loader run)."""
_W4AFP8_LINEARS: Mapping[str, object] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
"""How w4afp8 creates all linears but experts, which it reads as int4 (`w4afp8.py`)."""
_FUSED_PARTS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")


class SglangLinearLoader(LinearLoader):
    """The linears that SGLang creates by a folder's quantization config."""

    engine = "sglang"
    title = "SGLang"
    shape_source = _COPY
    unfilled_source = _CREATE

    def __init__(self, folder: ScaleFolder, geometry: ModelGeometry) -> None:
        quantization = find_sglang_config(folder, NEWEST) or {}
        is_replaced = quantization.get("quant_method") == "w4afp8"
        section = _W4AFP8_LINEARS if is_replaced else quantization
        self._schemes = _SglangSchemes(section, folder.config)
        model_type = find_sglang_type(geometry)
        self._is_strict = model_type in (*STRICT_TYPES, *INDEXING_TYPES)
        self._is_strict_when_fused = model_type in (*FUSING_TYPES, *_STRICT_WHEN_FUSED)

    def find_scheme(self, group: LinearGroup) -> Found:
        """Find the scheme by which SGLang creates a group."""
        return self._schemes.find(group)

    def list_parameters(
        self, group: LinearGroup, linear: StoredLinear, scheme: StoredScheme
    ) -> Mapping[str, Parameter]:
        """List what the method of a scheme registers; short slices are padded in some layers."""
        method = self._schemes.method
        if group.kind is GroupKind.EXPERTS:
            return list_expert_parameters(linear, scheme, method)
        is_merged = len(group.members) > 1 and not group.path.endswith("qkv_proj")
        short = Fit.PADDED if is_merged or linear.shard == "row" else Fit.REFUSED
        return list_linear_parameters(group, linear, scheme, method, short=short)

    def judge_values(
        self, group: LinearGroup, scheme: StoredScheme, numbers: Mapping[str, float]
    ) -> Outcome | None:
        """Judge whether gate and up of an expert have one input scale."""
        del scheme
        return judge_gate_and_up(group, self._schemes.method, numbers, source=_EXPERTS)

    def judge_stray(self, group: LinearGroup, suffix: str) -> Outcome:
        """Judge a tensor without a parameter, which some models raise an error for."""
        del suffix
        is_fused = len(group.members) > 1
        if self._is_strict or (is_fused and self._is_strict_when_fused):
            what = "has no parameter in SGLang (KeyError)"
            return Outcome(effect=Effect.REFUSED, what=what, source=_MODELS)
        what = "has no parameter in SGLang, which ignores it"
        return Outcome(effect=Effect.CONDITION, what=what, source=_MODELS)

    def judge_plain(self, group: LinearGroup) -> Outcome:
        """Judge a weight that is not FP8 in an FP8 parameter: only some copies are checked."""
        what = "is not FP8, but the config quantizes it: SGLang"
        if len(group.members) == 1 and group.members[0].shard == "column":
            what = f"{what} does not cast it down (ValueError)"
            return Outcome(effect=Effect.REFUSED, what=what, source=_COPY)
        what = f"{what} casts it without a scale"
        return Outcome(effect=Effect.MISREAD, what=what, source=_COPY)


class _SglangSchemes(GroupSchemes):
    """The schemes of a config where SGLang differs from vLLM."""

    formats = (*FORMATS, "pack-quantized")

    def read_ignored_layers(self, section: Section) -> list[str]:
        """Read the first list there is, with and without `model.` before each entry."""
        keys = ("ignored_layers", "modules_to_not_convert")
        key = next((key for key in keys if key in section), keys[0])
        bare = [entry.removeprefix("model.") for entry in list_strings(section, key)]
        return [spelling for entry in bare for spelling in (entry, f"model.{entry}")]

    def ignores(self, entry: str, path: str) -> bool:
        """Match a module with an expression, or with the end of its path."""
        return matches_target(entry, path) or path.endswith(f".{entry}")

    def skips(self, entry: str, path: str) -> bool:
        """Match a module with some whole parts of its path."""
        return f".{entry.rstrip('.')}." in f".{path}."

    def skips_experts(self, entry: str, path: str) -> bool:
        """Match the experts of a layer, also with an entry for one of them."""
        return self.skips(entry, path) or super().skips_experts(entry, path)

    def find_exclusion(self, group: LinearGroup) -> str | None:
        """Find the entry of ModelOpt's list: whole parts of the path, or a glob for one."""

        def skipped(path: str) -> bool:
            return any(self.skips(e, name) for e in self.excluded for name in self.spell(path))

        if group.kind is not GroupKind.EXPERTS and covers_group(group, skipped):
            return group.path
        names = self.spell(group.path)
        return next((e for e in self.excluded if any(_matches_glob(e, n) for n in names)), None)

    def find_target(self, group: LinearGroup) -> str | None:
        """Find the first target: by path, by class, then by all projections; the head's by path."""
        if group.kind is GroupKind.HEAD:
            return next((each for each in self.targets if self.ignores(each, group.path)), None)
        if group.kind is GroupKind.EXPERTS:
            return super().find_target(group)
        return (
            self.find_path_target(group.path)
            or self.find_class_target(group)
            or self.find_part_target(group)
        )

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
            fix="list it in `ignore`, or in a config group",
        )


def _matches_glob(entry: str, path: str) -> bool:
    """Match a path, or one of its parts, with an entry in which `*` stands for anything."""
    pattern = re.escape(entry).replace(r"\*", ".*")
    parts = path.split(".")
    if any(re.fullmatch(pattern, text) for text in (path, *parts)):
        return True
    tail = entry.rpartition(".")[2]
    return tail in _FUSED_PARTS and tail in parts[-1]
