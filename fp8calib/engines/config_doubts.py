"""What vLLM and SGLang may refuse of a config.json, and where they may run another class."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fp8calib.engines.registry import find_replayed
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.verdicts import Reports, report_unknown
from fp8calib.engines.vllm.replay import names_base
from fp8calib.errors import shorten
from fp8calib.model.drafters import find_drafter_class
from fp8calib.model.plain_model import is_plain
from fp8calib.model.shapes import ModelGeometry

_CLASS = re.compile("Model$|For[A-Z]")
_BY_CLASS = ("vllm", "vllm-cpu", "sglang")
"""Engines that choose the class of a model by its name in config.json."""


def doubt_configs(reports: Reports, model: ScaleFolder, geometry: ModelGeometry) -> Reports:
    """Say what of the configs vLLM and SGLang may refuse, and where they may run another class.

    vLLM 0.32.0 refused the config of a Llama that named another class or none, or loaded it without
    its output layer. SGLang was read (0.5.23, `model_loader/utils.py`).
    """
    if "auto_map" in model.config:
        return reports
    engines = dict(reports)
    refused, faults = _find_faults(model)
    for key, engine in ((key, find_replayed(key)) for key in reports):
        if engine.name not in _BY_CLASS:
            continue
        is_drafter = find_drafter_class(model.config)
        hint = "" if is_drafter else engine.spell_run_hint(model.config)
        why = f"transformers refuses config.json: {refused}" if refused else ""
        if engine.name == "sglang" or not names_base(model.config, geometry):
            why = why or _find_other_class(model.config, geometry)
        if why:
            engines[key] = engines[key].give_names(report_unknown(geometry, f"{why}{hint}"))
        engines[key] = engines[key].doubt(*(f"{fault}{hint}" for fault in faults))
    return engines


def _find_faults(model: ScaleFolder) -> tuple[str, list[str]]:
    """Say why transformers refuses a config.json, else empty, and list the other faults."""
    if is_plain(model.path, model.config):
        return "", []
    from fp8calib.model.config_faults import (  # noqa: PLC0415 -- imports transformers
        find_config_fault,
        list_other_faults,
    )

    refused = find_config_fault(model.config)
    found = list_other_faults(model.path, model.config, is_refused=bool(refused))
    return refused, [*filter(None, found)]


def _find_other_class(config: Mapping[str, object], geometry: ModelGeometry) -> str:
    """Say why a config may not be of the class that was compared; empty where it is."""
    found = config.get("architectures")
    names = found if isinstance(found, list) and found else [found]
    # vLLM 0.32.0 skips "Foo", but not "FooModel", before the class
    first = next((each for each in names if _CLASS.search(str(each))), names[0])
    if first == geometry.architecture:
        return ""
    from fp8calib.model.config_faults import wraps_text  # noqa: PLC0415 -- imports transformers

    if wraps_text(first, config):
        return ""
    if drafter := find_drafter_class(config):
        return (
            f"it is a drafter (class {shorten(drafter)}), which the engine loads beside the model "
            "that it drafts for"
        )
    named = shorten(str(first)) if first else "none"
    return f"config.json names the class {named}, not {geometry.architecture}"
