"""What a script reads of a fact in one release."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fp8calib.engines.status import Evidence
from tests.real_engines.package import Package


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """How to read a fact in the package of a release."""

    read: Callable[[Package], Iterable[str] | bool]
    """Gives the values that are true of the release, or whether the fact is true."""
    source: str
    how: Evidence
    """Run, where functions of the package are run; read, where its text is."""
    is_difference: bool = False
    """Values that are true of all known releases are no facts."""

    def list_values(self, package: Package) -> list[str]:
        """List the values that are true of a release; an empty one for a fact without values."""
        found = self.read(package)
        return [""] * found if isinstance(found, bool) else [*found]
