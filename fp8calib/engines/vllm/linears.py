"""How vLLM 0.32.0 creates the linears of a checkpoint. Run on tiny models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from fp8calib.engines.facts.classes import find_class_map
from fp8calib.engines.facts.release import Release
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.quantization_config import CONFIG_KEYS, find_quantization
from fp8calib.engines.replay.served_dtype import find_served_dtype
from fp8calib.engines.replay.verdicts import Refusal, Unjudged
from fp8calib.engines.vllm.kv_method import find_exclusions, name_method
from fp8calib.engines.vllm.model_types import (
    RENAMING_TYPES,
)
from fp8calib.engines.vllm.numerics import BFLOAT16_TYPES
from fp8calib.engines.weights.expected import Expected, OtherScheme
from fp8calib.engines.weights.linears import GroupKind, LinearGroup, StoredLinear
from fp8calib.engines.weights.reader import (
    Found,
    LinearReader,
    Section,
    Unquantized,
    covers_group,
    covers_parts,
    list_strings,
    require_mx,
)
from fp8calib.engines.weights.stored import HEADS
from fp8calib.formats.fp8.quantization_config import StoredScheme
from fp8calib.formats.fp8.weights import WEIGHT_FORMATS
from fp8calib.model.shapes import ModelGeometry
from fp8calib.numerics.schemes import Granularity

_IGNORES_JOINED = "an expression in ignore may match the name of joined projections"
_CLASS_FIRST = "joined projections have the target of their class before that of their names"
_RENAMED = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}


class VllmReader(LinearReader):
    """The linears that vLLM creates by a folder's quantization config."""

    @classmethod
    def open(cls, folder: ScaleFolder, geometry: ModelGeometry, release: Release) -> VllmReader:
        """Find the config.

        Raises:
            Refusal: vLLM refuses it.
        """
        section = find_quantization(folder, keys=CONFIG_KEYS) or {}
        section = section if name_method(section, release) else {}
        return cls(folder, section, geometry, release)

    def __init__(
        self, folder: ScaleFolder, section: Section, geometry: ModelGeometry, release: Release
    ) -> None:
        self._release = release
        self._mx_form = str(section.get("quant_method", "modelopt"))
        if section.get("quant_method") == "mxfp8" and not section.get("quant_algo"):
            # modelopt.py, ModelOptMxFp8Config.from_config
            listed = {"exclude_modules": list_strings(section, "ignored_layers")}
            nested = {"quant_algo": "MXFP8", **listed}
            section = {"quant_method": "modelopt", "quantization": nested}
        found = find_class_map("vllm", release.version, geometry.architecture)
        super().__init__(folder, section, found or {})
        if str(self.section.get("quant_algo")).upper() == "MXFP8":
            _require_bfloat16(geometry, release)
        self._renames = geometry.model_type in RENAMING_TYPES
        heads = [each for name in HEADS for each in self.classes.get(name, ())]
        self._has_head = found is None or any(each.is_by_config for each in heads)

    def require_judged(self, folder: ScaleFolder) -> None:
        """Require that a tied output layer stays unquantized: nothing is stored for it.

        vLLM 0.32.0 models/llama.py and models/transformers/causal.py: the layer is created by the
        config before it takes the embedding's weight. Run with starcoder2, smollm3, gpt_bigcode.

        Raises:
            Unjudged: it is created in FP8, and its scales are not set.
        """
        if not self._has_head:
            return
        tensors = {name: each for held in folder.tensors.values() for name, each in held.items()}
        has_weights = any(each.dtype in WEIGHT_FORMATS for each in tensors.values())
        modules = (name.rpartition(".")[0] for name in tensors)
        if not has_weights or any(path.rpartition(".")[2] in HEADS for path in modules):
            return
        linear = StoredLinear(module=HEADS[0], shape=(0, 0), tensors={})
        head = LinearGroup(path=HEADS[0], kind=GroupKind.HEAD, members=(linear,), state="config")
        if not isinstance(self.find_scheme(head), Unquantized):
            why = "the config quantizes the output layer, which is tied: nothing is stored for it"
            raise Unjudged(why)

    def find_scheme(self, group: LinearGroup) -> Found:
        """Find the scheme by which vLLM creates a group."""
        if self.method == "quark" and group.is_by_config:
            self._require_excluded(self.name_as_listed(group))
        found = super().find_scheme(group)
        if isinstance(found, StoredScheme) and found.is_mx:
            require_mx(self._release, self._mx_form, group, "ValueError")
        elif group.kind is GroupKind.HEAD and _has_blocks(found):
            raise Unjudged("an output layer in blocks, which vLLM may not have")
        return found

    def name_as_listed(self, group: LinearGroup) -> LinearGroup:
        """Give a group its paths; one whose parts no list may name has that of the whole."""
        listed = super().name_as_listed(group)
        if group.state != "joined":
            return listed
        return replace(listed, members=(replace(listed.members[0], module=listed.path),))

    def _require_excluded(self, group: LinearGroup) -> None:
        """Check that a Quark config that is for the KV cache alone excludes a group.

        vLLM 0.32.0 quantization/quark/quark.py (_find_matched_config), run.

        Raises:
            Refusal: it does not.
        """
        section = self.section
        is_whole = isinstance(section.get("layer_type_quant_config"), dict)
        if is_whole or group.kind is GroupKind.HEAD:
            return
        entries = list_strings(section, "exclude")

        def is_excluded(path: str) -> bool:
            names = self.spell(path)
            return any(self.ignores(entry, name) for entry in entries for name in names)

        has_parts = any(entry.startswith(f"{group.path}.") for entry in entries)
        if is_excluded(group.path) or (group.kind is GroupKind.EXPERTS and has_parts):
            return
        if group.kind is GroupKind.EXPERTS or not covers_group(group, is_excluded):
            why = (
                f"the Quark config excludes no {group.path}, as vLLM calls it (AttributeError: no "
            )
            fix = "exclude it by this name, or export with Quark 0.13"
            raise Refusal(f"{why}layer_type_quant_config)", fix=fix)

    def list_expected(
        self, group: LinearGroup, linear: StoredLinear, scheme: StoredScheme | OtherScheme
    ) -> Mapping[str, Expected]:
        """List the tensors of a linear, of which some models' loaders take other names too."""
        expected = super().list_expected(group, linear, scheme)
        if not self._renames:
            return expected
        return {_find_spelling(linear, name): each for name, each in expected.items()}

    def covers(self, group: LinearGroup, matches: Callable[[str], bool]) -> bool:
        """Check whether a list covers a group: in which cases it may name the joined module."""
        if group.kind is GroupKind.EXPERTS or len(group.members) == 1:
            return covers_parts(group, matches)
        is_named = any(path in self.excluded for path in self.spell(group.path))
        if self.method == "compressed-tensors" and self._release.has(_IGNORES_JOINED):
            is_named = matches(group.path)
        return is_named or covers_parts(group, matches)

    def find_target(self, group: LinearGroup) -> str | None:
        """Find the first target: by path, and then in the order of the release."""
        if group.kind is GroupKind.EXPERTS or not self._release.has(_CLASS_FIRST):
            return super().find_target(group)
        by_name = self.find_path_target(group.path) or self.find_class_target(group)
        return by_name or self.find_part_target(group)

    def read_exclusions(self, section: Section, *, is_nested: bool) -> list[str]:
        """Read ModelOpt's list, which a release reads by its own name of it."""
        whole = {"quantization": section} if is_nested else section
        return list_strings(section, find_exclusions(whole, section, self._release))

    def quantizes(self, group: LinearGroup, algorithm: str) -> bool:
        """Tell whether a layer of a mixed precision may have an algorithm."""
        what = "expert" if group.kind is GroupKind.EXPERTS else "linear"
        is_mixed = str(self.section.get("quant_algo")).upper() == "MIXED_PRECISION"
        return not is_mixed or algorithm in self._release.list_values(f"mixed precision {what}")


def _has_blocks(found: Found) -> bool:
    return isinstance(found, StoredScheme) and found.weights is Granularity.BLOCK


def _require_bfloat16(geometry: ModelGeometry, release: Release) -> None:
    """Refuse MXFP8 of ModelOpt in a model that is served in float16.

    vLLM 0.32.0 quantization/modelopt.py (ModelOptMxFp8Config.get_supported_act_dtypes), run.

    Raises:
        Refusal: it is.
    """
    types = release.list_values(BFLOAT16_TYPES)
    if find_served_dtype(geometry, bfloat16_types=types) is not torch.bfloat16:
        why = "it runs ModelOpt's MXFP8 in bfloat16 alone, and the model is in float16 (ValueError)"
        raise Refusal(why, fix="serve it with --dtype bfloat16, or write it as compressed-tensors")


def _find_spelling(linear: StoredLinear, name: str) -> str:
    other = _RENAMED.get(name, name)
    return other if other in linear.tensors else name
