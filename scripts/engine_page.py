"""The site's page on engines: what is assumed of each, and how it is known.

`mkdocs_hooks.py` adds it to the site; `tests/engines/test_documentation.py` requires the sources.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, TypeVar

from fp8calib.engines.arithmetic import Numerics
from fp8calib.engines.engine import Engine
from fp8calib.engines.facts.release import SGLANG_FACTS, VLLM_FACTS
from fp8calib.engines.registry import ENGINES
from fp8calib.engines.status import Evidence
from fp8calib.engines.weights.rules import read_weight_rules

HEAD = """# What is known of engines

`check` replays loading rules, and `verify` emulates arithmetic. *run*: the result was compared with
the engine itself. *loader run*: it was compared with the engine's own code that loads scales.
*read*: only the source was read, so the rule is an assumption until someone runs the engine. A rule
that does not say that it was run was read. `scripts/docs` makes this page from the records in
`fp8calib/engines/`.
"""
DIFFERENCES = """`scripts/read-engines` writes this from the engines' packages. What is not listed
is the same in all known releases. Model types with attention of their own kind, and names that
only some models know, are judged in all releases of vLLM by the rules of 0.32. Of the arithmetic
of vLLM before 0.32, Python was compared with that of 0.32, and no kernel; that of SGLang 0.5.19
to 0.5.22 is that of 0.5.23.
"""
ARITHMETIC = """What differs from the plain rule (divide in fp32, saturate, round to nearest even).
It holds for Hopper GPUs, unless the engine is for a CPU. Not emulated: the order of sums,
accumulation in fewer bits than fp32, the running maximum of softmax over tiles (the maximum of the
row is used), and FlashInfer's own quantization of inputs in vLLM's block linears for fewer than 32
tokens.
"""
_SOURCE = re.compile(r"\.py|\d\.\d|commit [0-9a-f]{6}")
"""How a docstring that names a file, a release or a commit of an engine is recognised."""
_T = TypeVar("_T")
_FOLDER = Path(inspect.getfile(Engine)).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Something that is true of some releases."""

    fact: str
    """Its name."""
    values: Sequence[str] = ("",)
    """What it holds for, such as types of models; one empty text if the name says all."""
    since: str = ""
    """First release that has it; empty if that is older than all known releases."""
    until: str = ""
    """First release without it; empty if the newest still has it."""
    source: str
    """The files and the symbols in them that show it."""
    how: Evidence


def read_facts(written: Mapping[str, Any]) -> list[Fact]:
    """Read the facts of a file."""
    return [Fact(**each) for each in written["facts"]]


def make_page() -> str:
    """Make the page."""
    engines = [engine for engine in ENGINES.values() if engine.version]
    releases = [release for engine in engines for release in (engine, *engine.releases)]
    columns = ("engine", "`--engine`", "release", "loading", "arithmetic")
    lines = [HEAD, *_make_table(columns, [row for each in engines for row in _list_rows(each)])]
    lines += ["", "## What differs between releases", "", DIFFERENCES]
    facts = [row for path in (VLLM_FACTS, SGLANG_FACTS) for row in list_facts(path)]
    lines += _make_table(("engine", "fact", "since", "until before", "known by", "source"), facts)
    lines += ["", "## Arithmetic that verify emulates", "", ARITHMETIC]
    lines += _list_arithmetic(releases)
    lines += ["", "## Loading rules", ""]
    lines += _make_table(("rule", "what it follows"), list_loading_rules())
    lines += ["", "## FP8 weights that engines do not load as they are", ""]
    lines += _make_table(("engine", "weights", "status", "why", "source"), _list_weights(releases))
    return "\n".join(lines) + "\n"


def read_meanings(kind: type) -> dict[str, str]:
    """Read what the source says below each field of a class."""
    tree = ast.parse(Path(inspect.getfile(kind)).read_text())
    (body,) = (
        node.body
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    )
    return dict(_list_documented(body))


def list_facts(path: Path) -> Iterator[Sequence[str]]:
    """List the facts of an engine."""
    written = json.loads(path.read_text())
    for each in read_facts(written):
        values = ", ".join(filter(None, each.values))
        name = f"{each.fact}: {values}" if values else each.fact
        yield written["engine"], name, each.since, each.until, each.how, each.source


def list_loading_rules() -> Iterator[tuple[str, str]]:
    """List the modules, and the constants in them, whose docstrings name a source."""
    for path in sorted(_FOLDER.glob("**/*.py")):
        tree = ast.parse(path.read_text())
        place = path.relative_to(_FOLDER).with_suffix("").as_posix()
        yield from (
            (f"`{rule}`", " ".join(text.split()))
            for rule, text in (
                (place, ast.get_docstring(tree) or ""),
                *((f"{place}: {name}", text) for name, text in _list_documented(tree.body)),
            )
            if _SOURCE.search(text)
        )


def _list_documented(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    """List the variables of a module or class that a text follows, with the text."""
    for statement, after in pairwise(body):
        target: ast.expr | None = None
        if isinstance(statement, ast.AnnAssign):
            target = statement.target
        elif isinstance(statement, ast.Assign):
            target = statement.targets[0]
        text = after.value if isinstance(after, ast.Expr) else None
        if isinstance(target, ast.Name) and isinstance(text, ast.Constant):
            yield target.id.strip("_"), " ".join(str(text.value).split())


def _list_rows(engine: Engine) -> Iterator[Sequence[str]]:
    """Describe an engine, and its other releases; those with the same evidence share a row."""
    yield _describe(engine)
    for _, group in groupby(map(_describe, engine.releases), lambda row: row[3:]):
        rows = list(group)
        spans = zip(rows[0], rows[-1], strict=True)
        yield [new if new == old else f"{new} to {old}" for new, old in spans]


def _describe(engine: Engine) -> Sequence[str]:
    is_replayed = engine.replay_folder is not None or engine.replay_json is not None
    arithmetic = "not emulated"
    if engine.numerics is not None:
        arithmetic = "run and read" if engine.numerics.run else "read"
    loading = str(engine.evidence) if is_replayed else "not replayed"
    return engine.title, f"`{engine.key}`", engine.version, loading, arithmetic


def _list_arithmetic(releases: Iterable[Engine]) -> Iterator[str]:
    meanings = read_meanings(Numerics)
    for numerics, engine in _list_first(releases, lambda engine: [engine.numerics]):
        yield from ("", f"### {engine.release}, `{engine.key}`", "")
        rows = (
            (
                f"`{name}` = {_show_value(getattr(numerics, name))}",
                meanings[name],
                "run" if name in numerics.run else "read",
                source,
            )
            for name, source in sorted(numerics.sources.items())
        )
        yield from _make_table(("field", "what it means", "known by", "source"), rows)


def _list_weights(releases: Iterable[Engine]) -> Iterator[Sequence[str]]:
    for rule, engine in _list_first(releases, lambda engine: read_weight_rules(engine.facts)):
        scope = [rule.dialect, *rule.schemes, *rule.model_types]
        scope += ["blocks"] * (rule.granularity == "block") + ["experts"] * rule.has_experts
        weights = ", ".join(filter(None, scope)) or "all"
        yield engine.key, weights, rule.status, rule.why, rule.source


def _list_first(
    releases: Iterable[Engine], read: Callable[[Engine], Iterable[_T | None]]
) -> Iterator[tuple[_T, Engine]]:
    """List different records, each with the first engine that has it."""
    seen: list[_T] = []
    for engine in releases:
        for record in read(engine):
            if record is not None and record not in seen:
                seen.append(record)
                yield record, engine


def _show_value(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key or 'others'}: {each}" for key, each in value.items())
    if isinstance(value, frozenset | tuple):
        return ", ".join(map(str, sorted(value)))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _make_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for cells in (columns, ["---"] * len(columns), *rows):
        yield f"| {' | '.join(cell.replace('|', '/').replace('<', '&lt;') for cell in cells)} |"
