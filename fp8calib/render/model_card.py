"""A model card as Markdown: what a folder is, what it costs, who serves it, how it was made."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from fp8calib.blocks import Table
from fp8calib.checkpoint.disk import format_size
from fp8calib.dialects.kv.kv_scales import KV_SCALES
from fp8calib.engines.registry import find_replayed
from fp8calib.errors import shorten
from fp8calib.jobs.card.facts import CardFacts, Loss, find_version
from fp8calib.jobs.quantization.servable import find_fault, find_load_fault
from fp8calib.render.templates import MARKDOWN
from fp8calib.render.verify_tables import tabulate_caches
from fp8calib.results.check import CheckResult
from fp8calib.verification.report import SCALE_ONE, SERVER, CandidateResult, candidates_table


def render_card(
    facts: CardFacts,
    base: str,
    repo: str,
    report: CheckResult | None,
    fields: Mapping[str, Any],
    *,
    receipt: str = "",
) -> str:
    """Write what is recorded about a folder as Markdown.

    Args:
        facts: what is recorded.
        base: the Hub id of the unquantized model.
        repo: the Hub id that the folder is published under.
        report: what the engines do with it; None if they were not asked.
        fields: the first keys of the front matter.
        receipt: the block of a receipt; empty without one.
    """
    pack = KV_SCALES.path_pattern in (each.name for each in facts.files)
    runs = (facts.calibration, *facts.losses)
    commands = dict.fromkeys(found.command for found in runs if found is not None and found.command)
    return MARKDOWN.get_template("card.md.jinja").render(
        front_matter=yaml.safe_dump(
            _make_front_matter(facts, base, repo, fields), sort_keys=False, allow_unicode=True
        ),
        title=repo.rpartition("/")[2],
        summary=_summarize(facts, base),
        losses=[(loss, *_tabulate(loss)) for loss in facts.losses],
        receipt=receipt,
        is_pack=pack,
        repo=repo,
        engines=None
        if report is None
        else Table(
            columns=["engine", "version", "uses it", "KV scales used", "note"],
            rows=list(_list_engines(facts, repo, report)),
        ),
        serving=[] if report is None else list(_list_commands(facts, repo, report)),
        making=list(_list_making(facts)),
        commands=list(map(wrap_command, commands)),
        size=format_size(sum(each.size_bytes for each in facts.files)),
        files=Table(
            columns=["file", "size", "SHA-256"],
            rows=[
                [f"`{f.name}`", format_size(f.size_bytes), f"`{f.sha256[:16]}`"]
                for f in facts.files
            ],
        ),
    )


def _make_front_matter(
    facts: CardFacts, base: str, repo: str, fields: Mapping[str, Any]
) -> dict[str, Any]:
    tags = ["fp8", "fp8calib", *filter(None, [facts.quant_method])]
    matter = {**fields, "base_model": base, "base_model_relation": "quantized"}
    if facts.is_checkpoint:
        matter["library_name"] = "transformers"
    matter["tags"] = list(dict.fromkeys(tags))
    if facts.losses:
        results = [_make_result(loss) for loss in facts.losses]
        matter["model-index"] = [{"name": repo.rpartition("/")[2], "results": results}]
    return matter


def _make_result(loss: Loss) -> dict[str, Any]:
    """Make a result of `model-index`, by which the Hub lists figures."""
    how, own = f"emulated as {loss.engine} computes", loss.own
    figures = (
        ("perplexity-ratio", "Perplexity ratio", own.ppl_ratio, own.ppl_ratio_se),
        ("kl-divergence", "Mean KL divergence in nats", own.kld_mean, own.kld_se),
        ("top-1-agreement", "Top-1 agreement", own.top1_agreement, _share_se(loss)),
    )
    data = ", ".join(loss.report.data)
    return {
        "task": {"type": "text-generation"},
        "dataset": {"type": "text", "name": f"{data}, {loss.report.tokens:,} tokens"},
        "metrics": [
            {
                "type": kind,
                "name": f"{name} (standard error {_format_se(se)}), {how}",
                "value": round(value, 6),
                "verified": False,
            }
            for kind, name, value, se in figures
            if value is not None
        ],
    }


def _share_se(loss: Loss) -> float | None:
    """Compute the error of the top-1 agreement, as of independent tokens."""
    share = loss.own.top1_agreement
    return None if share is None else math.sqrt(share * (1 - share) / loss.report.tokens)


def _format_se(se: float | None) -> str:
    return "unknown" if se is None else f"{se:.2g}"


def _summarize(facts: CardFacts, base: str) -> str:
    parts = [facts.weights] if facts.weights else []
    parts += ["scales for an FP8 KV cache"] if facts.has_kv_scales else []
    what = " and ".join(parts)
    version = find_version(facts)
    by = f" Made with fp8calib {version}." if version else ""
    link = f"[{base}](https://huggingface.co/{base})"
    if facts.is_checkpoint:
        return f"{link} with {what}.{by}"
    return f"{what[0].upper()}{what[1:]} of {link}; the weights are there.{by}"


def _tabulate(loss: Loss) -> tuple[Table, Table | None]:
    """Make the tables of the folder and of what it was compared with, and of their KV caches."""
    note = ", with warnings" if loss.report.warnings else ""
    compared = [loss.own, *loss.others]

    def name(each: CandidateResult) -> str:
        return "**this**" if each is loss.own else _name(each)

    figures = candidates_table(
        compared,
        name=name,
        verdict=lambda each: f"{each.verdict} ({each.gate}){note}",
        tokens=loss.report.tokens,
    )
    return figures, tabulate_caches(compared, name=name)


def _name(candidate: CandidateResult) -> str:
    if candidate.name == SCALE_ONE:
        return "KV cache at scale 1.0"
    if candidate.name == SERVER:
        return "a running server, not emulated"
    cache_type, sign, path = candidate.name.partition(" with ")
    if candidate.has_own_type and sign:
        return f"`{cache_type} with {shorten(Path(path).name)}`"
    return f"`{shorten(Path(candidate.name).name)}`"


def _list_engines(facts: CardFacts, repo: str, report: CheckResult) -> Iterator[list[str]]:
    place = rf"(?<![\w./-]){re.escape(str(facts.folder))}(?=[/:])"
    for key, found in report.engines.items():
        used = sum(layer.ok for layer in found.layers)
        kv = f"{used} of {len(found.layers)} layers" if facts.has_kv_scales else "-"
        why = find_load_fault(found) or find_fault(found) or next(iter(found.problems), "")
        why = re.sub(place, repo, shorten(why))
        yield [key, found.version, "yes" if found.ok else "no", kv, why]


def _list_commands(facts: CardFacts, repo: str, report: CheckResult) -> Iterator[str]:
    for key, found in report.engines.items():
        launch = find_replayed(key).launch
        if found.ok and launch is not None and facts.is_checkpoint:
            yield launch.spell(repo, has_kv=facts.has_kv_scales)


def _list_making(facts: CardFacts) -> Iterator[str]:
    if (run := facts.calibration) is not None:
        data = ", ".join(run.data)
        yield f"Calibrated on {run.tokens:,} tokens of {data}, in sequences of {run.seq_len}"
    for name, digest in _list_hashes(facts):
        yield f"{name}: SHA-256 `{digest[:16]}...`"
    for made in filter(None, (loss.report.provenance for loss in facts.losses)):
        versions = ", ".join(f"{name} {version}" for name, version in made.versions.items())
        yield f"Measured on {made.date} with {versions}"


def _list_hashes(facts: CardFacts) -> Iterator[tuple[str, str]]:
    if facts.origin is not None:
        yield "The calibrated model", facts.origin.model
        if facts.origin.data:
            yield "The calibration text", facts.origin.data
    for made in filter(None, (loss.report.provenance for loss in facts.losses)):
        yield "The text of the loss", made.data_hash


def wrap_command(command: str, width: int = 76) -> str:
    """Break a command line before its options, so that it fits the column of a page."""
    groups: list[list[str]] = []
    for word in shlex.split(command):
        if not groups or word.startswith("--"):
            groups.append([])
        groups[-1].append(word)
    lines: list[str] = []
    for part in map(shlex.join, groups):
        if lines and len(lines[-1]) + 1 + len(part) <= width - 2:
            lines[-1] += f" {part}"
        else:
            lines.append(f"    {part}" if lines else part)
    return " \\\n".join(lines)
