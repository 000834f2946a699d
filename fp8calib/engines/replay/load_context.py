"""The scales of a model in the files that an engine opens, and verdicts on those it lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from fp8calib.checkpoint.header import TensorEntry
from fp8calib.checkpoint.weight_index import INDEX_NAME
from fp8calib.engines.replay.folder import FoundScale, ScaleFolder
from fp8calib.engines.replay.verdicts import (
    MEASURE_AGAIN,
    EngineReport,
    LayerVerdict,
    LoadVerdict,
    Refusal,
)
from fp8calib.engines.status import Status
from fp8calib.errors import shorten
from fp8calib.formats.dialect import Spelling
from fp8calib.formats.kv.parse_names import (
    ScaleName,
    is_of_draft_layer,
    is_probability_scale,
    parse_name,
)
from fp8calib.model.shapes import KV_ROLES, ModelGeometry, Role

Slot = tuple[int, Role]
"""The k or the v of a layer: its index, and the role."""

_NO_SCALES = "the checkpoint has no KV scales: `fp8calib calibrate MODEL --out DIR` measures them"


def find_indexed(folder: ScaleFolder, *, error: str) -> list[str]:
    """List the files that the index names, as vLLM, SGLang and transformers do.

    Raises:
        Refusal: the index is malformed, or names a file that is missing.
    """
    index = folder.index
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        raise Refusal(
            f"{INDEX_NAME} has no weight_map of names to files", fix="write the index again"
        )
    listed = set((folder.indexed or {}).values())
    missing = sorted(listed.difference(folder.files))
    if missing:
        shown = ", ".join(map(shorten, missing[:3]))
        why = f"the index names files that are missing ({shown}): {error}"
        raise Refusal(why, fix="complete the download, or remove them from the index")
    return [file for file in folder.files if file in listed]


def require_readable(folder: ScaleFolder, files: Sequence[str]) -> None:
    """Refuse a folder without weight files, or with a damaged one among those the engine opens.

    Raises:
        Refusal: naming the file.
    """
    if not files:
        why = f"there are no safetensors weights to load ({len(folder.files)} files)"
        raise Refusal(why, fix="download the weights, or convert them to safetensors")
    for file in files:
        if file in folder.faults:
            raise Refusal(folder.faults[file], fix="download or write the file again")


class LoadContext:
    """The scales of a model in the files that an engine opens, and the problems found with them."""

    def __init__(self, folder: ScaleFolder, geometry: ModelGeometry, files: Sequence[str]) -> None:
        self.folder = folder
        self.geometry = geometry
        self.files = tuple(files)
        stored = {
            name: each for file in files for name, each in folder.scales.get(file, {}).items()
        }
        drafted = [each for name, each in stored.items() if _is_of_draft_layer(geometry, name)]
        for each in drafted:
            del stored[each.name]
        self.scales = stored
        self.problems: list[str] = []
        if drafted:
            self.problems.append(
                f"scales of draft layers ({len(drafted)}, such as {drafted[0]}) belong to the "
                "draft model of speculative decoding"
            )
        self._meant = match_to_layers(geometry, self.scales.values())
        self._elsewhere = match_to_layers(
            geometry, (stored for file in folder.scales.values() for stored in file.values())
        )

    @property
    def tensors(self) -> dict[str, TensorEntry]:
        """All tensors in the files that the engine opens, by name."""
        stored = (self.folder.tensors.get(file, {}) for file in self.files)
        return {name: entry for tensors in stored for name, entry in tensors.items()}

    def report(self, layers: Iterable[LayerVerdict]) -> EngineReport:
        """Report the verdicts, and each problem once."""
        return EngineReport(layers=tuple(layers), problems=tuple(dict.fromkeys(self.problems)))

    def load(self, find_slot: Callable[[str], Slot | None]) -> dict[Slot, FoundScale]:
        """Assign each scale to a layer by the engine's rules for names; the last one wins."""
        loaded: dict[Slot, FoundScale] = {}
        for name, stored in sorted(self.scales.items()):
            slot = find_slot(name)
            if slot is None:
                continue
            if slot in loaded and loaded[slot].values != stored.values:
                self.problems.append(
                    f"{loaded[slot]} and {stored} have the same target; one is lost"
                )
            loaded[slot] = stored
        return loaded

    def list_queries(self) -> list[FoundScale]:
        """List the scales of q, which are noted but not judged."""
        return [
            stored
            for stored, parsed in self._list_parsed()
            if parsed.roles == (Role.Q,) and parsed.spelling is not Spelling.ZERO_POINT
        ]

    def list_zero_points(self) -> list[FoundScale]:
        """List the zero points of q, k and v."""
        found = self._list_parsed()
        return [stored for stored, parsed in found if parsed.spelling is Spelling.ZERO_POINT]

    def _list_parsed(self) -> Iterator[tuple[FoundScale, ScaleName]]:
        for name, stored in self.scales.items():
            if (parsed := parse_name(name)) is not None:
                yield stored, parsed

    def list_optional_scales(self) -> tuple[tuple[str, list[FoundScale]], ...]:
        """List the scales of q and of attention probabilities, each kind with its name."""
        probabilities = [each for name, each in self.scales.items() if is_probability_scale(name)]
        return ("q_scale", self.list_queries()), ("prob_scale", probabilities)

    def note_unread(self, why: str) -> None:
        """Note that the engine ignores these scales, where there are any."""
        for what, found in self.list_optional_scales():
            if found:
                self.problems.append(f"{what} ({len(found)}, such as {found[0]}): {why}")

    def judge_absent_layer(self, index: int, *, why: str, fix: str) -> LayerVerdict:
        """Judge a layer that got neither a k nor a v scale; arguments as for `judge_absent`."""
        k, v = (self.judge_absent((index, role), why=why, fix=fix) for role in KV_ROLES)
        return LayerVerdict(layer=index, k=k, v=v)

    def judge_absent(
        self, slot: Slot, *, value: float | None = 1.0, why: str, fix: str
    ) -> LoadVerdict:
        """Judge a slot that got no scale, by whether the folder has one for it.

        Args:
            slot: the layer's k or v.
            value: what the engine multiplies by instead.
            why: why the engine ignores a scale that it opened.
            fix: what to do about that.
        """
        if slot in self._meant:
            text = f"{self._meant[slot]}: {why}"
            return LoadVerdict(status=Status.DROPPED, value=value, why=text, fix=fix)
        if slot in self._elsewhere:
            status = Status.DEFAULTED if value == 1.0 else Status.DROPPED
            text = f"{self._elsewhere[slot]} is not opened, so the engine finds no scale"
            fix = "list the file in the index, or store the scales in a file that is opened"
            return LoadVerdict(status=status, value=value, why=text, fix=fix)
        status = Status.DEFAULTED if value == 1.0 else Status.MISREAD
        text = f"the checkpoint has no {slot[1]}_scale for this layer"
        fix = MEASURE_AGAIN if self._meant or self._elsewhere else _NO_SCALES
        return LoadVerdict(status=status, value=value, why=text, fix=fix)


def open_indexed(folder: ScaleFolder, geometry: ModelGeometry, *, error: str) -> LoadContext:
    """Open the files that the index names, or all where there is none, as vLLM and SGLang do.

    Raises:
        Refusal: a file is missing or damaged; `error` is what the engine raises at a missing one.
    """
    files = find_indexed(folder, error=error) if folder.has_index else folder.files
    require_readable(folder, files)
    return LoadContext(folder, geometry, files)


def _is_of_draft_layer(geometry: ModelGeometry, name: str) -> bool:
    parsed = parse_name(name) if geometry.num_draft_layers else None
    return parsed is not None and is_of_draft_layer(geometry, parsed.path)


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
        parsed = parse_name(stored.name)
        if parsed is None or parsed.path not in owners or parsed.spelling is Spelling.ZERO_POINT:
            continue
        for role in parsed.roles:
            meant.setdefault((owners[parsed.path], role), stored)
    return meant
