"""The documentation site builds without a warning and without a network."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT
from tests.docs.test_pages import SEARCHED

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
