"""Write the model card of a folder: what it is, what it costs, who serves it, how it was made."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fp8calib.api.arguments import checked
from fp8calib.api.card.facts import CARD_NAME, CardFacts, Loss, find_version, read_facts
from fp8calib.api.check import check
from fp8calib.api.quantize.servable import find_fault, find_load_fault
from fp8calib.checkpoint.atomic import check_output_file, format_size, write_file_atomic
from fp8calib.dialects.kv.kv_scales import KV_SCALES
from fp8calib.engines.registry import find_replayed, list_defaults
from fp8calib.engines.replay.verdicts import CheckReport
from fp8calib.errors import UsageError, shorten
from fp8calib.verification.report import SCALE_ONE, CandidateResult, format_error, format_kld

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A model card that was written."""

    path: Path
    text: str
    upload: str
    """The command that uploads the folder."""
    warnings: tuple[str, ...] = ()
    """Why reports that were found have no loss of the folder, if no other report has one; and where
    no engine uses what the folder holds."""


@checked
def card(
    folder: str | Path,
    *,
    verify_reports: Sequence[str | Path] = (),
    base_model: str | None = None,
    repo: str | None = None,
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
    text = "\n".join(_describe(facts, base, name, report)) + "\n"
    write_file_atomic(path, text.encode())
    warnings = [] if facts.losses else [*facts.other_reports]
    if report is not None and not any(found.ok for found in report.engines.values()):
        engines = ", ".join(report.engines)
        warnings += [f"none of {engines} uses all of {folder}: see fp8calib check {folder}"]
    return Card(
        path=path,
        text=text,
        upload=f"hf upload {name} {shlex.quote(str(folder))}",
        warnings=tuple(warnings),
    )


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


def _describe(facts: CardFacts, base: str, repo: str, report: CheckReport | None) -> Iterator[str]:
    yield from _list_front_matter(facts, base)
    yield f"# {repo.rpartition('/')[2]}"
    yield ""
    yield _summarize(facts, base)
    for loss in facts.losses:
        yield from _describe_loss(loss)
    if not facts.losses:
        yield from ("", "## Loss", "", "Not measured.")
    yield from _describe_engines(facts, repo, report)
    yield from _describe_making(facts)
    yield from ("", "## Files", "")
    rows = ([f"`{f.name}`", format_size(f.size_bytes), f"`{f.sha256}`"] for f in facts.files)
    yield from _make_table(["file", "size", "SHA-256"], rows)


def _list_front_matter(facts: CardFacts, base: str) -> Iterator[str]:
    tags = ["fp8", "fp8calib", *filter(None, [facts.quant_method])]
    yield from ("---", f"base_model: {base}", "base_model_relation: quantized")
    if facts.is_checkpoint:
        yield "library_name: transformers"
    yield "tags:"
    yield from (f"- {tag}" for tag in dict.fromkeys(tags))
    yield from ("---", "")


def _summarize(facts: CardFacts, base: str) -> str:
    parts = ["FP8 weights"] if facts.has_fp8_weights else []
    parts += ["scales for an FP8 KV cache"] if facts.has_kv_scales else []
    what = " and ".join(parts)
    version = find_version(facts)
    by = f" Made with fp8calib {version}." if version else ""
    link = f"[{base}](https://huggingface.co/{base})"
    if facts.is_checkpoint:
        return f"{link} with {what}.{by}"
    return f"{what[0].upper()}{what[1:]} of {link}; the weights are there.{by}"


def _describe_loss(loss: Loss) -> Iterator[str]:
    yield from ("", f"## Loss in {loss.engine}", "")
    yield (
        f"Compared with the unquantized model token by token, as {loss.engine} computes: "
        f"{loss.tokens:,} tokens of {', '.join(loss.data)}, in sequences of {loss.seq_len}, in "
        f"{loss.dtype}. The perplexity of the unquantized model is {loss.ppl:.4f}. Errors are "
        "standard errors."
    )
    yield ""
    rows = [_make_row(loss.own, "**this**", loss.tokens)]
    rows += [_make_row(each, _name(each), loss.tokens) for each in loss.others]
    titles = ["", "perplexity ratio", "mean KLD, nats", "99th percentile", "top-1", "verdict"]
    yield from _make_table(titles, rows)


def _name(candidate: CandidateResult) -> str:
    if candidate.name == SCALE_ONE:
        return "KV cache at scale 1.0"
    return f"`{shorten(Path(candidate.name).name)}`, emulated"


def _make_row(found: CandidateResult, name: str, tokens: int) -> list[str]:
    return [
        name,
        f"{found.ppl_ratio:.4f} ± {format_error(found.ppl_ratio_se)}",
        format_kld(found.kld_mean),
        format_kld(found.kld_p99),
        _format_share(found.top1_agreement, tokens),
        f"{found.verdict} ({found.gate})",
    ]


def _format_share(share: float | None, tokens: int) -> str:
    """Format a share of tokens with the standard error of independent tokens."""
    if share is None:
        return "-"
    return f"{share:.2%} ± {math.sqrt(share * (1 - share) / tokens):.2%}"


def _describe_engines(facts: CardFacts, repo: str, report: CheckReport | None) -> Iterator[str]:
    yield from ("", "## Engines", "")
    if KV_SCALES.path_pattern in (each.name for each in facts.files):
        yield "Add them to the model, or to a checkpoint that was quantized from it:"
        command = f"fp8calib extract-kv-scales --quantized-model {repo} --model MODEL"
        yield from ("", "```sh", f"{command} --save-path OUT", "```", "")
    if report is None:
        yield "`fp8calib check FILE --model MODEL` tells what each engine does with a file."
        return
    yield "What `fp8calib check` replays of each engine's loading rules:"
    yield ""
    rows = []
    place = rf"(?<![\w./-]){re.escape(str(facts.folder))}(?=[/:])"
    for key, found in report.engines.items():
        used = sum(layer.ok for layer in found.layers)
        kv = f"{used} of {len(found.layers)} layers" if facts.has_kv_scales else "-"
        why = find_load_fault(found) or find_fault(found) or next(iter(found.problems), "")
        why = re.sub(place, repo, shorten(why)).replace("|", r"\|")
        rows.append([key, report.versions[key], "yes" if found.ok else "no", kv, why])
    yield from _make_table(["engine", "version", "uses it", "KV scales used", "note"], rows)
    commands = list(_list_commands(facts, repo, report))
    if commands:
        yield from ("", "```sh", *commands, "```")


def _list_commands(facts: CardFacts, repo: str, report: CheckReport) -> Iterator[str]:
    for key, found in report.engines.items():
        launch = find_replayed(key).launch
        if found.ok and launch is not None and facts.is_checkpoint:
            yield launch.spell(repo, has_kv=facts.has_kv_scales)


def _describe_making(facts: CardFacts) -> Iterator[str]:
    yield from ("", "## How it was made", "")
    yield from list(_list_making(facts)) or ["Not recorded."]
    commands = [found.command for found in (facts.calibration, *facts.losses) if found is not None]
    if any(commands):
        yield from ("", "```sh", *dict.fromkeys(filter(None, commands)), "```")


def _list_making(facts: CardFacts) -> Iterator[str]:
    for loss in facts.losses:
        yield from (f"* {question} **{answer}**: {why}" for question, answer, why in loss.decisions)
    if (run := facts.calibration) is not None:
        data = ", ".join(run.data)
        yield f"* Calibrated on {run.tokens:,} tokens of {data}, in sequences of {run.seq_len}"
    if facts.origin is not None:
        what = "the calibrated model (its config, and samples of each tensor)"
        yield f"* SHA-256 of {what}: `{facts.origin.model}`"
        if facts.origin.data:
            yield f"* SHA-256 of the tokens that it was calibrated on: `{facts.origin.data}`"
    for made in filter(None, (loss.provenance for loss in facts.losses)):
        yield f"* SHA-256 of the tokens that the loss was measured on: `{made.data_hash}`"
        versions = ", ".join(f"{name} {version}" for name, version in made.versions.items())
        yield f"* Measured on {made.date} with {versions}"


def _make_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for cells in (titles, ["---"] * len(titles), *rows):
        yield f"| {' | '.join(cells)} |"
