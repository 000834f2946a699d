"""The KV scales of a model in the files that an engine opens, and the verdict on each layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from fp8calib.checkpoint.header import TensorEntry
from fp8calib.checkpoint.weight_index import INDEX_NAME
from fp8calib.engines.replay.folder import FoundScale, ScaleFolder
from fp8calib.engines.replay.verdicts import (
    MEASURE_AGAIN,
    EngineReport,
    LayerVerdict,
    LoadVerdict,
    Refusal,
    Slot,
    judge_number,
)
from fp8calib.engines.status import Status
from fp8calib.errors import shorten
from fp8calib.formats.dialect import Spelling
from fp8calib.formats.kv.parse_names import is_of_draft_layer
from fp8calib.model.geometry import KV_ROLES, ModelGeometry, Role
from fp8calib.numerics.arrays import round_number

_NO_SCALES = "the checkpoint has no KV scales: `fp8calib calibrate MODEL --out DIR` measures them"
_UNOPENED_FIX = "list the file in the index, or store the scales in a file that is opened"


class LoadContext:
    """The scales of a model in the files that an engine opens, and the problems found with them."""

    def __init__(self, folder: ScaleFolder, geometry: ModelGeometry, files: Sequence[str]) -> None:
        self.folder = folder
        self.geometry = geometry
        self.tensors: dict[str, TensorEntry] = {}
        """All tensors in the files that the engine opens, by name."""
        for file in files:
            self.tensors |= folder.tensors.get(file, {})
        self.problems: list[str] = []
        self.scales: dict[str, FoundScale] = {}
        self.loaded: dict[Slot, FoundScale] = {}
        drafted: dict[str, FoundScale] = {}
        held = {name: each for file in files for name, each in folder.scales.get(file, {}).items()}
        for name, each in held.items():
            said = each.parsed if geometry.num_draft_layers else None
            is_drafted = said is not None and is_of_draft_layer(geometry, said.path)
            (drafted if is_drafted else self.scales)[name] = each
        known = [(each, each.parsed) for each in self.scales.values()]
        named = [(each, said) for each, said in known if said is not None]
        zero = Spelling.ZERO_POINT
        self.zero_points = [each for each, said in named if said.spelling is zero]
        queries = ((each, said) for each, said in named if said.roles == (Role.Q,))
        self.optional = {
            "q_scale": [each for each, said in queries if said.spelling is not zero],
            "prob_scale": [each for each, said in known if said is None],
        }
        """Scales of q and of attention probabilities, which are noted but not judged."""
        if drafted:
            self.problems.append(
                f"scales of draft layers ({len(drafted)}, such as {next(iter(drafted.values()))}) "
                "belong to the draft model of speculative decoding"
            )
        self._meant = match_to_layers(geometry, self.scales.values())
        self._elsewhere = match_to_layers(
            geometry, (stored for file in folder.scales.values() for stored in file.values())
        )

    def report(self, layers: Iterable[LayerVerdict], *, unread: str = "") -> EngineReport:
        """Report the verdicts, and each problem once.

        `unread` says that the engine ignores the optional scales; empty if it does not.
        """
        if unread:
            self.problems += (
                f"{what} ({len(found)}, such as {found[0]}): {unread}"
                for what, found in self.optional.items()
                if found
            )
        return EngineReport(layers=tuple(layers), problems=tuple(dict.fromkeys(self.problems)))

    def load(self, find_slot: Callable[[str], Slot | None]) -> None:
        """Assign each scale to a layer by the engine's rules for names; the last one wins."""
        loaded = self.loaded
        for name, stored in sorted(self.scales.items()):
            slot = find_slot(name)
            if slot is None:
                continue
            if slot in loaded and loaded[slot].values != stored.values:
                self.problems.append(
                    f"{loaded[slot]} and {stored} have the same target; one is lost"
                )
            loaded[slot] = stored

    def judge_absent(
        self, slot: Slot, why: str, fix: str, *, value: float | None = 1.0
    ) -> LoadVerdict:
        """Judge a slot that got no scale, by whether the folder has one for it.

        `value` is what the engine multiplies by instead; `why` and `fix` are for a scale that it
        opened and ignores.
        """
        status = Status.DEFAULTED if value == 1.0 else Status.MISREAD
        if slot in self._meant:
            status, why = Status.DROPPED, f"{self._meant[slot]}: {why}"
        elif slot in self._elsewhere:
            status = Status.DEFAULTED if value == 1.0 else Status.DROPPED
            why = f"{self._elsewhere[slot]} is not opened, so the engine finds no scale"
            fix = _UNOPENED_FIX
        else:
            why = f"the checkpoint has no {slot[1]}_scale for this layer"
            fix = MEASURE_AGAIN if self._meant or self._elsewhere else _NO_SCALES
        return LoadVerdict(status=status, value=value, why=why, fix=fix)

    def judge_pair(
        self,
        index: int,
        engine: str,
        absent: tuple[str, str],
        *,
        dtype: str = "float32",
        zero_is_unset: bool = False,
    ) -> LayerVerdict:
        """Judge the loaded k and v of a layer by what `BaseKVCacheMethod` makes of them.

        A scale that was not loaded is -1.0 (vLLM 0.32.0 `quantization/kv_cache.py`, run; SGLang
        0.5.23 `srt/layers/quantization/kv_cache.py`, read: there two zeros count as not loaded).
        `absent` says why the engine ignores scales that it opened, and what to do about that;
        `dtype` is that of the parameters.
        """
        slots = [(index, role) for role in KV_ROLES]
        stored = [self.loaded.get(slot) for slot in slots]
        exact = [-1.0 if each is None else require_scalar(each, engine) for each in stored]
        k, v = numbers = [round_number(value, dtype) for value in exact]
        if any(a != b and not math.isnan(a) for a, b in zip(exact, numbers, strict=True)):
            self.problems.append(f"scales are rounded to the model's {dtype}")
        if all(each < 0 or (each == 0 and zero_is_unset) for each in numbers):
            unset = []
            for slot, held, number in zip(slots, stored, numbers, strict=True):
                if held is None:
                    unset.append(self.judge_absent(slot, *absent))
                    continue
                why = f"{held} is {number:g}, which {engine} treats as not loaded, so it uses 1.0"
                verdict = LoadVerdict(
                    status=Status.DEFAULTED, value=1.0, why=why, fix=MEASURE_AGAIN
                )
                unset.append(verdict)
            return LayerVerdict(layer=index, k=unset[0], v=unset[1])
        said_k, said_v = (
            f"{role} has no scale" if held is None else f"{role} is {number:g}"
            for role, held, number in zip(KV_ROLES, stored, numbers, strict=True)
        )
        if not k > 0:
            why = f"layer {index}: {engine} asserts k_scale > 0 and fails: {said_k}, {said_v}"
            raise Refusal(why, fix=MEASURE_AGAIN)
        own_k = judge_number(k, str(stored[0]))
        if v > 0:
            own_v = judge_number(v, str(stored[1]))
        elif stored[1] is None and stored[0] is not None and stored[0].name.endswith(".kv_scale"):
            own_v = own_k
        else:  # the engine copies k's number
            why = f"{said_v}, so {engine} uses k_scale's number"
            own_v = LoadVerdict(
                status=Status.MISREAD, value=own_k.value, why=why, fix=MEASURE_AGAIN
            )
        return LayerVerdict(layer=index, k=own_k, v=own_v)


def require_scalar(stored: FoundScale, engine: str) -> float:
    """Return the number of a per-tensor scale; refuse one with more elements, or none."""
    if len(stored.values) != 1:
        why = f"{stored} has shape {list(stored.shape)}, and {engine} loads one number"
        raise Refusal(why, fix="store one number for the layer (kv-overlay, not kv-overlay-head)")
    return stored.values[0]


def open_indexed(folder: ScaleFolder, geometry: ModelGeometry, *, error: str) -> LoadContext:
    """Open the files that the index names, or all where there is none, as vLLM and SGLang do.

    A missing or damaged file is refused; `error` is what the engine raises at a missing one.
    """
    files, index = list(folder.files), folder.index
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    is_map = isinstance(weight_map, dict) and all(isinstance(e, str) for e in weight_map.values())
    listed = set((folder.indexed or {}).values()) if folder.has_index else set(files)
    missing = sorted(listed.difference(files))
    files = [file for file in files if file in listed]
    why = next((folder.faults[file] for file in files if file in folder.faults), "")
    fix = "download or write the file again"
    if folder.has_index and not is_map:
        why, fix = f"{INDEX_NAME} has no weight_map of names to files", "write the index again"
    elif missing:
        shown = ", ".join(map(shorten, missing[:3]))
        why = f"the index names files that are missing ({shown}): {error}"
        fix = "complete the download, or remove them from the index"
    elif not files:
        why = f"there are no safetensors weights to load ({len(folder.files)} files)"
        fix = "download the weights, or convert them to safetensors"
    if why:
        raise Refusal(why, fix=fix)
    return LoadContext(folder, geometry, files)


def match_to_layers(
    geometry: ModelGeometry, scales: Iterable[FoundScale]
) -> dict[Slot, FoundScale]:
    """Match scales to layers by name, in any tool's spelling; the first of several wins."""
    owners = {
        spelling: layer.index
        for layer, attention in geometry.attentions()
        for path in (attention.module, attention.checkpoint_module)
        for spelling in (path, f"{path}.attn")
    }
    meant: dict[Slot, FoundScale] = {}
    for stored in scales:
        parsed = stored.parsed
        if parsed is None or parsed.path not in owners or parsed.spelling is Spelling.ZERO_POINT:
            continue
        for role in parsed.roles:
            meant.setdefault((owners[parsed.path], role), stored)
    return meant
