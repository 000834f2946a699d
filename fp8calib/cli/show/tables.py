"""Which tables `fp8calib show` prints, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fp8calib.errors import UsageError

ORDERS = ("layer", "amax", "scale")
_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOptions:
    """The options of the command line; without any, only what stands out is printed."""

    everything: bool = False
    kv: bool = False
    layers: tuple[int, ...] = ()
    sort: str | None = None
    top: int | None = None

    def __post_init__(self) -> None:
        if self.sort not in {None, *ORDERS}:
            raise UsageError(
                f"--sort {self.sort}: must be {', '.join(ORDERS[:-1])} or {ORDERS[-1]}"
            )
        if self.everything and (self.kv or self.layers or self.top):
            raise UsageError("--all prints every row: leave out --kv, --layer and --top")

    @property
    def is_summary(self) -> bool:
        """Whether no table was asked for."""
        return not self.given

    @property
    def given(self) -> list[str]:
        """The options on the command line."""
        values = {
            "--all": self.everything,
            "--kv": self.kv,
            "--layer": self.layers,
            "--sort": self.sort,
            "--top": self.top,
        }
        return [name for name, value in values.items() if value]

    def choose(
        self,
        rows: Sequence[_Row],
        *,
        layer: Callable[[_Row], int | None],
        size: Callable[[_Row], float],
    ) -> list[_Row]:
        """Choose and sort the rows of a table.

        Raises:
            UsageError: no row is of a layer that was asked for.
        """
        chosen = [row for row in rows if not self.layers or layer(row) in self.layers]
        if self.sort in {"amax", "scale"} or (self.top and self.sort is None):
            chosen.sort(key=size, reverse=True)
        return chosen[: self.top]
