"""Print what a run found."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tests.real_engines.fuzz.architectures import ARCHITECTURES
from tests.real_engines.fuzz.compare import Finding, Kind
from tests.real_engines.fuzz.draw import DAMAGES, Case
from tests.real_engines.fuzz.evaluate import Result
from tests.real_engines.fuzz.forms import FORMS

_WIDTH = 400
_EXAMPLES = 8
_MOST_LISTED = 40
_CAUSE_WIDTH = 120
_VARYING = {
    r"'[^']*'|\"[^\"]*\"": "NAME",
    r"/\S+": "PATH",
    r"\w+(\.\w+)*[._]\w+": "NAME",
    r"-?\b\d[\w.+-]*": "N",
    r"\b[A-Z]\w*?(ForCausalLM|Model|Attention|MLP|DecoderLayer)\b": "NAME",
}
"""Patterns of what differs between checkpoints in texts of the same cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """A disagreement of one or more cases, and the simplest case that shows it."""

    engine: str
    drawn: tuple[Case, ...]
    simplest: Case
    finding: Finding


def list_disagreements(results: Sequence[Result]) -> list[Disagreement]:
    """List them, one for all cases in which the same damage of a form has the same effect."""
    groups = defaultdict(list)
    for result in results:
        for engine, finding in result.findings.items():
            case = result.case
            key = (engine, case.form, case.damages, describe_effect(finding))
            groups[key].append((case, finding))
    return [
        Disagreement(
            engine=engine,
            drawn=tuple(case for case, _ in items),
            simplest=items[0][0],
            finding=items[0][1],
        )
        for (engine, *_), items in groups.items()
    ]


def describe_effect(finding: Finding) -> tuple[Kind, str]:
    """Give what disagreements of the same cause have in common."""
    return finding.kind, normalize(finding.engine)


def normalize(text: str) -> str:
    """Give the first line of a text without names, paths and numbers."""
    line = next(iter(text.splitlines()), "")
    for pattern, put in _VARYING.items():
        line = re.sub(pattern, put, line)
    return line[:_CAUSE_WIDTH]


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
    written = sum(not result.unwritten for result in results)
    print(f"\n{written} checkpoints, seed {seed}, {duration_s:.0f} s")
    _print_counts(results)
    _print_coverage(results)


def _print_kind(kind: Kind, found: Sequence[Disagreement]) -> None:
    """Print the disagreements of one kind, by what check and the engine say."""
    groups = defaultdict(list)
    for item in found:
        texts = (normalize(item.finding.check), normalize(item.finding.engine))
        groups[item.engine, texts].append(item)
    count = sum(len(item.drawn) for item in found)
    print(f"\n{kind.value.upper()}: {count}, of {len(groups)} causes")
    for items in groups.values():
        first = items[0]
        drawn = [str(case) for item in items for case in item.drawn]
        print(f"\n* {first.engine}, {len(drawn)} times")
        print(f"  check:  {_cut(first.finding.check)}")
        print(f"  engine: {_cut(first.finding.engine)}")
        _print_examples("repeat: ", list(dict.fromkeys(_repeat(item) for item in items)))
        _print_examples("drawn:  ", drawn)


def _repeat(found: Disagreement) -> str:
    """Give the command that shows a disagreement again."""
    return f'scripts/test-engines --engine {found.engine} --case "{found.simplest}"'


def _print_examples(label: str, lines: Sequence[str]) -> None:
    for line in lines[:_EXAMPLES]:
        print(f"  {label}{line}")
    if len(lines) > _EXAMPLES:
        print(f"  {label}and {len(lines) - _EXAMPLES} more")


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
