"""The pages are complete, short where promised, and linked."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from fp8calib.commands import spell_commands
from tests.docs.pages import DOCS, PAGES, ROOT

TOP = [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
GENERATED = {"engines.md", "python-reference.md"}
"""What `scripts/mkdocs_hooks.py` adds to the site."""
GUIDES = [page for page in sorted(DOCS.glob("*.md")) if page.name != "reference.md"]
SEARCHED = (
    *("H100", "B200", "MI300X", "L4", "RTX 5090", "DeepSeek", "Qwen3", "Gemma 3", "gpt-oss", "MTP"),
    *("NaN", "garbage output", "GGUF", "LoRA", "long context", "CUDA out of memory"),
)
"""What users look for."""
README = (ROOT / "README.md").read_text()


def slug(heading: str) -> str:
    """Name the anchor of a heading as GitHub and MkDocs do."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def list_anchors(page: Path) -> set[str]:
    return {slug(text) for text in re.findall(r"^#+ (.*)$", strip_code(page), re.MULTILINE)}


def strip_code(page: Path) -> str:
    """Give the text of a page without its blocks of code, whose comments look like headings."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [*PAGES, *TOP], ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in list_anchors(target), link


def test_every_command_has_a_page_that_the_readme_names() -> None:
    commands = list(spell_commands())
    assert "verify" in commands
    named = dict(re.findall(r"^\| \[(`[^]]+`)\]\((docs/\w[\w-]*\.md)", README, re.MULTILINE))
    pages = {name: page for row, page in named.items() for name in re.findall("`([^`]+)`", row)}
    assert pages.keys() == set(commands)
    for name, page in pages.items():
        word = name.rpartition(" ")[2]
        assert re.search(rf"^#+ .*\b{word}\b", (ROOT / page).read_text(), re.M | re.I), name


def test_the_site_has_every_page() -> None:
    config = yaml.safe_load((ROOT / "scripts" / "mkdocs.yml").read_text())
    sections = [entry for item in config["nav"] for entry in item.values()]
    names = [
        name
        for section in sections
        for name in (
            [section]
            if isinstance(section, str)
            else [page for item in section for page in item.values()]
        )
    ]
    top = {"index.md", *(page.name.lower() for page in TOP)}
    assert sorted(names) == sorted({page.name for page in DOCS.glob("*.md")} | GENERATED | top)


def test_the_extras_are_those_of_the_project() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {name for page in PAGES for name in re.findall(r"\[(\w+)\]\"", page.read_text())}
    listed = set(re.findall(r"^\| `(\w+)` \|", (DOCS / "faq.md").read_text(), re.M))
    assert named <= listed == extras["optional-dependencies"].keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_fits_its_column(page: Path) -> None:
    """A line of 88 characters fits the column of the site; longer ones would be broken."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S)
    lines = [line for kind, text in blocks if kind != "python" for line in text.splitlines()]
    assert [line for line in lines if len(line) > 88] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_sentence_has_at_most_35_words(page: Path) -> None:
    prose = re.sub(r"^```.*?^```|<!--.*?-->", "\n\n", page.read_text(), flags=re.M | re.S)
    parts = re.split(r"\n\s*\n|\n(?=\s*(?:[*|#-]|\d+\.)\s?)| \| ", prose)
    sentences = (each for part in parts for each in re.split(r"(?<=[.!?])\*{0,2}\s", part))
    assert [each for each in sentences if len(each.split()) > 35] == []


def test_the_guides_are_thirteen_and_short() -> None:
    assert len(GUIDES) == 13
    generated = re.compile(r"<!-- [^>]+: made by .*?<!-- end -->", re.S)
    written = [generated.sub("", page.read_text()) for page in GUIDES]
    assert sum(len(text.split()) for text in written) <= 13_500
    assert len((ROOT / "CONTRIBUTING.md").read_text().split()) <= 900


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_a_guide_answers_first_and_ends_with_a_check(page: Path) -> None:
    title, answer, *_ = re.split(r"\n\s*\n", page.read_text())
    assert title.endswith("?")
    assert len(re.split(r"(?<=[.!?])\s", answer)) <= 3
    assert re.findall(r"^## (.*)$", strip_code(page), re.M)[-1] == "Did it work?"


@pytest.mark.parametrize("words", SEARCHED)
def test_what_users_look_for_stands_in_a_guide(words: str) -> None:
    text = " ".join(" ".join(page.read_text() for page in GUIDES).split())
    assert words.lower() in text.lower()


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 135


def test_the_readme_says_of_engines_what_the_page_on_engines_says() -> None:
    words = {"works": "works", "dropped": "not used", "refused": "refused", "misread": "misread"}
    page = (DOCS / "formats.md").read_text()
    for form in ("kv-overlay", "kv-overlay-head", "vllm-json"):
        brief, full = (
            re.findall(rf"^\| `{form}`.*?\| (.*) \|$", text, re.M)[0].split(" | ")
            for text in (README, page)
        )
        said = [words[re.split(r"[ ,]", cell)[0]] for cell in full]
        assert [re.sub(r" \(.*\)", "", cell) for cell in brief] == said, form


def test_the_readme_shows_the_figures_of_the_page_on_results() -> None:
    shown = re.findall(r"^\| `(fp8-\w+|w8a16)` \| (\d+ MB) \| (.*?) \| (.*?) \|$", README, re.M)
    assert len(shown) == 3
    page = (DOCS / "results.md").read_text()
    for scheme, size, ratio, kld in shown:
        (row,) = re.findall(rf"^\| `{scheme}` \|.*{re.escape(size)}.*$", page, re.M)
        assert {ratio, kld} <= {cell.strip() for cell in row.split("|")}, scheme


needs_mkdocs = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material")),
    reason="the extra docs (mkdocs-material) is not installed",
)


@needs_mkdocs
def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    config = ROOT / "scripts" / "mkdocs.yml"
    command = (sys.executable, "-m", "mkdocs", "build", "--strict")
    offline = {f"{scheme}_proxy": "http://127.0.0.1:9" for scheme in ("http", "https")}
    built = subprocess.run(
        [*command, "--config-file", str(config), "--site-dir", str(tmp_path)],
        env={**os.environ, **offline, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    names = ["engines", "python-reference", *(page.stem for page in DOCS.glob("*.md"))]
    pages = [tmp_path / "index.html", *(tmp_path / name for name in names)]
    assert [page for page in pages if not page.exists()] == []
    start = (tmp_path / "index.html").read_text()
    assert 'src="http' not in start
    assert 'href="site.css"' in start
    assert "pre-wrap" in (tmp_path / "site.css").read_text()
    index = json.loads((tmp_path / "search" / "search_index.json").read_text())
    texts = [f"{page['title']} {page['text']}".lower() for page in index["docs"]]
    for words in SEARCHED:
        assert any(words.lower() in text for text in texts), words
    assert 'rel="stylesheet" href="http' not in start
