"""Who serves the files that a command wrote, by format: what `--json` prints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict

from fp8calib.engines.serving import Serving
from fp8calib.results.record import Record


class FormatServing(Record):
    """The command line that serves a format with an engine."""

    format: str
    engine: str
    command: str


class FormatLimitation(Record):
    """Why an engine cannot use a format, or a condition under which it does."""

    format: str
    engine: str
    why: str
    is_blocking: bool


class FormatBriefServing(Record):
    """Whether an engine that is only listed by name serves a format."""

    format: str
    engine: str
    name: str
    command: str


class Served(Record):
    """Who serves some formats."""

    serving: tuple[FormatServing, ...]
    limitations: tuple[FormatLimitation, ...]
    other_engines: tuple[FormatBriefServing, ...]

    @classmethod
    def of(cls, found: Iterable[tuple[str, Serving]]) -> Served:
        """Collect who serves each format, by its name; what is the same for all ranks once."""
        listed = list(found)
        commands = ((name, each) for name, item in listed for each in item.commands)
        limitations = ((name, each) for name, item in listed for each in item.limitations)
        others = ((name, each) for name, item in listed for each in item.others)
        return cls(
            serving=tuple(FormatServing(**each) for each in _list_once(commands)),
            limitations=tuple(FormatLimitation(**each) for each in _list_once(limitations)),
            other_engines=tuple(FormatBriefServing(**each) for each in _list_once(others)),
        )


def _list_once(named: Iterable[tuple[str, object]]) -> Iterator[dict[str, object]]:
    return ({"format": name, **asdict(item)} for name, item in dict.fromkeys(named))  # type: ignore[call-overload]
