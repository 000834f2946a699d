"""What is decided together, and between what: linears that engines join, and caches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.planning.arrays import Plan

IN_16_BITS = "16 bits"
"""The name of the choice that quantizes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One way to store a group."""

    name: str
    """A scheme, a type of the KV cache, or `IN_16_BITS`."""
    size_bytes: int
    """Of the weights with their scales, or of the cache of the tokens that are counted."""
    emulation: Candidate = field(default_factory=Candidate)
    """Of this group alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Linears that engines load as one, or caches that are quantized together."""

    name: str
    layers: tuple[int, ...]
    """The indices of the decoder layers that it is in."""
    linears: tuple[str, ...] = ()
    """As the checkpoint names them; empty for a cache."""
    choices: tuple[Choice, ...]
    """The first one leaves it unquantized."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Why other schemes or types are no choices."""

    @property
    def is_cache(self) -> bool:
        """Whether it is a KV cache."""
        return not self.linears

    def find(self, name: str) -> int:
        """Find a choice by its name; that in 16 bits where there is none."""
        return next((i for i, each in enumerate(self.choices) if each.name == name), 0)


def join_emulations(parts: Iterable[Candidate]) -> Candidate:
    """Join the emulations of several groups."""
    found = list(parts)
    return Candidate(
        quantizers={site: each for part in found for site, each in part.quantizers.items()},
        weights=tuple(change for part in found for change in part.weights),
        reads={module: each for part in found for module, each in part.reads.items()},
    )


def emulate_plan(groups: Sequence[Group], plan: Plan) -> Candidate:
    """Emulate the choices of all groups."""
    pairs = zip(groups, plan, strict=True)
    return join_emulations(group.choices[choice].emulation for group, choice in pairs)


def alone(groups: Sequence[Group], group: int, choice: int) -> Plan:
    """Give the plan that changes one group."""
    return tuple(choice if index == group else 0 for index in range(len(groups)))


def count_bytes(groups: Sequence[Group], plan: Plan) -> int:
    """Count the bytes of all groups."""
    return sum(g.choices[choice].size_bytes for g, choice in zip(groups, plan, strict=True))


def list_uniform(groups: Sequence[Group], *, caches: Sequence[str]) -> dict[str, Plan]:
    """List the plans with one scheme for all linears that can have it, without and with caches.

    A scheme that a group cannot have leaves it in 16 bits.
    """
    schemes = {c.name: None for g in groups if not g.is_cache for c in g.choices[1:]}
    found: dict[str, Plan] = {}
    for scheme in (IN_16_BITS, *schemes):
        for cache in (IN_16_BITS, *caches):
            plan = tuple(g.find(cache if g.is_cache else scheme) for g in groups)
            named = [name for name in (scheme, cache) if name != IN_16_BITS]
            if named:
                found[
                    ", cache ".join(named)
                    if len(named) > 1 or cache == IN_16_BITS
                    else f"cache {cache}"
                ] = plan
    return found
