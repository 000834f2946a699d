"""How SGLang loads the linears of a checkpoint. Read in the wheels of 0.5.1 to 0.5.23.

`srt/layers/quantization/` (create_weights), `srt/layers/parameter.py`, `srt/layers/linear.py`,
`srt/layers/moe/fused_moe_triton/layer.py` and the models' `load_weights`. The numbers are of the
releases 0.5.N that changed something.
"""

from __future__ import annotations

from collections.abc import Mapping

from fp8calib.dialects.fp8.quantization_config import StoredScheme
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.sglang.model_types import (
    INDEXING_TYPES,
    find_sglang_type,
    find_unlisted,
    fuses_first,
    is_strict,
)
from fp8calib.engines.sglang.releases import EXPERTS_NARROWED_SINCE, Release
from fp8calib.engines.sglang.replay import find_sglang_config
from fp8calib.engines.sglang.schemes import SglangSchemes
from fp8calib.engines.weights.linear_loader import (
    Found,
    GroupKind,
    LinearGroup,
    LinearLoader,
    StoredLinear,
)
from fp8calib.engines.weights.linear_parameters import (
    judge_gate_and_up,
    list_expert_parameters,
    list_linear_parameters,
    slice_experts,
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
_PADDED_SINCE = 3
"""The first release that pads slices that are too short; before, narrow raises an error."""
_CHECKED_SINCE = 8
"""The first release that refuses to cast a linear of its own down (copy_with_check)."""


class SglangLinearLoader(LinearLoader):
    """The linears that SGLang creates by a folder's quantization config."""

    engine = "sglang"
    title = "SGLang"
    shape_source = _COPY
    unfilled_source = _CREATE

    def __init__(self, folder: ScaleFolder, geometry: ModelGeometry, release: Release) -> None:
        quantization = find_sglang_config(folder, release) or {}
        is_replaced = quantization.get("quant_method") == "w4afp8"
        section = _W4AFP8_LINEARS if is_replaced else quantization
        self._number = release.number
        self._schemes = SglangSchemes(
            section,
            folder.config,
            release.number,
            find_unlisted(geometry.architecture, release),
        )
        model_type = find_sglang_type(geometry)
        self._is_strict = is_strict(model_type, release) or model_type in INDEXING_TYPES
        is_fused_first = fuses_first(model_type, release, is_output=False)
        self._is_strict_when_fused = is_fused_first or model_type in _STRICT_WHEN_FUSED

    def find_scheme(self, group: LinearGroup) -> Found:
        """Find the scheme by which SGLang creates a group."""
        return self._schemes.find(group)

    def list_parameters(
        self, group: LinearGroup, linear: StoredLinear, scheme: StoredScheme
    ) -> Mapping[str, Parameter]:
        """List what the method of a scheme registers; short slices are padded in some layers."""
        method = self._schemes.method
        if group.kind is GroupKind.EXPERTS:
            created = list_expert_parameters(linear, scheme, method)
            is_new = self._number >= EXPERTS_NARROWED_SINCE
            return created if is_new else slice_experts(created, linear, narrows=False)
        is_merged = len(group.members) > 1 and not group.path.endswith("qkv_proj")
        is_padded = is_merged or linear.shard == "row"
        short = Fit.PADDED if is_padded and self._number >= _PADDED_SINCE else Fit.REFUSED
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
        is_own = len(group.members) == 1 and group.members[0].shard == "column"
        if is_own and self._number >= _CHECKED_SINCE:
            what = f"{what} does not cast it down (ValueError)"
            return Outcome(effect=Effect.REFUSED, what=what, source=_COPY)
        what = f"{what} casts it without a scale"
        return Outcome(effect=Effect.MISREAD, what=what, source=_COPY)
