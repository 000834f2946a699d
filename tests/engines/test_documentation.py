"""docs/engines.md lists what the records of engines assume, and what was run and what read.

FP8CALIB_WRITE_README=1 in the environment writes the page again.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import groupby, pairwise
from pathlib import Path

from fp8calib.engines.engine import Engine
from fp8calib.engines.facts import Fact, Release
from fp8calib.engines.numerics import Numerics
from fp8calib.engines.registry import ENGINES
from fp8calib.engines.sglang.releases import RELEASES as SGLANG_RELEASES
from fp8calib.engines.vllm.releases import RELEASES as VLLM_RELEASES
from fp8calib.engines.weights.weight_rule import WeightRule
from tests.real_engines.fuzz.exclusions import EXCLUDED

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
HEAD = """# What is assumed of engines, and how it is known

`check` replays loading rules, and `verify` emulates arithmetic. *Run* means that the result was
compared with the engine itself, *loader run* with the engine's own code that loads scales. *Read*
means that only the source was read: such a rule is an assumption until someone runs the engine.
A rule that does not say that it was run was read.
`tests/engines/test_documentation.py` makes these tables from the records in `fp8calib/engines/`.
"""
DIFFERENCES = """
## What differs between releases

What is not listed is the same in all releases that are known. Model types with attention of their
own kind, and names that only some models know, are judged in all of vLLM's by the rules of 0.32.
Which scheme a linear gets was found by running the config classes of each release on configs of
compressed-tensors, the `fp8` method and ModelOpt. Of the arithmetic of vLLM before 0.32, Python was
compared with that of 0.32, and no kernel; that of SGLang 0.5.19 to 0.5.22 is that of 0.5.23.
"""
ARITHMETIC = """
## Arithmetic that `verify --engine` emulates

What differs from the plain rule (divide in fp32, saturate, round to nearest even). It is true for
Hopper GPUs, unless the engine is for a CPU. Not emulated: the order of sums, accumulation in fewer
bits than fp32, the running maximum of softmax over tiles (the maximum of the row is used), and
FlashInfer's own quantization of inputs in vLLM's block linears, for fewer than 32 tokens.
"""


def read_meanings(kind: type) -> dict[str, str]:
    """Read what the source says below each field of a class."""
    (body,) = (
        node.body
        for node in ast.parse(Path(inspect.getfile(kind)).read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    )
    found: dict[str, str] = {}
    for one, after in pairwise(body):
        is_field = isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if is_field and is_text:
            found[one.target.id] = " ".join(str(after.value.value).split())  # type: ignore[union-attr]
    return found


def make_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"


def list_releases() -> Iterator[Engine]:
    for engine in ENGINES.values():
        yield from (engine, *engine.releases)


def describe_older(engine: Engine) -> Iterator[tuple[str, ...]]:
    """Describe the other releases of an engine, those with the same evidence on one line."""
    for _, group in groupby(engine.releases, key=lambda each: describe_engine(each)[3:]):
        first, *rest = map(describe_engine, group)
        last = rest[-1] if rest else first
        spans = [
            new if new == old else f"{new} to {old}" for new, old in zip(first, last, strict=True)
        ]
        yield tuple(spans)


def describe_engine(engine: Engine) -> tuple[str, ...]:
    is_replayed = engine.replay_folder is not None or engine.replay_json is not None
    arithmetic = "not emulated"
    if engine.numerics is not None:
        numbers = engine.numerics
        arithmetic = "run and read" if numbers.run else "read"
    return (
        engine.title,
        f"`{engine.key}`",
        engine.version,
        str(engine.evidence) if is_replayed else "not replayed",
        arithmetic,
    )


def describe_field(numerics: Numerics, name: str, meanings: dict[str, str]) -> tuple[str, ...]:
    known = "run" if name in numerics.run else "read"
    shown = f"`{name}` = {show_value(getattr(numerics, name))}"
    return shown, meanings[name], known, numerics.sources[name]


def show_value(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key or 'others'}: {each}" for key, each in value.items())
    if isinstance(value, frozenset | tuple):
        return ", ".join(map(str, sorted(value)))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def describe_rule(engine: Engine, rule: WeightRule) -> tuple[str, ...]:
    scope = [rule.dialect, *rule.schemes, *rule.model_types]
    scope += ["blocks"] * rule.has_blocks + ["experts"] * rule.has_experts
    known = "run" if "tried" in rule.source else "read"
    return (
        engine.key,
        ", ".join(filter(None, scope)) or "all",
        rule.status,
        rule.why,
        known,
        rule.source,
    )


LIMITS = """
## What the random comparison does not see

`scripts/test-engines --fuzz N --seed S` loads random checkpoints in vLLM 0.32, transformers and
SGLang's loaders, and compares. These errors are those of a CPU or of another package, and are left
out and counted:
"""
CLOSE = """
Weights count as equal where they differ by less than a tenth of their norm, and each row by less
than half of its norm. In these cases `check` names a fault, and the comparison may find none:

* one of many experts in 16 bits, which vLLM casts without a scale: the difference can be less than
  that
* an asymmetric scheme of keys and values without a zero point: the comparison sees scales alone
* vLLM: the missing scale of the last of several projections that are joined: where all of them
  have the same scale, the largest of the others is the right one
* vLLM: llama4's q and k in blocks, of the `fp8` method: vLLM reorders rows inside of a head, which
  is right where heads fill blocks
"""


def list_exclusions() -> Iterator[str]:
    for engine, reasons in EXCLUDED.items():
        yield from (f"* {engine}: {why}" for why in reasons.values())


def list_loading_rules() -> Iterator[tuple[str, str]]:
    """List the modules and the tables in them whose docstrings name a source."""
    for path in (*sorted(ENGINE_FOLDER.glob("**/*.py")), JOINED):
        tree = ast.parse(path.read_text())
        folder = ENGINE_FOLDER if path.is_relative_to(ENGINE_FOLDER) else ENGINE_FOLDER.parent
        place = path.relative_to(folder).with_suffix("").as_posix()
        texts = {place: ast.get_docstring(tree) or ""}
        for one, after in pairwise(tree.body):
            target = one.target if isinstance(one, ast.AnnAssign) else None
            target = one.targets[0] if isinstance(one, ast.Assign) else target
            value = after.value if isinstance(after, ast.Expr) else None
            if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
                texts[f"{place}: {target.id.strip('_')}"] = str(value.value)
        for rule, text in texts.items():
            if SOURCE.search(text):
                yield f"`{rule}`", " ".join(text.split())


def describe_facts(releases: Sequence[Release]) -> Iterator[tuple[str, ...]]:
    """Describe the facts of an engine, those that differ in the value alone on one line."""
    facts = releases[0].facts

    def give_key(fact: Fact) -> tuple[str, ...]:
        return fact.name, fact.since, fact.until, fact.source, str(fact.how)

    for (name, since, until, source, how), group in groupby(sorted(facts, key=give_key), give_key):
        values = ", ".join(str(fact.value) for fact in group if fact.value is not True)
        what = f"{name}: {values}" if values else name
        yield releases[0].engine, what, since, until, how, source


def make_page() -> str:
    releases = [each for each in list_releases() if each.key != "reference"]
    rows: list[tuple[str, ...]] = []
    for engine in ENGINES.values():
        rows += [describe_engine(engine), *describe_older(engine)] if engine.version else []
    lines = [HEAD, *make_table(ENGINE_COLUMNS, rows)]
    differences = [*describe_facts(VLLM_RELEASES), *describe_facts(SGLANG_RELEASES)]
    lines += [DIFFERENCES, *make_table(FACT_COLUMNS, differences), ARITHMETIC.rstrip()]
    meanings, seen = read_meanings(Numerics), set()
    for engine in releases:
        numerics = engine.numerics
        if numerics is None or numerics.name in seen:
            continue
        seen.add(numerics.name)
        lines += ["", f"### {engine.release}, `{engine.key}`", ""]
        rows = (describe_field(numerics, name, meanings) for name in sorted(numerics.sources))
        lines += make_table(("field", "what it means", "known by", "source"), rows)
    lines += [
        "",
        "## Loading rules",
        "",
        *make_table(("rule", "what it follows"), list_loading_rules()),
    ]
    lines += ["", "## FP8 weights that engines do not load as they are", ""]
    owners: dict[WeightRule, Engine] = {}
    for engine in releases:
        for rule in engine.weight_rules:
            owners.setdefault(rule, engine)
    rules = (describe_rule(engine, rule) for rule, engine in owners.items())
    lines += make_table(RULE_COLUMNS, rules)
    return "\n".join([*lines, LIMITS, *list_exclusions(), CLOSE])


FACT_COLUMNS = ("engine", "what", "since", "until before", "known by", "source")
ENGINE_FOLDER = Path(__file__).parents[2] / "fp8calib" / "engines"
JOINED = ENGINE_FOLDER.parent / "geometry" / "module_paths.py"
"""It has the names of joined projections, which quantization needs too."""
SOURCE = re.compile(r"\.py|\d\.\d|commit [0-9a-f]{6}")
ENGINE_COLUMNS = ("engine", "`--engine`", "release", "loading", "arithmetic")
RULE_COLUMNS = ("engine", "weights", "status", "why", "known by", "source")


def test_the_page_shows_the_records() -> None:
    page = make_page()
    if os.environ.get("FP8CALIB_WRITE_README"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page, "FP8CALIB_WRITE_README=1 writes it again"


def test_every_field_and_rule_has_a_meaning_and_a_source() -> None:
    assert read_meanings(Numerics).keys() >= {each.name for each in fields(Numerics)}
    for releases in (VLLM_RELEASES, SGLANG_RELEASES):
        assert all(each.source for each in releases[0].facts)
    assert all(rule.source for engine in ENGINES.values() for rule in engine.weight_rules)
