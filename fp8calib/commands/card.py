"""Write the model card of a folder that is to be published."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from fp8calib.checkpoint.atomic import check_output_file, write_file_atomic
from fp8calib.commands.check import run as check
from fp8calib.engines.registry import find_replayed, list_defaults
from fp8calib.errors import ModelError, UsageError, VerificationError
from fp8calib.jobs.card.cookbook import make_sglang_block, make_vllm_recipe, measure_size
from fp8calib.jobs.card.facts import CARD_NAME, CardFacts, read_card_facts
from fp8calib.jobs.card.source import read_source_fields
from fp8calib.jobs.function import as_function
from fp8calib.jobs.hub import HUB_ID, check_push, push_folder
from fp8calib.jobs.receipt.check import compare_files, read_receipt
from fp8calib.jobs.receipt.make import hash_model
from fp8calib.jobs.receipt.signature import SUFFIXES
from fp8calib.jobs.reporter import Reporter
from fp8calib.render.badge import draw_badge, write_block
from fp8calib.render.model_card import render_card
from fp8calib.requests.card import CardRequest
from fp8calib.requests.check import CheckRequest
from fp8calib.results.card import CardResult
from fp8calib.results.check import CheckResult
from fp8calib.results.receipt import Receipt

RECEIPT_NAME = "receipt.json"
BADGE_NAME = "receipt.svg"


def run(request: CardRequest, reporter: Reporter) -> CardResult:
    """Write a model card (README.md) into a folder, from what is recorded there.

    The same inputs give the same bytes.

    Raises:
        UsageError: the folder or a report cannot be used, README.md exists, or the base is unknown.
        ModelError: a file is damaged, or a report is of another model.
        VerificationError: vLLM loads nothing that a recipe could name.
        ExportError: the file cannot be written, or the Hub refuses the upload.
    """
    folder, model = Path(request.folder), request.model
    check_push(request.push, uploads=request.upload)
    reports = [Path(path) for path in request.verify_reports or ()]
    facts = read_card_facts(folder, reports)
    path = folder / CARD_NAME
    if path.is_symlink():
        raise UsageError(
            f"{path}: a symbolic link to {path.readlink()}",
            hint="remove the link: writing would change the file that it names",
        )
    check_output_file(path, force=request.force)
    base = request.base_model or _find_base(facts)
    if not HUB_ID.fullmatch(base):
        raise UsageError(f"--base-model {base}: no Hub id, such as org/name")
    name = request.repo or request.push or f"YOUR-NAME/{_spell_as_id(folder.resolve().name)}"
    if not HUB_ID.fullmatch(name):
        raise UsageError(f"--repo {name}: no Hub id, such as org/name")
    report = _check(facts, model, reporter)
    source = _find_source(facts, model)
    fields = read_source_fields(folder, source, base)
    warnings = [] if fields.get("license") else ["no licence is known: add `license:` to the card"]
    if request.quantized_by is not None:
        fields["quantized_by"] = request.quantized_by
    entries = dict(_make_entries(request, facts, base, name, reporter))
    receipt = None if request.receipt is None else _read_receipt(Path(request.receipt), folder)
    block = ""
    if receipt is not None:
        _copy_receipt(Path(request.receipt or ""), receipt, folder, force=request.force)
        block = write_block(receipt, badge=BADGE_NAME, file=RECEIPT_NAME)
        facts = read_card_facts(folder, reports)
    text = render_card(facts, base, name, report, fields, receipt=block)
    write_file_atomic(path, text.encode())
    for place, entry in entries.items():
        write_file_atomic(place, _spell_yaml(entry).encode())
    if report is not None and not any(found.ok for found in report.engines.values()):
        engines = ", ".join(report.engines)
        warnings += [f"none of {engines} uses all of {folder}: see `fp8calib check {folder}`"]
    for warning in warnings:
        reporter.warn(warning)
    return CardResult(
        path=path,
        text=text,
        upload=f"hf upload {name} {shlex.quote(str(folder))}",
        warnings=tuple(warnings),
        entries=tuple(entries),
        push=None
        if request.push is None
        else push_folder(folder, request.push, reporter, uploads=request.upload),
    )


def _make_entries(
    request: CardRequest, facts: CardFacts, base: str, repo: str, reporter: Reporter
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Make the entries of the engines' collections that are asked for.

    Raises:
        UsageError: the folder holds scales alone, or a file exists.
        VerificationError: vLLM does not load the folder.
    """
    places = [Path(each) for each in (request.vllm_recipe, request.sglang_cookbook) if each]
    if not places:
        return
    for place in places:
        check_output_file(place, force=request.force)
    size = measure_size(facts.folder)
    if request.vllm_recipe is not None:
        made = next((made.date for each in facts.losses if (made := each.report.provenance)), "")
        yield (
            Path(request.vllm_recipe),
            make_vllm_recipe(
                facts,
                size,
                base,
                repo,
                oldest=_find_oldest(facts.folder, reporter),
                added=(datetime.fromisoformat(made) if made else datetime.now(UTC)).date(),
            ),
        )
    if request.sglang_cookbook is not None:
        yield Path(request.sglang_cookbook), make_sglang_block(facts, size, base, repo)


def _find_oldest(folder: Path, reporter: Reporter) -> str:
    """Find the oldest release of vLLM, of those that are known, since which all load a folder."""
    newest = find_replayed("vllm")
    releases = [newest, *newest.releases]
    asked = [f"{newest.name}=={each.version}" for each in releases]
    found = check(CheckRequest(folder, engine=asked, allow_suspicious=True), reporter)
    oldest = ""
    for each in found.engines.values():
        if not each.ok:
            break
        oldest = each.version
    if not oldest:
        raise VerificationError(
            f"--vllm-recipe: {newest.release} does not load {folder}",
            hint=f"`fp8calib check {folder} --engine vllm` says why",
        )
    return oldest


def _spell_yaml(entry: dict[str, Any]) -> str:
    return yaml.dump(entry, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as lines, and equal values each time."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _write_text(dumper: _Dumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _write_text)


def _read_receipt(path: Path, folder: Path) -> Receipt:
    """Read a receipt, which has to be of the folder as it is.

    Raises:
        ModelError: it was changed, or is of other files.
    """
    receipt, faults = read_receipt(path)
    now = hash_model(str(folder), folder)
    found = [list(compare_files(each.files, now.files, str(folder))) for each in receipt.scales]
    if not faults and (not found or all(found)):
        faults = next(iter(found), [f"it names no file of {folder}"])
    if faults:
        raise ModelError(
            f"{path}: {faults[0]}",
            hint=f"write it again: `fp8calib verify MODEL --scales {folder} --receipt FILE.json`",
        )
    return receipt


def _copy_receipt(path: Path, receipt: Receipt, folder: Path, *, force: bool) -> None:
    """Copy a receipt and its signature into the folder, and draw its badge."""
    place, badge = folder / RECEIPT_NAME, folder / BADGE_NAME
    if place.resolve() != path.resolve():
        check_output_file(place, force=force)
        write_file_atomic(place, path.read_bytes())
        for suffix in SUFFIXES:  # those of another receipt do not stay
            signature = Path(f"{path}{suffix}")
            if signature.is_file():
                write_file_atomic(Path(f"{place}{suffix}"), signature.read_bytes())
            else:
                Path(f"{place}{suffix}").unlink(missing_ok=True)
    write_file_atomic(badge, draw_badge(receipt).encode())


def _find_source(facts: CardFacts, model: str | Path | None) -> Path | None:
    """Find the folder of the unquantized model, as it was named now or in a report."""
    names = [str(model)] if model is not None else [loss.report.model for loss in facts.losses]
    return next((Path(name) for name in names if Path(name).is_dir()), None)


def _spell_as_id(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "MODEL"


def _find_base(facts: CardFacts) -> str:
    names = [loss.report.model for loss in facts.losses]
    found = next((n for n in names if HUB_ID.fullmatch(n) and not Path(n).exists()), None)
    if found is None:
        raise UsageError(
            f"{facts.folder}: no Hub id of the unquantized model is recorded",
            hint="add --base-model ORG/NAME",
        )
    return found


def _check(facts: CardFacts, model: str | Path | None, reporter: Reporter) -> CheckResult | None:
    """Ask the engines; of files of scales, the first one, for a model that is named."""
    path = facts.folder
    if not facts.is_checkpoint:
        if model is None:
            return None
        files = [each.name for each in facts.files if each.name.endswith((".safetensors", ".json"))]
        path = facts.folder / files[0]
    return check(CheckRequest(path, engine=list_defaults(), model=model), reporter)


card = as_function("card", CardRequest, run)
