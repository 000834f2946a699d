"""Sites: the places in a model where tensors are observed or scaled."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What the tensor at a site is."""

    K = "k"
    V = "v"
    Q = "q"
    P = "p"
    """The probabilities of attention."""
    INPUT = "input"
    WEIGHT = "weight"


KV_ROLES = (Role.K, Role.V)


@dataclass(frozen=True, slots=True, order=True)
class Site:
    """A module's path in the model and the role of the tensor there."""

    module: str
    role: Role

    def __str__(self) -> str:
        return f"{self.module}.{self.role}"

    @classmethod
    def parse(cls, text: str) -> Site:
        """Parse `model.layers.7.self_attn.v`; ValueError if the role is unknown."""
        module, _, role = text.rpartition(".")
        return cls(module, Role(role))
