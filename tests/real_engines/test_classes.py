"""The map of classes is what vLLM's classes create."""

from collections import Counter
from collections.abc import Iterator

from fp8calib.engines.facts.classes import UNBUILT, CreatedLinear, find_class_map, read_class_facts
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


def test_no_linear_is_read_in_another_state_than_it_was_seen_in() -> None:
    """More than half of vLLM's linears and heads are found under the path at which they were seen.

    The others are of a drafter, of a class that a config names, or renamed by a loader.
    """
    classes = VllmClasses(open_release(VLLM_RUN))
    counts: Counter[str] = Counter()
    for architecture in read_class_facts("vllm")[VLLM_RUN.version]:
        own = classes.read(architecture)
        for linear in (
            [] if isinstance(own, str) else _list_created(architecture)
        ):  # or transformers'
            names = {linear.path, linear.parts[0]}
            found = {each.state for each in own if {each.path, each.prefix} & names}
            state = _STATES[linear.state]
            if found != {state}:  # one of two branches, or what is not known of the config
                assert found <= {"maybe", "config", "none"}
            (read,) = found if len(found) == 1 else ("either" if found else "elsewhere",)
            counts["same" if read == state else read] += 1
    assert counts["same"] > 0.55 * counts.total()
    assert counts["same"] > 50 * counts["either"]
    assert counts["same"] > 25 * counts["maybe"]  # Siglip's by sizes, for one
    assert not {"config", "none"} & counts.keys()


def _list_created(architecture: str) -> Iterator[CreatedLinear]:
    """List the linears, experts and heads of the map."""
    created = find_class_map(VLLM_RUN, architecture)
    for linear in {each for found in created.values() for each in found}:
        if linear.kind in ("linear", "experts", "head") and linear.state in _STATES:
            yield linear
