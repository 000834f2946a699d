"""How vLLM 0.32.0 creates the linears of a checkpoint. Run on tiny models."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatch
from functools import partial

from fp8calib.checkpoint.header import TensorEntry
from fp8calib.engines.facts.classes import BY_CONFIG
from fp8calib.engines.facts.release import BFLOAT16_TYPES, Release
from fp8calib.engines.replay.declared import CONFIG_KEYS, find_quantization, matches_target
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.verdicts import Refusal, Unjudged
from fp8calib.engines.served_dtype import find_served_dtype
from fp8calib.engines.vllm.kv_method import name_exclusion_list, name_method
from fp8calib.engines.weights.forms import read_compressed_group
from fp8calib.engines.weights.layers import HEADS
from fp8calib.engines.weights.linears import LinearGroup, StoredLinear
from fp8calib.engines.weights.reader import (
    ACCEPTED,
    AUTO_ROUND_FIX,
    ConfigSection,
    Found,
    LinearReader,
    Unquantized,
    find_for_parts,
    list_strings,
    require_auto_round,
)
from fp8calib.formats.fp8.compressed_tensors import CONFIG_FORMATS
from fp8calib.formats.fp8.quantization_config import StoredScheme
from fp8calib.formats.fp8.weights import WEIGHT_FORMATS
from fp8calib.model.geometry import ModelGeometry
from fp8calib.numerics.schemes import Granularity

MAPPERS = "how a class renames the lists of a config"
"""Of each class: `NO_MAPPER`, or pairs of texts of which the second replaces the first: at the
beginning of a name (`^`), at its end (`$`) or anywhere; `NO_PAIRS` where there are none."""
NO_MAPPER, NO_PAIRS = "none", "-"
_IGNORES_JOINED = "an expression in ignore may match the name of joined projections"
_CLASS_FIRST = "joined projections have the target of their class before that of their names"
_RENAMES_SCALES = ".weight_scale_inv$>.weight_scale"
_RENAMED = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}


class VllmReader(LinearReader):
    """The linears that vLLM creates by a folder's quantization config."""

    joins_names = True

    @classmethod
    def open(cls, release: Release, folder: ScaleFolder, geometry: ModelGeometry) -> VllmReader:
        """Find the config, or refuse it as vLLM does."""
        section = find_quantization(folder, keys=CONFIG_KEYS) or {}
        method = name_method(section, release)
        if method in ("inc", "auto-round"):
            require_auto_round(section, release)
        return cls(folder, section if method else {}, geometry, release)

    def __init__(
        self, folder: ScaleFolder, section: ConfigSection, geometry: ModelGeometry, release: Release
    ) -> None:
        self._mx_form = str(section.get("quant_method", "modelopt"))
        if section.get("quant_method") == "mxfp8" and not section.get("quant_algo"):
            # modelopt.py, ModelOptMxFp8Config.from_config
            listed = {"exclude_modules": list_strings(section, "ignored_layers")}
            nested = {"quant_algo": "MXFP8", **listed}
            section = {"quant_method": "modelopt", "quantization": nested}
        super().__init__(folder, section, geometry, release)
        found = release.find_value(MAPPERS, geometry.architecture)
        self._pairs = [each.split(">") for each in found.split() if ">" in each] if found else None
        self._has_mapper = found not in ("", NO_MAPPER)
        self._named: dict[str, tuple[str, ...]] = {}
        """What entries of lists become."""
        if _RENAMES_SCALES in found.split():
            self.renamed = _RENAMED
        types = release.values[BFLOAT16_TYPES]
        is_half = find_served_dtype(geometry, bfloat16_types=types) == "float16"
        if self.algorithm == "MXFP8" and is_half:
            # run: quantization/modelopt.py (ModelOptMxFp8Config.get_supported_act_dtypes)
            why = "it runs ModelOpt's MXFP8 in bfloat16 alone, and the model is in float16"
            fix = "serve it with --dtype bfloat16, or write it as compressed-tensors"
            raise Refusal(f"{why} (ValueError)", fix=fix)

    def _list_excluded(self) -> list[str]:
        section = self.section
        if self.method == "compressed-tensors":
            return list_strings(section, "ignore")
        if self.method == "fp8":
            ignored = list_strings(section, "ignored_layers")
            return ignored or list_strings(section, "modules_to_not_convert")
        if not self.method.startswith("modelopt"):
            return []
        whole = {"quantization": section} if self.is_nested else section
        return list_strings(section, name_exclusion_list(whole, section, self.release))

    def find_entry(
        self, matches: Callable[[str, str], bool], path: str, entries: Iterable[str]
    ) -> str | None:
        """Find the first entry that matches a linear's path, both as the class renames them."""
        if self._pairs is None:
            return super().find_entry(matches, path, entries)
        own = self._rename(path)
        for entry in entries:
            names = self._named.get(entry)
            if names is None:
                is_tree = entry[-1:] == "*" and entry[-2:] != ".*"
                is_split = is_tree and self._has_mapper and self.method.startswith("modelopt")
                # modelopt.py, apply_vllm_mapper
                trees = (entry[:-1], f"{entry[:-1]}.*") if is_split else (entry,)
                names = self._named[entry] = tuple(map(self._rename, trees))
            if any(matches(each, own) for each in names):
                return entry
        return None

    def _rename(self, name: str) -> str:
        """Rename a name as `WeightsMapper` of the class does; an expression stays as it is."""
        for old, new in () if name.startswith("re:") else self._pairs or ():
            if old.startswith("^"):
                name = f"{new}{name[len(old) - 1 :]}" if name.startswith(old[1:]) else name
            elif old.endswith("$"):
                name = f"{name[: 1 - len(old)]}{new}" if name.endswith(old[:-1]) else name
            else:
                name = name.replace(old, new, 1)
        return name

    def require_judged(self, tensors: Mapping[str, TensorEntry]) -> None:
        """Require that a tied output layer stays unquantized: nothing is stored for it.

        vLLM 0.32.0 models/llama.py and models/transformers/causal.py: the layer is created by the
        config before it takes the embedding's weight. Run with starcoder2, smollm3, gpt_bigcode.
        """
        super().require_judged(tensors)
        heads = [name for name in self.classes if name.rpartition(".")[2] in HEADS]
        created = [each for name in heads for each in self.classes[name]]
        if self.classes and not any(each.state in BY_CONFIG for each in created):
            return
        has_weights = any(each.dtype in WEIGHT_FORMATS for each in tensors.values())
        modules = (name.rpartition(".")[0] for name in tensors)
        if not has_weights or any(path.rpartition(".")[2] in HEADS for path in modules):
            return
        name = created[0].path if created else HEADS[0]
        linear = StoredLinear(module=name, shape=(0, 0), tensors={})
        head = LinearGroup(path=name, kind="head", members=(linear,), state="config", listed=name)
        if not isinstance(self.find_scheme(head), Unquantized):
            why = "the config quantizes the output layer, which is tied: nothing is stored for it"
            raise Unjudged(why)

    def find_scheme(self, group: LinearGroup) -> Found:
        """Find the scheme by which vLLM creates a group."""
        if self.method == "quark" and group.state in BY_CONFIG and group.kind != "head":
            self._require_excluded(group)
        found = super().find_scheme(group)
        if not isinstance(found, StoredScheme):
            return found
        if self.method == "auto-round":
            # which experts the release loads: inc/schemes/, run in 0.32.0
            what = "MXFP8" if found.is_mx else "FP8 in blocks"
            is_read = self.release.has(ACCEPTED, f"experts of {what}")
            if group.kind == "experts" and not is_read:
                why = f"{self.release.title} loads no experts in {what} of auto-round"
                raise Refusal(f"{why} (NotImplementedError)", fix=AUTO_ROUND_FIX)
        elif self.renamed and self.method == "fp8" and found.weights is Granularity.BLOCK:
            # models/mistral3.py: the mapper names scales of blocks as those of tensors; run
            why = "its loader renames weight_scale_inv, and blocks have no other name for scales"
            raise Refusal(f"{why} (ValueError)", fix="write it as compressed-tensors")
        elif found.is_mx:
            self.require_mx(self._mx_form, group.kind, "ValueError")
        elif group.kind == "head" and found.weights is Granularity.BLOCK:
            raise Unjudged("an output layer in blocks, which vLLM may not have")
        return found

    def _require_excluded(self, group: LinearGroup) -> None:
        """Require that a Quark config for the KV cache alone excludes a group.

        vLLM 0.32.0 quantization/quark/quark.py (_find_matched_config), run.
        """
        if isinstance(self.section.get("layer_type_quant_config"), dict):
            return
        entries, path = list_strings(self.section, "exclude"), group.listed
        find = partial(self.find_entry, matches_target, entries=entries)
        is_left_out = find(path) is not None
        if group.kind == "experts":
            is_left_out |= any(entry.startswith(f"{path}.") for entry in entries)
        elif not is_left_out:
            is_left_out = find_for_parts(self.list_parts(group), find) is not None
        if not is_left_out:
            why = f"the Quark config excludes no {path} (AttributeError)"
            raise Refusal(why, fix="exclude it by this name, or export with Quark 0.13")

    def _find_excluded(self, group: LinearGroup) -> str | None:
        """Find the entry of the config's list that excludes a group.

        Of joined projections each is compared, and the whole exactly. ModelOpt's list has names,
        parts of them and globs too.
        """
        is_expert, is_compressed = group.kind == "experts", self.method == "compressed-tensors"
        find_exactly = partial(self.find_entry, operator.eq, entries=self.excluded)
        find_target = partial(self.find_entry, matches_target, entries=self.excluded)
        parts = self._list_first_expert(group) if is_expert else self.list_parts(group)

        def matches(entry: str, path: str) -> bool:
            if is_expert and "experts" in entry and path in entry:  # one of them is enough
                return True
            is_part = entry != path and entry in path
            return self.method != "fp8" and (is_part or fnmatch(path, entry))

        entry = None
        if is_compressed or not is_expert:
            if len(parts) > 1 and not is_expert:
                is_matched = is_compressed and self.release.has(_IGNORES_JOINED)
                entry = (find_target if is_matched else find_exactly)(group.listed)
            entry = entry or find_for_parts(parts, find_target if is_compressed else find_exactly)
        if entry is not None or is_compressed or (self.method == "fp8" and not is_expert):
            return entry
        return self.find_entry(matches, group.listed, self.excluded)

    def _find_compressed(self, group: LinearGroup) -> Found:
        path = group.listed
        if group.kind == "experts":
            parts = self._list_first_expert(group)
            target = self.find_expert_target(path, parts)
            is_renamed = parts[0].endswith(".w1")  # transformers 5 calls it gate_up_proj
            if self._pairs is None and is_renamed and target not in (None, "Linear"):
                raise Unjudged("it is not known how transformers' class names its experts")
        else:
            ways = ("class", "parts") if self.release.has(_CLASS_FIRST) else ("parts", "class")
            parts = self.list_parts(group)
            target = self.find_target(group.kind, path, "path", *ways, parts=parts)
        if target is None:
            return Unquantized(why="no config group has it")
        return read_compressed_group(
            self.targets[target], self.section.get("format"), CONFIG_FORMATS
        )

    def _list_first_expert(self, group: LinearGroup) -> list[str]:
        """List the projections of the first expert, which decide for the layer."""
        parts = self.list_parts(group)
        first = f"{parts[0].rpartition('.')[0]}."
        return [each for each in parts if each.startswith(first)]
