"""Print what a run found."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from tests.real_engines.fuzz.compare import Kind
from tests.real_engines.fuzz.evaluate import Result

_WIDTH = 400
_EXAMPLES = 8
_CAUSE_WIDTH = 120
_VARYING = {
    r"'[^']*'|\"[^\"]*\"": "NAME",
    r"/\S+": "PATH",
    r"\w+(\.\w+)*[._]\w+": "NAME",
    r"-?\b\d[\w.+-]*": "N",
    r"\b[A-Z]\w*?(ForCausalLM|Model|Attention|MLP|DecoderLayer)\b": "NAME",
}
"""Patterns of what differs between checkpoints in texts of the same cause."""


def print_report(results: Sequence[Result]) -> None:
    """Print the disagreements by kind and cause, then how many cases agree."""
    causes = defaultdict(list)
    for result in results:
        for engine, finding in result.findings.items():
            texts = (_normalize(finding.check), _normalize(finding.engine))
            causes[finding.kind, engine, texts].append((result.case, finding))
    worst_first = sorted(causes.items(), key=lambda item: list(Kind).index(item[0][0]))
    for (kind, engine, _), items in worst_first:
        _, first = items[0]
        print(f"\n{kind.value.upper()}\n* {engine}, {len(items)} times")
        print(f"  check:  {_cut(first.check)}")
        print(f"  engine: {_cut(first.engine)}")
        for case, _ in items[:_EXAMPLES]:
            print(f'  repeat: scripts/test-engines --engine {engine} --case "{case}"')
    for engine in sorted({e for r in results for e in (*r.agreed, *r.findings, *r.excluded)}):
        _print_counts(engine, results)
    _print_reasons("not written", [result.unwritten for result in results if result.unwritten])


def _normalize(text: str) -> str:
    """Give the first line of a text without names, paths and numbers."""
    line = next(iter(text.splitlines()), "")
    for pattern, put in _VARYING.items():
        line = re.sub(pattern, put, line)
    return line[:_CAUSE_WIDTH]


def _cut(text: str) -> str:
    """Shorten a text in the middle: the end of an error names the engine's line."""
    line = " ".join(text.split())
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 90]} ... {line[-80:]}"


def _print_counts(engine: str, results: Sequence[Result]) -> None:
    print(f"\n{engine}: {sum(engine in result.agreed for result in results)} agree")
    kinds = Counter(r.findings[engine].kind for r in results if engine in r.findings)
    for kind in Kind:
        print(f"  {kinds[kind]:4}  {kind.value}")
    _print_reasons("not compared", [r.excluded[engine] for r in results if engine in r.excluded])


def _print_reasons(label: str, reasons: Sequence[str]) -> None:
    for reason, count in Counter(reasons).most_common():
        print(f"  {count:4}  {label}: {_cut(reason)}")
