"""The map of classes is what vLLM's classes create."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from fp8calib.engines.facts.classes import (
    DRAFTER,
    UNBUILT,
    CreatedLinear,
    find_class_map,
    read_class_facts,
)
from fp8calib.engines.facts.release import VLLM_RUN
from tests.real_engines.class_facts import VllmClasses, run_vllm
from tests.real_engines.class_reader import ReadLinear
from tests.real_engines.package import open_release

_STATES = {"config": "config", "joined": "config", "plain": "none"}
"""What the reader calls a state of the map."""
_NOT_FOLLOWED = {
    r"(DeepseekV2|AXK1|LongcatFlash)ForCausalLM .*(kv_a_proj_with_mqa|q_b_proj|kv_b_proj)$": (
        "the class of the attention is a variable"
    ),
    r"DeepSeekMTPModel .*(kv_a_proj_with_mqa|q_b_proj|kv_b_proj)$": "the same in its layer",
    r"\S+ .*\.router(\.layer)?$": "the loader renames it to `gate`",
    r"Aria\S+ .*\.cross_attn\.": "a class of transformers",
    r"(Qwen2\S*|Exaone4_5_\S+) .*\.merger\.mlp\.\*$": "items of a list, which has no prefix",
    r"Zamba2\S+ ": "blocks that layers share; the loader renames `mamba`, and numbers adapters",
    r"KimiLinear\S+ .*v_conv1d$": "three tensors that the class joins while it loads them",
    r"MuseGlimmer\S+ .*vision_": "the loader has a table of other names",
    r"Inkling\S+ .*unembed$": "the same",
    r"MossTranscribe\S+ .*vq_adaptor\.": "items of a Sequential",
}
"""What the reader does not follow in the source, with its reason, by architecture and tensor."""


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


def test_every_difference_between_what_is_read_and_what_was_seen_is_explained() -> None:
    """Of vLLM's linears and heads two thirds are read in the state in which they were seen.

    A linear of a drafter is compared in the drafter's class. The classes of text models and towers
    that a config names are not followed: another class has that linear in that state. A loader
    renames tensors: the class has a linear of that name in that state, under another path.
    """
    classes = VllmClasses(open_release(VLLM_RUN))
    facts = read_class_facts("vllm")[VLLM_RUN.version]
    read = {
        architecture: found
        for architecture in facts
        if not isinstance(found := classes.read(architecture), str)  # else transformers' class
    }
    anywhere = {each for found in read.values() for each in _list_tails(found)}
    counts: Counter[str] = Counter()
    unexplained, used = [], set()
    for architecture, linear in _list_created(read):
        state = _STATES[linear.state]
        own, names = read[architecture], (linear.path, *linear.parts)
        found = {each.state for each in own if {each.path, each.prefix} & set(names[:2])}
        ends = {name.rpartition(".")[2] for name in names}
        label = f"{architecture} {linear.parts[-1]}"
        pattern = next((each for each in _NOT_FOLLOWED if re.match(each, label)), "")
        if found == {state}:
            counts["same"] += 1
        elif found:  # one of two branches, or what is not known of the config
            assert found <= {"maybe", "config", "none"}
            counts["either"] += 1
        elif _is_drafted(facts[architecture], linear):
            counts["drafter"] += 1
        elif "Conditional" in architecture and any(
            (_cut(name), state) in anywhere for name in names
        ):
            counts["named by the config"] += 1
        elif any(each.path.rpartition(".")[2] in ends and each.state == state for each in own):
            counts["renamed"] += 1
        elif pattern:
            used.add(pattern)
        else:
            unexplained.append(label)
    assert not unexplained
    assert used == set(_NOT_FOLLOWED)
    assert counts["same"] > 0.6 * (counts.total() + len(used))
    assert counts["same"] > 50 * counts["either"]


def _list_created(
    architectures: Iterable[str],
) -> Iterator[tuple[str, CreatedLinear]]:
    """List the linears, experts and heads of the map."""
    for architecture in architectures:
        created = find_class_map("vllm", VLLM_RUN.version, architecture) or {}
        for linear in {each for found in created.values() for each in found}:
            if linear.kind in ("linear", "experts", "head") and linear.state in _STATES:
                yield architecture, linear


def _list_tails(read: Iterable[ReadLinear]) -> Iterator[tuple[str, str]]:
    for each in read:
        yield from ((_cut(name), each.state) for name in (each.path, each.prefix))


def _cut(path: str) -> str:
    """Cut off what a model puts before the layers of its parts, and before its head."""
    return re.sub(r"^.*?(?=(layers|blocks)\.\*|lm_head)", "", path)


def _is_drafted(facts: Iterable[str], linear: CreatedLinear) -> bool:
    drafters = (each.removeprefix(DRAFTER) for each in facts if each.startswith(DRAFTER))
    maps = (find_class_map("vllm", VLLM_RUN.version, each) or {} for each in drafters)
    return any(part in each for each in maps for part in linear.parts)
