"""What differs between the releases of an engine: a JSON file for each, beside this module.

`scripts/read-engines` writes the files from the engines' packages. Code asks a release for a fact
by its name, and never compares releases.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8calib.engines.status import Evidence

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Release:
    """One release of an engine, with its patches."""

    engine: str
    """The title of the engine."""
    package: str
    """The name of the Python package whose files are the engine's."""
    version: str
    name: str
    """The version in messages, without a patch."""
    evidence: Evidence
    """How its loading rules are known."""
    key: str
    """The engine's name in the names of files with facts."""
    values: Mapping[str, tuple[str, ...]] = field(repr=False)
    """By fact: the values that hold for this release, those of the oldest facts first."""
    begins: Mapping[str, Mapping[str, str]] = field(repr=False)
    """By fact and value: the name of the first release that has it (`since`)."""

    @property
    def title(self) -> str:
        """Its name in messages."""
        return f"{self.engine} {self.name}"

    def has(self, fact: str, value: str | None = None) -> bool:
        """Tell whether a fact is true of this release: at all, or of a value."""
        values = self.values[fact]
        return bool(values) if value is None else value in values

    def find_value(self, fact: str, key: str) -> str:
        """Find what a fact with values such as `key: value` says of a key; empty without one."""
        pairs = (value.partition(": ") for value in self.values[fact])
        return next((value for name, _, value in pairs if name == key), "")


NO_FACTS = Release(
    engine="", key="", package="", version="", name="", evidence="read", values={}, begins={}
)
"""Those of an engine about which there is no file."""


def parse_version(version: str) -> tuple[int, ...]:
    """Parse the release numbers of a version; empty if it has none, as a commit."""
    match = re.match(r"\d+(?:\.\d+)+(?!.*=)|\d+$", version, re.ASCII)
    return tuple(map(int, match.group().split("."))) if match else ()


def list_spans(written: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], range]]:
    """List the facts of a file, each with the indices of the releases that have it."""
    versions = [each["version"] for each in written["releases"]]
    for each in written["facts"]:
        first = versions.index(each["since"]) if each.get("since") else 0
        after = versions.index(each["until"]) if each.get("until") else len(versions)
        yield each, range(first, after)


def make_releases(written: Mapping[str, Any]) -> tuple[Release, ...]:
    """Make the releases of a file, the oldest first."""
    parts = (each["version"].split(".")[: written["name_parts"]] for each in written["releases"])
    names = [".".join(each) for each in parts]
    begins: dict[str, dict[str, str]] = {each["fact"]: {} for each in written["facts"]}
    true: list[dict[str, tuple[str, ...]]] = [dict.fromkeys(begins, ()) for _ in names]
    for each, span in list_spans(written):
        for value in each.get("values", ("",)):
            begins[each["fact"]].setdefault(value, names[span.start] if each.get("since") else "")
        for index in span:
            true[index][each["fact"]] += tuple(each.get("values", ("",)))
    return tuple(
        Release(
            engine=written["engine"],
            key=written["engine"].lower(),
            package=release["package"],
            version=release["version"],
            name=name,
            evidence=release["evidence"],
            values=values,
            begins=begins,
        )
        for release, name, values in zip(written["releases"], names, true, strict=True)
    )


DEMANDED = "versions of transformers that it demands"
ADDED_ROOTS = "root that the loader of this model type adds to a name without one"
BFLOAT16_TYPES = "served in bfloat16 where the checkpoint is in float16"
QUERY_GPUS = "Triton backend quantizes q on"
OWN_TYPES = "newer types of models whose configs it has itself"
PLACELESS = "attention of this model type has no parameters for KV scales"


NEWER_TYPES: dict[str, str] = {
    name: minor
    for minor, names in json.loads((FOLDER / "transformers_types.json").read_text()).items()
    for name in names
}
"""By type of model: the minor release of transformers that was the first to know it; those that all
releases of the engines know are left out."""


def explain_type(release: Release, model_type: object) -> str:
    """Say why a release does not know a type of model; empty if it does, or if that is unknown."""
    since = NEWER_TYPES.get(str(model_type))
    if since is None or model_type in release.values[OWN_TYPES]:
        return ""
    from packaging.specifiers import SpecifierSet  # noqa: PLC0415 -- `--help` does not need it

    demanded = ", ".join(release.values[DEMANDED])
    allowed = SpecifierSet(demanded)
    # what it allows begins at a minor release, or at a version that it names
    minors = (f"{minor}.0" for minor in NEWER_TYPES.values())
    versions = [*minors, *(each.version for each in allowed)]
    later = [each for each in versions if parse_version(each) >= parse_version(since)]
    if any(map(allowed.contains, later)):
        return ""
    return f"{release.title} demands transformers {demanded}, but {model_type} needs {since}"


VLLM_FACTS = FOLDER / "vllm.json"
SGLANG_FACTS = FOLDER / "sglang.json"
VLLM_RELEASES = make_releases(json.loads(VLLM_FACTS.read_text()))
SGLANG_RELEASES = make_releases(json.loads(SGLANG_FACTS.read_text()))
VLLM_RUN = next(each for each in reversed(VLLM_RELEASES) if each.evidence == "run")
"""The release that was run on a CPU: what facts say was found by running it."""
