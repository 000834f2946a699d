"""How a release is added to the facts: with made-up packages of a made-up engine."""

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.real_engines import package
from tests.real_engines.package import open_package
from tests.real_engines.read_engines import FactsFile, Source, list_changes
from tests.real_engines.type_facts import Probe

RULES = '''
class Loader:
    def load(self, name):
        """Load {what}."""
        return name

    def skip(self):
        return {skipped}

LIMIT = 4
'''
FILES: Mapping[str, Mapping[str, str]] = {
    "engine==0.8.0": {"classes": "A B Old", "what": "it", "skipped": "1"},
    "engine==0.9.0": {"classes": "A B C", "what": "it", "skipped": "1"},
    "engine==0.10.0": {"classes": "A C D", "what": "it again", "skipped": "2"},
}


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the packages where downloaded ones are."""
    monkeypatch.setattr(package, "FOLDER", tmp_path)
    for requirement, words in FILES.items():
        with zipfile.ZipFile(tmp_path / f"{requirement}.zip", "w") as file:
            file.writestr("engine/classes.py", f"NAMES = {words['classes'].split()}\n")
            file.writestr("engine/rules.py", RULES.format_map(words))


def make_source(path: Path) -> Source:
    probes = {
        "class": Probe(
            read=lambda each: eval(each.read("classes.py").partition("= ")[2]),  # noqa: S307
            source="classes.py NAMES",
            how="read",
            is_difference=True,
        ),
        "skips two": Probe(
            read=lambda each: "return 2" in each.read("rules.py"),
            source="rules.py Loader.skip",
            how="run",
        ),
    }
    return Source(key="engine", path=path, packages=("engine",), probes=probes, evidence="read")


def make_file(*versions: str) -> FactsFile:
    """Make a file of the first release, with a fact that no probe reads, and add others."""
    releases = [{"version": "0.8.0", "package": "engine", "evidence": "run"}]
    typed = {"fact": "limit", "since": "", "until": "", "source": "rules.py LIMIT", "how": "read"}
    text = {"engine": "Engine", "name_parts": 2, "releases": releases, "facts": [typed]}
    file = FactsFile(make_source(Path("engine.json")), json.dumps(text))
    for version in versions:
        file.read("engine", version)
    return file


def list_facts(file: FactsFile) -> list[tuple[str, list[str], str, str]]:
    facts = json.loads(file.make_text())["facts"]
    return [(each["fact"], each.get("values", []), each["since"], each["until"]) for each in facts]


BOTH = [
    ("class", ["Old"], "", "0.9.0"),
    ("class", ["B"], "", "0.10.0"),
    ("class", ["C"], "0.9.0", ""),
    ("class", ["D"], "0.10.0", ""),
    ("skips two", [], "0.10.0", ""),
    ("limit", [], "", ""),
]


@pytest.mark.parametrize("versions", [("0.9.0", "0.10.0"), ("0.10.0", "0.9.0")])
def test_facts_begin_and_end_with_a_release_in_whichever_order_they_are_read(
    versions: tuple[str, ...],
) -> None:
    file = make_file(*versions)

    assert list_facts(file) == BOTH
    assert json.loads(file.make_text())["releases"][1:] == [
        {"version": version, "package": "engine", "evidence": "read"}
        for version in ("0.9.0", "0.10.0")
    ]


@pytest.mark.parametrize("version", ["0.9.0", "0.10.0"])
def test_a_release_that_is_removed_and_read_again_gives_the_same_file(version: str) -> None:
    file = make_file("0.9.0", "0.10.0")
    text = file.make_text()

    file.remove(version)
    assert version not in file.make_text()
    file.read("engine", version)

    assert file.make_text() == text


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("engine/rules.py Loader.skip", ["engine/rules.py Loader.skip"]),
        ("rules.py (skip, LIMIT)", ["rules.py skip"]),
        ("`rules.py` and its load", []),
        ("rules.py", ["rules.py"]),
        ("classes.py NAMES; rules.py LIMIT", ["classes.py NAMES"]),
        ("other.py skip", []),
        ("no file", []),
    ],
)
def test_what_a_text_cites_is_compared_without_docstrings(text: str, changed: list[str]) -> None:
    old, new = open_package("engine==0.9.0"), open_package("engine==0.10.0")

    found = list_changes(old, new, [("a rule", text), ("another", text)])

    assert found == {place: ["a rule", "another"] for place in changed}
