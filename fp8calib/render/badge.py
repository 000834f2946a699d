"""What a receipt shows on a page: its badge and a block of Markdown."""

from __future__ import annotations

from fp8calib.blocks import Table
from fp8calib.errors import shorten
from fp8calib.render.templates import HTML, MARKDOWN
from fp8calib.results.receipt import Receipt
from fp8calib.verification.figures import format_mean_kld, format_ratio
from fp8calib.verification.report import SCALE_ONE, Verdict

_COLOURS = {Verdict.PASS: "#2e7d32", Verdict.NO_DIFFERENCE: "#2e7d32", Verdict.FAIL: "#b71c1c"}
_DOUBT = "#a15c00"
_CHARACTER = 7
"""Width of a character of the badge, in pixels."""
_PADDING = 10


def draw_badge(receipt: Receipt) -> str:
    """Draw the badge of the first candidate that was asked for as SVG."""
    asked = (row for row in receipt.rows if row.candidate != SCALE_ONE)
    row = next(asked, receipt.rows[0])
    left, right = (
        f"{row.how} FP8",
        f"KLD {format_mean_kld(row.kld_mean, row.kld_se)}, {row.verdict}",
    )
    widths = [len(text) * _CHARACTER + 2 * _PADDING for text in (left, right)]
    colour = _COLOURS.get(row.verdict, _DOUBT)
    return HTML.get_template("badge.svg.jinja").render(
        left=left, right=right, widths=widths, colour=colour
    )


def write_block(receipt: Receipt, *, badge: str, file: str) -> str:
    """Write the block of a card: the badge, the figures, and the command that checks them."""
    engines = ", ".join(dict.fromkeys(each.release for each in receipt.engines))
    table = Table(
        columns=["candidate", "how", "verdict", "KLD mean ± se", "ratio ± se", "noise floor"],
        rows=[
            [
                f"`{shorten(each.candidate)}`",
                each.how,
                f"{each.verdict} ({shorten(each.gate.name)})",
                format_mean_kld(each.kld_mean, each.kld_se),
                format_ratio(each.ppl_ratio, each.ppl_ratio_se),
                "-" if each.noise is None else f"{each.noise.kld:.1e}",
            ]
            for each in receipt.rows
        ],
    )
    return MARKDOWN.get_template("receipt.md.jinja").render(
        receipt=receipt, badge=badge, file=file, engines=engines, table=table
    )
