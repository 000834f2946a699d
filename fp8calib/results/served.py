"""Who serves the files that a command wrote, by format: what `--json` prints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict

from fp8calib.engines.serving import BriefServing, Serving, ServingCommand
from fp8calib.results.quantize import QuantizeResult
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
    def of(cls, found: Iterable[tuple[str, Serving | QuantizeResult]]) -> Served:
        """Collect who serves each format, by its name; what is the same for all ranks once."""
        listed = list(found)
        commands = ((name, each) for name, item in listed for each in _list_commands(item))
        limitations = ((name, each) for name, item in listed for each in item.limitations)
        others = ((name, each) for name, item in listed for each in _list_others(item))
        return cls(
            serving=tuple(FormatServing(**each) for each in _list_once(commands)),
            limitations=tuple(FormatLimitation(**each) for each in _list_once(limitations)),
            other_engines=tuple(FormatBriefServing(**each) for each in _list_once(others)),
        )


def _list_commands(item: Serving | QuantizeResult) -> Iterable[ServingCommand]:
    return item.commands if isinstance(item, Serving) else item.serving


def _list_others(item: Serving | QuantizeResult) -> Iterable[BriefServing]:
    return item.others if isinstance(item, Serving) else item.other_engines


def _list_once(named: Iterable[tuple[str, object]]) -> Iterator[dict[str, object]]:
    return ({"format": name, **asdict(item)} for name, item in dict.fromkeys(named))  # type: ignore[call-overload]
