"""Write the model card of a folder: what it is, what it costs, who serves it, how it was made."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import fields as fields_of
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined

from fp8calib.api.card.facts import CARD_NAME, CardFacts, Loss, find_version, read_facts
from fp8calib.api.card.source import read_source_fields
from fp8calib.api.check import check
from fp8calib.checkpoint.atomic import check_output_file, format_size, write_file_atomic
from fp8calib.dialects.kv.kv_scales import KV_SCALES
from fp8calib.engines.registry import find_replayed, list_defaults
from fp8calib.engines.replay.verdicts import CheckReport
from fp8calib.errors import UsageError, shorten
from fp8calib.jobs.arguments import checked
from fp8calib.jobs.quantization.servable import find_fault, find_load_fault
from fp8calib.verification.report import (
    SCALE_ONE,
    SERVER,
    CandidateResult,
    format_error,
    format_kld,
)

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A model card that was written."""

    path: Path
    text: str = field(repr=False)
    upload: str
    """The command that uploads the folder."""
    warnings: tuple[str, ...] = ()
    """That no licence is known; why reports that were found have no loss of the folder, if no other
    report has one; and where no engine uses what the folder holds."""


@checked
def card(
    folder: str | Path,
    *,
    verify_reports: Sequence[str | Path] = (),
    base_model: str | None = None,
    repo: str | None = None,
    quantized_by: str | None = None,
    model: str | Path | None = None,
    force: bool = False,
) -> Card:
    """Write a model card (README.md) into a folder, from what is recorded there.

    The same inputs give the same bytes.

    Args:
        folder: an FP8 checkpoint, an overlay, or a folder of files of KV scales.
        verify_reports: files that `verify --json` printed; the report of `auto` is found by itself.
        base_model: the Hub id of the unquantized model; None takes the one in a report.
        repo: the Hub id of the folder; None is a placeholder and the folder's name.
        quantized_by: who made it, for the front matter.
        model: the unquantized model's folder, whose layers are checked; files of scales need it.
        force: replace a README.md.

    Raises:
        UsageError: the folder or a report cannot be used, README.md exists, or the base is unknown.
        ModelError: a file is damaged, or a report is of another model.
        ExportError: the file cannot be written.
    """
    folder = Path(folder)
    facts = read_facts(folder, [Path(path) for path in verify_reports])
    path = folder / CARD_NAME
    if path.is_symlink():
        raise UsageError(
            f"{path}: a symbolic link to {path.readlink()}",
            hint="remove the link: writing would change the file that it names",
        )
    check_output_file(path, force=force)
    base = base_model or _find_base(facts)
    if not _HUB_ID.fullmatch(base):
        raise UsageError(f"--base-model {base}: no Hub id, such as org/name")
    name = repo or f"YOUR-NAME/{_spell_as_id(folder.resolve().name)}"
    if not _HUB_ID.fullmatch(name):
        raise UsageError(f"--repo {name}: no Hub id, such as org/name")
    report = _check(facts, model)
    source = _find_source(facts, model)
    fields = read_source_fields(folder, source, base)
    warnings = [] if fields.get("license") else ["no licence is known: add `license:` to the card"]
    if quantized_by is not None:
        fields["quantized_by"] = quantized_by
    text = _render(facts, base, name, report, fields)
    write_file_atomic(path, text.encode())
    warnings += [] if facts.losses else facts.other_reports
    if report is not None and not any(found.ok for found in report.engines.values()):
        engines = ", ".join(report.engines)
        warnings += [f"none of {engines} uses all of {folder}: see fp8calib check {folder}"]
    return Card(
        path=path,
        text=text,
        upload=f"hf upload {name} {shlex.quote(str(folder))}",
        warnings=tuple(warnings),
    )


def _find_source(facts: CardFacts, model: str | Path | None) -> Path | None:
    """Find the folder of the unquantized model, as it was named now or in a report."""
    names = [str(model)] if model is not None else [loss.model for loss in facts.losses]
    return next((Path(name) for name in names if Path(name).is_dir()), None)


def _spell_as_id(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "MODEL"


def _find_base(facts: CardFacts) -> str:
    names = [loss.model for loss in facts.losses]
    found = next((n for n in names if _HUB_ID.fullmatch(n) and not Path(n).exists()), None)
    if found is None:
        raise UsageError(
            f"{facts.folder}: no Hub id of the unquantized model is recorded",
            hint="add --base-model ORG/NAME",
        )
    return found


def _check(facts: CardFacts, model: str | Path | None) -> CheckReport | None:
    """Ask the engines; of files of scales, the first one, for a model that is named."""
    if facts.is_checkpoint:
        return check(facts.folder, engine=list_defaults(), model=model)
    files = [each.name for each in facts.files if each.name.endswith((".safetensors", ".json"))]
    if model is None:
        return None
    return check(facts.folder / files[0], engine=list_defaults(), model=model)


def _render(
    facts: CardFacts, base: str, repo: str, report: CheckReport | None, fields: Mapping[str, Any]
) -> str:
    pack = KV_SCALES.path_pattern in (each.name for each in facts.files)
    runs = (facts.calibration, *facts.losses)
    commands = dict.fromkeys(found.command for found in runs if found is not None and found.command)
    return _TEMPLATE.render(
        front_matter=yaml.safe_dump(
            _make_front_matter(facts, base, repo, fields), sort_keys=False, allow_unicode=True
        ),
        title=repo.rpartition("/")[2],
        summary=_summarize(facts, base),
        losses=[
            {
                **{each.name: getattr(loss, each.name) for each in fields_of(loss)},
                "rows": _list_rows(loss),
            }
            for loss in facts.losses
        ],
        is_pack=pack,
        repo=repo,
        engines=None if report is None else list(_list_engines(facts, repo, report)),
        serving=[] if report is None else list(_list_commands(facts, repo, report)),
        making=list(_list_making(facts)),
        commands=list(map(wrap_command, commands)),
        size=format_size(sum(each.size_bytes for each in facts.files)),
        files=[
            [f"`{f.name}`", format_size(f.size_bytes), f"`{f.sha256[:16]}`"] for f in facts.files
        ],
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
    how = f"emulated as {loss.engine} computes"
    figures = (
        ("perplexity-ratio", "Perplexity ratio", loss.own.ppl_ratio),
        ("kl-divergence", "Mean KL divergence in nats", loss.own.kld_mean),
        ("top-1-agreement", "Top-1 agreement", loss.own.top1_agreement),
    )
    data = ", ".join(loss.data)
    return {
        "task": {"type": "text-generation"},
        "dataset": {"type": "text", "name": f"{data}, {loss.tokens:,} tokens"},
        "metrics": [
            {"type": kind, "name": f"{name}, {how}", "value": round(value, 6), "verified": False}
            for kind, name, value in figures
            if value is not None
        ],
    }


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


def _list_rows(loss: Loss) -> list[list[str]]:
    named = [(loss.own, "**this**"), *((each, _name(each)) for each in loss.others)]
    return [_make_row(found, name, loss) for found, name in named]


def _name(candidate: CandidateResult) -> str:
    if candidate.name == SCALE_ONE:
        return "KV cache at scale 1.0"
    if candidate.name == SERVER:
        return "a running server, not emulated"
    return f"`{shorten(Path(candidate.name).name)}`"


def _make_row(found: CandidateResult, name: str, loss: Loss) -> list[str]:
    return [
        name,
        f"{found.ppl_ratio:.4f} ± {format_error(found.ppl_ratio_se)}",
        format_kld(found.kld_mean),
        format_kld(found.kld_p99),
        _format_share(found.top1_agreement, loss.tokens),
        f"{found.verdict} ({found.gate}){', with warnings' if loss.warnings else ''}",
    ]


def _format_share(share: float | None, tokens: int) -> str:
    """Format a share of tokens with the standard error of independent tokens."""
    if share is None:
        return "-"
    return f"{share:.2%} ± {math.sqrt(share * (1 - share) / tokens):.2%}"


def _list_engines(facts: CardFacts, repo: str, report: CheckReport) -> Iterator[list[str]]:
    place = rf"(?<![\w./-]){re.escape(str(facts.folder))}(?=[/:])"
    for key, found in report.engines.items():
        used = sum(layer.ok for layer in found.layers)
        kv = f"{used} of {len(found.layers)} layers" if facts.has_kv_scales else "-"
        why = find_load_fault(found) or find_fault(found) or next(iter(found.problems), "")
        why = re.sub(place, repo, shorten(why))
        yield [key, report.versions[key], "yes" if found.ok else "no", kv, why]


def _list_commands(facts: CardFacts, repo: str, report: CheckReport) -> Iterator[str]:
    for key, found in report.engines.items():
        launch = find_replayed(key).launch
        if found.ok and launch is not None and facts.is_checkpoint:
            yield launch.spell(repo, has_kv=facts.has_kv_scales)


def _list_making(facts: CardFacts) -> Iterator[str]:
    for loss in facts.losses:
        yield from (f"{question} **{answer}**: {why}" for question, answer, why in loss.decisions)
    if (run := facts.calibration) is not None:
        data = ", ".join(run.data)
        yield f"Calibrated on {run.tokens:,} tokens of {data}, in sequences of {run.seq_len}"
    for name, digest in _list_hashes(facts):
        yield f"{name}: SHA-256 `{digest[:16]}...`"
    for made in filter(None, (loss.provenance for loss in facts.losses)):
        versions = ", ".join(f"{name} {version}" for name, version in made.versions.items())
        yield f"Measured on {made.date} with {versions}"


def _list_hashes(facts: CardFacts) -> Iterator[tuple[str, str]]:
    if facts.origin is not None:
        yield "The calibrated model", facts.origin.model
        if facts.origin.data:
            yield "The calibration text", facts.origin.data
    for made in filter(None, (loss.provenance for loss in facts.losses)):
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


def _make_table(rows: Iterable[Sequence[str]], titles: Sequence[str]) -> str:
    """Make a Markdown table; the filter `table` of the template."""
    listed = ([cell.replace("|", r"\|") for cell in cells] for cells in rows)
    return "\n".join(
        f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *listed)
    )


_environment = Environment(  # noqa: S701 -- Markdown
    trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
)
_environment.filters["table"] = _make_table
_TEMPLATE = _environment.from_string(
    files(__package__).joinpath("card.md.jinja").read_text(encoding="utf-8")
)
