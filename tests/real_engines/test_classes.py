"""The map of classes is what vLLM's classes create."""

from __future__ import annotations

import json

from fp8calib.engines.facts.classes import UNBUILT
from fp8calib.engines.facts.release import VLLM_RUN
from tests.real_engines.class_facts import VLLM_CLASSES, run_vllm


def test_vllm_builds_the_tiny_models_as_the_map_says() -> None:
    written = json.loads(VLLM_CLASSES.read_text())
    versions = [each["version"] for each in written["releases"]]
    place = versions.index(VLLM_RUN.version)
    known = {
        (entry["fact"], value)
        for entry in written["facts"]
        if (versions.index(entry["since"]) if entry["since"] else 0) <= place
        and (versions.index(entry["until"]) if entry["until"] else len(versions)) > place
        for value in entry["values"]
    }
    seen = {
        (fact, value)
        for fact, values in run_vllm().items()
        for value in values
        if not fact.startswith((UNBUILT, "skipped", "refused"))
    }
    assert seen
    assert seen <= known
