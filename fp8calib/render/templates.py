"""The templates of pages: Markdown, and HTML, in which all text is escaped."""

from __future__ import annotations

from jinja2 import BaseLoader, Environment, PackageLoader, StrictUndefined

from fp8calib.blocks import Table


def _make_environment(loader: BaseLoader, *, escapes: bool) -> Environment:
    return Environment(
        loader=loader,
        autoescape=escapes,  # noqa: S701 -- Markdown is not escaped
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )


def _make_markdown_table(table: Table) -> str:
    """Write a table as Markdown."""
    rows = ([cell.replace("|", r"\|") for cell in row] for row in table.texts)
    return "\n".join(
        f"| {' | '.join(row)} |" for row in (table.columns, ["---"] * len(table.columns), *rows)
    )


HTML = _make_environment(PackageLoader(__package__, ""), escapes=True)
MARKDOWN = _make_environment(PackageLoader(__package__, ""), escapes=False)
MARKDOWN.filters["table"] = _make_markdown_table
