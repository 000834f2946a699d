"""Add pages of the repository, those on engines and Python, and JSON schemas to the site."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # mkdocs runs this file outside of any package
from scripts import engine_page, json_schemas, python_page  # noqa: E402

PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
_LINK = re.compile(r"\[([^\]]*)\]\(([^)#:]+)(#[^)]*)?\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add each page under its name on the site."""
    files.append(File.generated(config, "engines.md", content=engine_page.make_page()))
    files.append(File.generated(config, "python-reference.md", content=python_page.make_page()))
    for name, schema in json_schemas.make_schemas().items():
        text = json.dumps(schema, indent=2)
        files.append(File.generated(config, f"schemas/{name}.json", content=text))
    for name, target in PAGES.items():
        files.append(File.generated(config, target, content=move_links((ROOT / name).read_text())))
    return files


def move_links(text: str) -> str:
    """Make links relative to docs/; of a file that is no page of the site the text remains."""

    def move(found: re.Match[str]) -> str:
        label, path, anchor = found[1], found[2], found[3] or ""
        if path.startswith("docs/"):
            return f"[{label}]({path.removeprefix('docs/')}{anchor})"
        return f"[{label}]({PAGES[path]}{anchor})" if path in PAGES else label

    return _LINK.sub(move, text)
