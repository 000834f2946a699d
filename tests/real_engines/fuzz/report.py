"""Print what a run found."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.real_engines.fuzz.architectures import ARCHITECTURES
from tests.real_engines.fuzz.compare import Finding, Kind
from tests.real_engines.fuzz.draw import DAMAGES, Case
from tests.real_engines.fuzz.evaluate import Result
from tests.real_engines.fuzz.forms import FORMS

_WIDTH = 400
_EXAMPLES = 8
_MOST_LISTED = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """A disagreement, and the simplest case that shows it."""

    engine: str
    drawn: Case
    simplest: Case
    finding: Finding


def print_report(
    results: Sequence[Result],
    found: Sequence[Disagreement],
    *,
    seed: int,
    duration_s: float,
) -> None:
    """Print the disagreements by kind, then the tables."""
    for kind in Kind:
        _print_kind(kind, [item for item in found if item.finding.kind is kind])
    print(f"\n{len(results)} checkpoints, seed {seed}, {duration_s:.0f} s")
    _print_counts(results)
    _print_coverage(results)


def _print_kind(kind: Kind, found: Sequence[Disagreement]) -> None:
    groups = defaultdict(list)
    for item in found:
        groups[item.engine, replace(item.simplest, seed="")].append(item)
    print(f"\n{kind.value.upper()}: {len(found)}, {len(groups)} of them different")
    for items in groups.values():
        first = items[0]
        print(f"\n* {first.engine}: {first.simplest}")
        print(f"  check:  {_cut(first.finding.check)}")
        print(f"  engine: {_cut(first.finding.engine)}")
        others = [str(item.drawn) for item in items]
        print(
            f"  drawn:  {'; '.join(others[:_EXAMPLES])}"
            + f" and {len(others) - _EXAMPLES} more" * (len(others) > _EXAMPLES)
        )


def _cut(text: str) -> str:
    """Shorten a text in the middle: the end of an error names the engine's line."""
    line = " ".join(text.split())
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 90]} ... {line[-80:]}"


def _print_counts(results: Sequence[Result]) -> None:
    engines = sorted({e for r in results for e in (*r.agreed, *r.findings, *r.excluded)})
    for engine in engines:
        kinds = Counter(r.findings[engine].kind for r in results if engine in r.findings)
        agreed = sum(engine in result.agreed for result in results)
        why = Counter(r.excluded[engine] for r in results if engine in r.excluded)
        print(f"\n{engine}: {agreed} agree")
        for kind in Kind:
            print(f"  {kinds[kind]:4}  {kind.value}")
        for reason, count in why.items():
            print(f"  {count:4}  not compared: {reason}")
    unwritten = Counter(result.unwritten for result in results if result.unwritten)
    if unwritten:
        print("\nnot written:")
    for reason, count in unwritten.most_common():
        print(f"  {count:4}  {_cut(reason)}")


def _print_coverage(results: Sequence[Result]) -> None:
    cases = [result.case for result in results if not result.unwritten]
    drawn = {
        "forms": ({case.form for case in cases}, FORMS),
        "damages": ({name for case in cases for name in case.damages}, DAMAGES),
        "architectures": ({case.architecture for case in cases}, ARCHITECTURES),
    }
    counts = (f"{len(seen)} of {len(known)} {what}" for what, (seen, known) in drawn.items())
    print(f"\ndrawn: {', '.join(counts)}")
    missing = [name for seen, known in drawn.values() for name in known if name not in seen]
    if missing and len(missing) <= _MOST_LISTED:
        print(f"not drawn: {', '.join(missing)}")
