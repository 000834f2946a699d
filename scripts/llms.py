"""llms.txt and the skill page, by which coding agents learn the tool; both made from the docs.

`tests/docs/test_llms.py` compares them with what this module makes, and writes them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from scripts.reference import list_requests

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_NAME = "fp8calib"
_WHEN = (
    "Calibrate, quantize, verify and check FP8 checkpoints and FP8 KV-cache scales of Hugging Face "
    "language models for vLLM, SGLang, TGI and transformers. Use it when somebody wants an FP8 "
    "model or KV cache, wonders what FP8 costs, or has a checkpoint that an engine loads wrongly."
)
_RULES = (
    "Give the **unquantized** model to `calibrate`, `quantize`, `plan`, `auto` and `verify`. A "
    "quantized one is what they compare it with: `verify MODEL --scales FOLDER`.",
    "Start with `--dry-run` where a model has more than some billions of parameters.",
    "Add `--json` and read `passed`, `next` and `advice`.",
    "Judge by exit code. 9 is no pass.",
    "Run `check` on everything that is written, for the engine that will serve it.",
    "Quote KLD and ratio with their standard errors. A difference that the paired comparison "
    "cannot tell is none.",
    "After an interruption run the same command with `--resume`. Use `--force` only if the user "
    "wants the old output replaced.",
    "Never use `--upload` or `--trust-remote-code` unless the user asks for it.",
)


def make_llms() -> str:
    """Make llms.txt: the pages of the site, each with its heading and sections."""
    config = yaml.safe_load((ROOT / "scripts" / "mkdocs.yml").read_text())
    sections: dict[str, list[str]] = {"Begin": []}
    for entry in config["nav"]:
        for title, target in entry.items():
            pages = target if isinstance(target, list) else [entry]
            name = title if isinstance(target, list) else "Begin"
            listed = [_describe_page(*item) for page in pages for item in page.items()]
            sections.setdefault(name, []).extend(filter(None, listed))
    summary = (ROOT / "README.md").read_text().split("\n\n")[1]
    blocks = [f"# {_NAME}", f"> {' '.join(summary.split())}"]
    for name, lines in sections.items():
        blocks += [f"## {name}", "\n".join(lines)]
    return "\n\n".join(blocks) + "\n"


def make_skill() -> str:
    """Make the skill page: when to use the tool, its rules, and a line for each command."""
    matter = yaml.safe_dump({"name": _NAME, "description": _WHEN}, sort_keys=False, width=110)
    rows = [f"| `{name}` | {text} | `{example}` |" for name, text, example in _list_commands()]
    return "\n".join(
        [
            f"---\n{matter}---",
            "",
            f"# Skill: use {_NAME}",
            "",
            "Copy this page as `SKILL.md` where your coding agent looks for skills.",
            "",
            "## Rules",
            "",
            *(f"* {rule}" for rule in _RULES),
            "",
            "## Commands",
            "",
            "| command | what it does | such as |",
            "| --- | --- | --- |",
            *rows,
            "",
            "All options: `fp8calib COMMAND --help`.",
            "",
            "## Exit codes",
            "",
            _find_exit_codes(),
            "",
        ]
    )


def _describe_page(title: str, name: str) -> str:
    """Link a page; empty for one that is not in docs/."""
    path = DOCS / name
    if not path.is_file():
        return ""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)
    (heading,), parts = (re.findall(rf"^{level} (.*)$", text, re.M) for level in ("#", "##"))
    sections = f" ({'; '.join(parts)})" if parts else ""
    return f"- [{title}]({name}): {heading}{sections}"


def _list_commands() -> Iterator[tuple[str, str, str]]:
    for name, request in list_requests().items():
        text = inspect.getdoc(request) or ""
        first, example = text.partition("\n")[0], text.partition("Example: ")[2]
        yield name, first, " ".join(example.split())


def _find_exit_codes() -> str:
    page = (DOCS / "reference.md").read_text()
    found = re.search(r"^\| exit code .*?(?=\n\n)", page, re.M | re.S)
    assert found is not None  # noqa: S101 -- the page has that section
    return found[0]
