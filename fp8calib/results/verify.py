"""What a verification found."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from fp8calib.errors import CANNOT_TELL, VerificationError
from fp8calib.results.hashes import RunHashes
from fp8calib.results.record import Result
from fp8calib.verification.judge.gates import Gate
from fp8calib.verification.report import Verdict, VerifyReport


class VerifyResult(VerifyReport, Result):
    """The report of a verification, and the command that it asks for."""

    first_keys: ClassVar = ("next", "advice")
    next: str = ""
    """The command that helps most; empty where none does."""
    gates: tuple[Gate, ...] = ()
    """The thresholds of the candidates' gates."""
    hashes: RunHashes | None = None
    """None where only a server and an unquantized one or a dump are compared."""
    has_gate: bool = Field(default=False, exclude=True)
    """Whether a failure is one of the command."""

    @property
    def passed(self) -> bool:
        """Whether no verdict on a candidate that was asked for is a failure."""
        return self.find_failure(strict=self.is_strict) is None and not self.refused

    @property
    def exit_code(self) -> int:
        """8 for a refused candidate or where the gate fails, 9 where it cannot tell; else 0."""
        if self.refused:
            return VerificationError.exit_code
        failure = self.find_failure(strict=self.is_strict) if self.has_gate else None
        if failure is None:
            return 0
        return CANNOT_TELL if failure is Verdict.CANNOT_TELL else VerificationError.exit_code
