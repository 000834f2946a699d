"""Which linears the model classes of an engine create: one JSON file an engine, as other facts.

A fact is a text, and its values are the architectures for which it is true:

    config linear model.layers.*.self_attn.qkv_proj: .q_proj .k_proj .v_proj

This linear is created by the quantization config, which calls it `...qkv_proj`, out of three of the
checkpoint's. `*` stands for a number.

    reads block_dim

This field of config.json is read without a default, and transformers' config class sets none.

    drafter Qwen3NextMTP

This class runs the drafter in the model's checkpoint; its linears are facts of its own.

    untied

The output layer is one of its own, whatever `tie_word_embeddings` says.
`scripts/read-engines` writes the files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from fp8calib.engines.facts.release import FOLDER, Release, list_spans

_NUMBER = re.compile(r"(?<![^.])\d+(?=\.|$)")
UNBUILT = "unbuilt: "
"""How facts begin that say why nothing is known about a class."""
READS = "reads "
"""How facts begin about fields of config.json that have no default."""
DRAFTER = "drafter "
"""How facts begin about the classes of drafters."""
UNTIED = "untied"
"""The fact about classes whose output layer is one of its own, whatever the config ties."""
_LACKING = re.compile(rf"{UNBUILT}AttributeError: '\w+Config' object has no attribute '(\w+)'")
"""What is read of a class that cannot be built from the defaults of transformers' config."""
OTHERS = (UNBUILT, READS, DRAFTER, UNTIED)
"""How facts begin that are not about linears."""

BY_CONFIG = ("config", "joined")
"""States of linears that the engine's class creates by the quantization config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatedLinear:
    """A linear of a class, or what else a class does with a matrix of the checkpoint."""

    state: str
    """`config`: created by the quantization config, whose lists may name the parts. `joined`: so
    too, but the lists have to name the joined linear. `plain`: created without the config.
    `skipped`: the loader leaves the matrix out. `refused`: it stops. `maybe`: not known."""
    kind: str
    """linear, experts, head, embedding or other."""
    path: str
    """What the lists of a config call it, in the checkpoint's spelling where that is the same; `#`
    stands for another number than the layer's."""
    parts: tuple[str, ...]
    """The paths of the checkpoint's linears that it is filled from, in order."""

    @classmethod
    def parse(cls, fact: str) -> CreatedLinear:
        """Read the text of one."""
        head, _, tail = fact.partition(": ")
        state, kind, path = head.split(" ")
        parent = path.rpartition(".")[0]
        parts = [f"{parent}{each}" if each.startswith(".") else each for each in tail.split()]
        return cls(state=state, kind=kind, path=path, parts=tuple(parts or [path]))


ClassMap = Mapping[str, tuple[CreatedLinear, ...]]
"""By the checkpoint's path of a linear, with `*` for numbers: what it may become."""


def make_pattern(path: str) -> str:
    """Replace the numbers in a path."""
    return _NUMBER.sub("*", path)


def list_numbers(path: str) -> tuple[str, ...]:
    """List the numbers in a path."""
    return tuple(_NUMBER.findall(path))


def fill_pattern(pattern: str, path: str) -> str:
    """Replace the stars of a pattern by the numbers of a path, in order."""
    numbers = iter(list_numbers(path))
    return re.sub(r"\*", lambda _: next(numbers, "*"), pattern)


@cache
def find_class_map(release: Release, architecture: str) -> ClassMap:
    """Find what the class of an architecture creates; empty if that is not known.

    What its layers have is said of the layers of its drafter too.
    """
    found: dict[str, tuple[CreatedLinear, ...]] = {}
    facts = read_class_facts(release.key)[release.version].get(architecture, ())
    for fact in facts:
        if not fact.startswith(OTHERS):
            created = CreatedLinear.parse(fact)
            for part in created.parts:
                found[part] = (*found.get(part, ()), created)
    for fact in facts if found else ():
        if fact.startswith(DRAFTER):
            found = {**find_class_map(release, fact.removeprefix(DRAFTER)), **found}
    return found


def list_read_fields(release: Release, architecture: str) -> list[str]:
    """List the fields of config.json without which the class of an architecture is not built."""
    facts = read_class_facts(release.key)[release.version].get(architecture, ())
    fields = [each.removeprefix(READS) for each in facts if each.startswith(READS)]
    if architecture.endswith("ForCausalLM"):  # of others a tower's config may lack it
        fields += [found[1] for each in facts if (found := _LACKING.match(each))]
    return fields


@cache
def read_class_facts(engine: str) -> Mapping[str, Mapping[str, list[str]]]:
    """Read the file of an engine: the facts by release and architecture."""
    written = json.loads((FOLDER / f"{engine}_classes.json").read_text())
    versions = [each["version"] for each in written["releases"]]
    facts: dict[str, dict[str, list[str]]] = {version: {} for version in versions}
    for entry, span in list_spans(written):
        for version in versions[span.start : span.stop]:
            for architecture in entry["values"]:
                facts[version].setdefault(architecture, []).append(entry["fact"])
    return facts
