"""The plan: a choice for each group, the frontier, and what the choice costs on held-out text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from fp8calib.commands.result import BeforeAfter, Record, Result
from fp8calib.errors import CANNOT_TELL, VerificationError
from fp8calib.verification.report import PairedResult, RunProvenance


class GroupChoice(Record):
    """What one way to store a group costs alone, on the text of the search."""

    name: str
    size_bytes: int
    kld_mean: float
    kld_se: float | None


class PlannedGroup(Record):
    """What is decided together, and what was chosen for it."""

    name: str
    layers: tuple[int, ...]
    linears: tuple[str, ...]
    """As the checkpoint names them; empty for a KV cache."""
    choice: str
    rules: Mapping[str, str]
    """Those of K and V that are not amax, by site."""
    saved_bytes: int
    """Against 16 bits."""
    why: str
    choices: tuple[GroupChoice, ...]
    """All but 16 bits, which costs nothing."""
    refused: Mapping[str, str]
    """Why other schemes are no choices."""


class FrontierPoint(Record):
    """A plan that was measured on the text that is held out."""

    name: str
    size_bytes: int
    kld_mean: float
    kld_se: float | None
    ppl_ratio: float
    ppl_ratio_se: float | None
    is_uniform: bool
    """One scheme for all linears, and amax for all caches."""
    is_chosen: bool
    against_chosen: PairedResult | None
    """The plan against the chosen one; null of that itself."""


class PlanResult(Result):
    """All results."""

    kind: Literal["plan"] = "plan"
    model: str
    out: str
    engines: Mapping[str, str]
    """Their versions."""
    emulated: str
    """Whose arithmetic the figures have."""
    gpu: str
    dtype: str
    device: str
    budget: str
    """In words."""
    met: Literal["yes", "no", "cannot-tell"]
    why: str
    data: tuple[str, ...]
    search_tokens: int
    tokens: int
    """Scored tokens of the text that is held out."""
    sequences: int
    """Its sequences: of few, only large differences can be told."""
    kv_tokens: int
    bytes: BeforeAfter
    kld_mean: float
    kld_se: float | None
    ppl_ratio: float
    ppl_ratio_se: float | None
    searched_kld: float
    """The loss on the text of the search."""
    summed_kld: float
    """The sum of the groups' losses there."""
    passes: int
    """Forward passes over the text of the search that this run took, the unquantized model's too.
    """
    groups: tuple[PlannedGroup, ...]
    frontier: tuple[FrontierPoint, ...]
    recipe: str
    """The file, relative to `out`."""
    write: str
    """The command that writes the checkpoint, or the overlay of a cache alone."""
    serve: str
    """The command that serves it; empty where the engine has none."""
    provenance: RunProvenance
    warnings: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether held-out text confirms the budget."""
        return self.met == "yes"

    @property
    def exit_code(self) -> int:
        """8 if the budget is not met; 9 if that cannot be told."""
        codes = {"yes": 0, "no": VerificationError.exit_code, "cannot-tell": CANNOT_TELL}
        return codes[self.met]
