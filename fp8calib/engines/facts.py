"""What differs between the releases of an engine, in one notation.

Code asks a release for a fact by its name. Releases are compared here alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import total_ordering

from fp8calib.engines.evidence import Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Something that is true of some releases."""

    name: str
    value: object = True
    since: str = ""
    """The first release of which it is true; empty where that is older than all known ones."""
    until: str = ""
    """The first release of which it is true no longer; empty where it is true of the newest."""
    source: str = ""
    """The file and the symbol that show it."""
    how: Evidence = Evidence.READ


@total_ordering
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Release:
    """One release of an engine, with its patches."""

    engine: str
    """The title of the engine."""
    version: str
    name: str
    """The version in messages, without a patch."""
    evidence: Evidence = Evidence.LOADER
    """How its loading rules are known."""
    facts: tuple[Fact, ...] = field(repr=False)
    """Those of all releases."""

    @property
    def title(self) -> str:
        """Its name in messages."""
        return f"{self.engine} {self.name}"

    def has(self, fact: str) -> bool:
        """Tell whether a fact is true of this release."""
        return any(self._list_true(fact))

    def list_values(self, fact: str) -> tuple[str, ...]:
        """List the values of a fact that are true of this release."""
        return tuple(str(each.value) for each in self._list_true(fact))

    def find(self, fact: str) -> str:
        """Give the one value of a fact in this release; empty without one."""
        return next(iter(self.list_values(fact)), "")

    def _list_true(self, name: str) -> list[Fact]:
        named = [each for each in self.facts if each.name == name]
        if not named:
            raise KeyError(f"{self.engine} has no fact {name}")
        return [each for each in named if self._holds(each)]

    def _holds(self, fact: Fact) -> bool:
        own = parse_version(self.version)
        return parse_version(fact.since) <= own and (
            not fact.until or own < parse_version(fact.until)
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Release) and self._key == other._key

    def __lt__(self, other: Release) -> bool:
        return self._key < other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[str, tuple[int, ...]]:
        return self.engine, parse_version(self.version)


def parse_version(version: str) -> tuple[int, ...]:
    """Parse the release numbers of a version; empty where it has none, as a commit."""
    match = re.match(r"\d+(?:\.\d+)+(?!.*=)|\d+$", version, re.ASCII)
    return tuple(map(int, match.group().split("."))) if match else ()


def make_releases(
    engine: str, versions: Iterable[tuple[str, Evidence]], facts: tuple[Fact, ...], *, parts: int
) -> tuple[Release, ...]:
    """Make the releases of an engine, the oldest first.

    Args:
        engine: its title.
        versions: with how the loading rules of each are known.
        facts: of all of them.
        parts: how many parts of a version are in its name.
    """
    return tuple(
        Release(
            engine=engine,
            version=version,
            name=".".join(version.split(".")[:parts]),
            evidence=evidence,
            facts=facts,
        )
        for version, evidence in versions
    )
