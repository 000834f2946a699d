"""A VerifyReport as one HTML page: it runs no script, loads no file and needs no network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined

from fp8calib.checkpoint.output import write_file_atomic
from fp8calib.data.sequences import DataPlan, batches
from fp8calib.numerics.histogram import lower_edge
from fp8calib.text import Table
from fp8calib.verification import tables
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.judge.fits import list_unfit
from fp8calib.verification.page import charts
from fp8calib.verification.page.charts import Curve, Figure, Point, Style
from fp8calib.verification.report import LEAST_DB, SCALE_ONE, RunProvenance, Verdict, VerifyReport
from fp8calib.verification.score import Scores
from fp8calib.verification.tables import format_kld
from fp8calib.verification.token_scores import split_sequences
from fp8calib.verification.verify import Verification

_TITLE = "FP8 verification of "
_BADGES = {
    Verdict.PASS: "\N{CHECK MARK}",
    Verdict.WARN: "!",
    Verdict.FAIL: "\N{MULTIPLICATION X}",
    Verdict.NO_DIFFERENCE: "=",
    Verdict.CANNOT_TELL: "?",
    "refused": "\N{MULTIPLICATION X}",
}
"""A verdict is never told by its colour alone."""
_MOST_WORST, _MOST_HISTOGRAMS, _MOST_RANKS = 8, 3, 100
_ROLES = {"k": "Keys", "v": "Values", "q": "Queries", "p": "Softmax"}
_ROLES |= {"input": "Inputs of linears", "weight": "Weights"}
_HTML = Environment(
    loader=PackageLoader(__package__, ""),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSection:
    """A table and figures that answer one question."""

    title: str
    lead: str = ""
    """How to read them."""
    table: Table | None = None
    figures: Sequence[Figure] = ()
    is_folded: bool = False

    @property
    def legend(self) -> list[tuple[Style, str]]:
        """The styles and names of what the figures draw."""
        return list(dict.fromkeys(key for figure in self.figures for key in figure.legend))


def render(*, provenance: RunProvenance | None, facts: Mapping[str, str], **parts: Any) -> str:
    """Render a page: `parts` are the names of the template, `facts` end it with `provenance`."""
    if provenance is not None:
        facts = {
            "Versions": ", ".join(" ".join(found) for found in provenance.versions.items()),
            "Date": provenance.date,
            "Command": provenance.command,
            **facts,
            "Hash of the model": provenance.model_hash,
            "Hash of the text": provenance.data_hash,
        }
    return _HTML.get_template("page.html.jinja").render(facts=facts, **parts)


def write_page(report: VerifyReport, path: Path, *, command: str = "") -> None:
    """Write the page atomically; `command` is the one that the conclusion asks for."""
    page = render_page(report, command=command)
    # Names of files that are not UTF-8 are surrogates here.
    write_file_atomic(path, page.encode("utf-8", "replace"))


def is_page(path: Path) -> bool:
    """Whether a file is one that `write_page` wrote."""
    with path.open("rb") as file:
        return f"<title>{_TITLE}".encode() in file.read(4096)


def render_page(report: VerifyReport, *, command: str = "") -> str:
    """Render the page as HTML."""
    data = ", ".join(report.data)
    report = report.without_idle()
    return render(
        title=_TITLE,
        subject=report.model,
        headline=report.decision.headline,
        details=report.decision.details.splitlines(),
        warnings=report.warnings,
        command=command,
        first=tables.candidates_table(report),
        badges=_BADGES,
        run=(
            f"{report.engine_version or report.engine}, emulated",
            f"{report.tokens:,} tokens in {report.sequences:,} sequences ({data})",
            f"computed in {report.dtype} on {report.device}",
            f"perplexity of the unquantized model {report.reference.ppl:.5g}",
        ),
        sections=list(list_sections(report)),
        provenance=report.provenance,
        facts={"Run": f"{report.duration_s:.0f} s on {report.device}"},
    )


def list_sections(report: VerifyReport) -> Iterator[PageSection]:
    """List the sections in their order on the page, those without content too."""
    free, names = cycle(charts.STYLES), [one.name for one in report.candidates]
    styles = {name: charts.BASELINE if name == SCALE_ONE else next(free) for name in names}
    hurt = [row for name in names for row in list_unfit(report.list_rows(name))]
    yield PageSection(
        title="KLD by sequence and by position",
        lead="A few sequences that lose more than the others are text of another kind. Where KLD "
        "rises with the position, errors in the KV cache accumulate.",
        figures=[*_draw_sequences(report, styles), *_draw_positions(report, styles)],
    )
    if (texts := report.worst_texts) is not None:
        yield PageSection(title=texts.title, table=texts)
    yield PageSection(
        title="SQNR by layer",
        lead="The signal to quantization noise ratio: higher is better, 3 dB more is half the "
        "noise. Of several tensors in a layer the worst is shown, of what loses nothing none.",
        figures=[
            _draw_layers(report, role, styles) for role in _ROLES if role in {r.role for r in hurt}
        ],
    )
    worst = [row for row in hurt or report.layers if row.sqnr_db is not None]
    worst.sort(key=lambda row: row.sqnr_db or 0.0)
    joined = tables.join_readers(worst)
    sites = dict.fromkeys(row.site.partition(" ")[0] for row in joined)
    drawn = [site for site in sites if site in report.histograms]
    yield PageSection(
        title="Tensors that lose most" if hurt else "Tensors of lowest SQNR",
        lead="The charts show all values of a tensor in calibration, divided by its scale. In the "
        "shaded ranges FP8 has no values: on the left they become zero, on the right they clip. "
        "Dashed lines are the ends of the range at scale 1.0."
        if hurt and drawn
        else "",
        table=tables.sites_table(joined[:_MOST_WORST], has_candidates=True) if worst else None,
        figures=[report.histograms[site] for site in drawn[:_MOST_HISTOGRAMS] if hurt],
        is_folded=not hurt,
    )
    rules = tables.rules_table(report.rules) if report.rules else None
    yield PageSection(title="Scale rules", table=rules)
    pairs = tables.list_shown_pairs(report)
    if rows := [[pair.candidate, pair.base, tables.describe_pair(pair)] for pair in pairs]:
        columns = ["candidate", "against", "difference of KLD ± se"]
        table = Table(columns=columns, rows=rows, words=(0, 1, 2))
        yield PageSection(title="Candidates in pairs", table=table, is_folded=True)


def _draw_sequences(report: VerifyReport, styles: Mapping[str, Style]) -> list[Figure]:
    """Draw the divergences of sequences, or of a hundred, those of every candidate sorted."""
    ranked = {name: sorted(klds, reverse=True) for name, klds in report.sequence_klds.items()}
    ranked = {name: klds for name, klds in ranked.items() if len(klds) > 1 and klds[0] > 0}
    if not ranked:
        return []
    count = max(map(len, ranked.values()))
    ranks = range(0, count, math.ceil(count / _MOST_RANKS))
    curves = [
        Curve(name, styles[name], [Point(klds[r] or None, format_kld(klds[r])) for r in ranks])
        for name, klds in ranked.items()
    ]
    places = [(str(r + 1), f"number {r + 1} of {count}") for r in ranks]
    x_title = "sequences, the largest KLD first"
    return [charts.place_chart("KLD by sequence", places, curves, x_title=x_title, joined=True)]


def _draw_positions(report: VerifyReport, styles: Mapping[str, Style]) -> list[Figure]:
    known = [one for one in report.candidates if any(row.kld_mean for row in one.by_position)]
    ranges = max((one.by_position for one in known), key=len, default=())
    places = [(str(row.first), f"positions {row.first} to {row.last}") for row in ranges]
    curves = [charts.kld_curve(one.name, styles[one.name], one.by_position) for one in known]
    x_title = "first position of the range"
    return [charts.place_chart("KLD by position", places, curves, x_title=x_title)] if known else []


def _draw_layers(report: VerifyReport, role: str, styles: Mapping[str, Style]) -> Figure:
    """Draw the worst SQNR of each layer and candidate."""
    worst: dict[tuple[str, int], float | None] = {}
    for row in report.layers:
        if row.role == role:
            dbs = [row.sqnr_db, worst.get((row.candidate, row.layer))]
            worst[row.candidate, row.layer] = min((x for x in dbs if x is not None), default=None)
    layers = sorted({layer for _, layer in worst})
    known = {name: [worst.get((name, layer)) for layer in layers] for name in styles}
    curves = [
        Curve(name, style, [Point(db, "-" if db is None else f"{db:.1f} dB") for db in known[name]])
        for name, style in styles.items()
    ]
    return charts.place_chart(
        _ROLES[role],
        [(str(layer), f"layer {layer}") for layer in layers],
        curves,
        x_title="layer",
        y=charts.DB_AXIS,
        joined=True,
        floor=(LEAST_DB, f"below {LEAST_DB:.0f} dB the tensor is lost"),
    )


# --- what the page alone shows of a verification --------------------------------------------------

_MOST_TEXTS, _TOKENS_BEFORE = 5, 24


def list_shown_on_page(
    asked: Verification, report: VerifyReport, scores: Scores, decode: Callable[[list[int]], str]
) -> dict[str, object]:
    """List the fields of a report that the page alone shows.

    The texts that lose most are quoted for the candidate that the decision is about.
    """
    klds = {
        each.name: list(split_sequences(scores.candidates[each.name].klds, asked.plan.lengths))
        for each in asked.candidates
    }
    means = {
        name: tuple(float(each.double().mean()) for each in parts) for name, parts in klds.items()
    }
    name = report.decision.candidate or report.candidates[0].name
    return {
        "histograms": dict(_draw_histograms(asked)),
        "sequence_klds": means,
        "worst_texts": _quote_texts(name, klds[name], means[name], asked.plan, decode),
    }


def _draw_histograms(asked: Verification) -> Iterator[tuple[str, Figure]]:
    """Draw what the first statistics saw at the sites that its candidate scales statically."""
    candidate = next((each for each in asked.candidates if each.stats is not None), Candidate())
    for site, quantizer in candidate.quantizers.items():
        seen = None if candidate.stats is None else candidate.stats.sites.get(site)
        if seen is None or seen.histogram is None or not isinstance(quantizer.scale, torch.Tensor):
            continue
        filled = seen.histogram[1:].nonzero().flatten() + 1
        if len(filled):
            scale, fmt = float(quantizer.scale.max()), quantizer.fmt
            bins = range(int(filled[0]), int(filled[-1]) + 1)
            counts = {math.log2(lower_edge(index)): int(seen.histogram[index]) for index in bins}
            ends = scale * fmt.smallest_subnormal / 2, scale * fmt.max
            yield str(site), charts.histogram(str(site), counts, scale, ends)


def _quote_texts(
    name: str,
    klds: Sequence[torch.Tensor],
    means: Sequence[float],
    plan: DataPlan,
    decode: Callable[[list[int]], str],
) -> Table | None:
    """Quote the sequences that lose most, each up to the token that loses most."""
    text, rows = list(batches(plan, 1)), []
    for index in sorted(range(len(klds)), key=lambda index: -means[index])[:_MOST_TEXTS]:
        if not means[index] > 0:
            break
        worst = int(klds[index].argmax())
        at = int(text[index].scored[0][worst]) + 1
        ids = plan.sequences[index][max(at - _TOKENS_BEFORE, 0) : at + 1].tolist()
        before = f"{'... ' * (at > _TOKENS_BEFORE)}{decode(ids[:-1])}"
        figures = format_kld(means[index]), decode(ids[-1:]), format_kld(float(klds[index][worst]))
        rows.append([str(index + 1), *figures, before])
    columns = ["sequence", "KLD mean", "worst token", "its KLD", "text before it"]
    title = f"Texts that lose most with {name}"
    return Table(title=title, columns=columns, rows=rows, words=(2, 4)) if rows else None
