"""llms.txt and the skill page are what the documentation and the requests say."""

from __future__ import annotations

import re

import yaml

from scripts.llms import make_llms, make_skill
from scripts.reference import list_requests
from tests.docs.pages import DOCS, compare_generated

MAKER = "tests/docs/test_llms.py"


def test_llms_txt_is_made_of_the_pages() -> None:
    compare_generated(DOCS / "llms.txt", make_llms(), maker=MAKER)


def test_llms_txt_has_a_title_a_summary_and_links_that_lead_somewhere() -> None:
    lines = make_llms().splitlines()
    assert lines[0] == "# fp8calib"
    assert lines[2].startswith("> ")
    links = re.findall(r"^- \[[^\]]+\]\(([^)]+)\): \S.*$", "\n".join(lines), re.M)
    assert {path.name for path in DOCS.glob("*.md")} == set(links)
    assert all(re.match(r"$|# |> |## |- \[", line) for line in lines)


def test_the_skill_page_is_made_of_the_requests() -> None:
    compare_generated(DOCS / "skill.md", make_skill(), maker=MAKER)


def test_the_skill_page_names_every_command_and_exit_code() -> None:
    page = make_skill()
    matter = yaml.safe_load(page.split("---\n")[1])
    assert matter["name"] == "fp8calib"
    assert 0 < len(matter["description"]) <= 1024
    assert re.findall(r"^\| `([\w-]+)` \| .*? \| `fp8calib \1\b", page, re.M) == list(
        list_requests()
    )
    assert "| 8 |" in page
    assert "| 9 |" in page
