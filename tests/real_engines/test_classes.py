"""The map of classes is what vLLM's classes create."""

from __future__ import annotations

from collections import Counter, defaultdict

from fp8calib.engines.facts.classes import UNBUILT, find_class_map, read_class_facts
from fp8calib.engines.facts.release import VLLM_RUN
from tests.real_engines.class_facts import VllmClasses, run_vllm
from tests.real_engines.package import open_release

_STATES = {"config": "config", "joined": "config", "plain": "none"}
"""What the reader calls a state of the map."""


def test_vllm_builds_the_tiny_models_as_the_map_says() -> None:
    facts = read_class_facts("vllm")[VLLM_RUN.version]
    known = {(fact, architecture) for architecture, own in facts.items() for fact in own}
    seen = {
        (fact, value)
        for fact, values in run_vllm().items()
        for value in values
        if not fact.startswith((UNBUILT, "skipped", "refused"))
    }
    assert seen
    assert seen <= known


def test_what_is_read_of_vllm_never_contradicts_what_was_seen() -> None:
    """The source does not tell all: text models that a config names are not followed.

    Of the linears that are found in both, some are created by the config in one of two branches.
    """
    classes = VllmClasses(open_release(VLLM_RUN))
    counts: Counter[str] = Counter()
    for architecture in read_class_facts("vllm")[VLLM_RUN.version]:
        created = find_class_map("vllm", VLLM_RUN.version, architecture)
        read = classes.read(architecture)
        if created is None or isinstance(read, str):  # transformers' class
            continue
        states: defaultdict[str, set[str]] = defaultdict(set)
        for each in read:
            for path in (each.path, each.prefix):
                states[path].add(each.state)
        for linear in {each for found in created.values() for each in found}:
            if linear.kind in ("linear", "experts", "head") and linear.state in _STATES:
                found = states.get(linear.path) or states.get(linear.parts[0]) or {"not read"}
                wanted = {_STATES[linear.state]}
                is_same = found == wanted
                kind = "same" if is_same else "either" if len(found) > 1 else found.pop()
                counts[kind] += 1
                assert kind in ("same", "either", "maybe", "not read"), (architecture, linear)
    assert counts["same"] > 50 * (counts["either"] + counts["maybe"])
    assert counts["same"] > counts["not read"]
