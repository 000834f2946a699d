"""What an engine does with a part of a checkpoint that it does not simply load as it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from fp8calib.engines.replay.verdicts import LoadVerdict, Refusal, Unjudged
from fp8calib.engines.status import Status
from fp8calib.errors import shorten


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What an engine does with a subject, and why.

    The status USED is for a condition: the engine serves the subject, but in another way.
    """

    status: Status
    subject: str = ""
    """The tensor, linear or module; empty where `why` names it."""
    why: str
    """In words, to follow the subject."""
    fix: str = ""
    is_silent: bool = False
    """The engine raises no error for it alone. With a finding that is unknown beside it, whether
    the engine starts is unknown too."""
    if_loaded: str = ""
    """Where it is unknown whether the engine stops: what it does if it does not stop. Empty where
    it then serves the subject."""

    @classmethod
    def of(cls, refusal: Refusal) -> Finding:
        """Make the finding of an engine that does not start, or of which that cannot be told."""
        status = Status.UNKNOWN if isinstance(refusal, Unjudged) else Status.REFUSED
        return cls(status=status, why=refusal.why, fix=refusal.fix)

    @classmethod
    def doubt(cls, subject: str, why: str, *, fix: str, if_loaded: str = "") -> Finding:
        """Make the finding that it is unknown whether the engine stops at a subject."""
        return cls(status=Status.UNKNOWN, subject=subject, why=why, fix=fix, if_loaded=if_loaded)

    @property
    def text(self) -> str:
        """The subject and the reason."""
        return f"{shorten(self.subject)} {self.why}".strip() if self.subject else self.why

    def judge(self) -> LoadVerdict:
        """Make the verdict on the weights."""
        return LoadVerdict(status=self.status, why=self.text, fix=self.fix)


CUT = "it is cut, or fills a part"
"""What becomes of a tensor whose shape is not that of its parameter, if the engine starts."""


def join_alike(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Join findings of one kind into one, which names the first and says how many there are."""
    kinds: dict[tuple[Status, str, str], list[Finding]] = {}
    for each in findings:
        kinds.setdefault((each.status, each.fix, each.if_loaded), []).append(each)
    for first, *others in kinds.values():
        names = dict.fromkeys(each.subject or each.text for each in others)
        more = [name for name in names if name not in (first.subject, first.text)]
        end = f"; {len(more)} more likewise, such as {shorten(more[0])}" if more else ""
        yield replace(first, why=f"{first.why}{end}")
