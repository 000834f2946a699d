"""The model card of a written checkpoint: front matter, commands, figures of `verify --json`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from pydantic import ValidationError

from fp8calib.checkpoint.atomic import write_file_atomic
from fp8calib.checkpoint.json_files import is_result, load_json_object
from fp8calib.checkpoint.overlay import CARD_NAME
from fp8calib.commands.command_line import cut_path, publish_command, spell_command
from fp8calib.commands.options import Model
from fp8calib.commands.quantize import QuantizeResult
from fp8calib.commands.result import WrittenCheck
from fp8calib.formats.registry import find_dialect
from fp8calib.jobs.hashes import hash_files
from fp8calib.verification.figures import format_mean_kld, format_ratio, format_share

if TYPE_CHECKING:
    from fp8calib.commands._verify import VerifyResult

ResultT = TypeVar("ResultT", bound=QuantizeResult)
_QUANTIZED: dict[str, Any] = {"base_model_relation": "quantized", "quantized_by": "fp8calib"}
_KEPT = ("license", "license_name", "license_link", "language", "tags", "pipeline_tag")
"""Keys of the source's front matter that are true of what is made from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardJob:
    """What the cards of a run tell of."""

    written: Path
    """The output folder where it is now."""
    target: Path
    """The output folder where it will be."""
    model: Model
    """What the checkpoints were made from."""
    revision: str | None = None
    """That of a model on the Hub."""
    checked: Sequence[WrittenCheck] = ()
    """What engines do with them."""
    is_quantized: bool = True


def write_cards(job: CardJob, formats: Iterable[str]) -> list[str]:
    """Write the cards of the checkpoints among written formats, and give their names."""
    dialects = [each for each in map(find_dialect, formats) if each.needs_model]
    return [write_card(job, each.name, each.path()) for each in dialects]


def add_card(job: CardJob, result: ResultT, path: str = ".") -> ResultT:
    """Write the card of an FP8 checkpoint, and add it to the files of its result."""
    schemes = dict.fromkeys([result.scheme, *(each.scheme for each in result.layer_schemes)])
    write_card(job, ", ".join(schemes), path)
    return result.model_copy(update={"files": tuple(sorted({*result.files, CARD_NAME}))})


def write_card(job: CardJob, scheme: str, path: str = ".") -> str:
    """Write the card of a checkpoint, and give its name. The same run gives the same bytes.

    Reports of `verify --json` in the output folder are shown, where they measured the same bytes.

    Args:
        job: the run.
        scheme: how weights or the KV cache are stored.
        path: of the checkpoint in the output folder.
    """
    from huggingface_hub import ModelCard, ModelCardData  # noqa: PLC0415 -- slow to import

    base, name = _name_model(job.model), (job.target / path).resolve().name
    fixed = _QUANTIZED if job.is_quantized else {}
    data = ModelCardData(base_model=base, scheme=scheme, **fixed, **dict(_read_front_matter(job)))
    commands = [each.command for each in job.checked if each.path == path]
    parts = (
        f"# {name}\n\n`{scheme}` of {base}, made with fp8calib.",
        _quote("Made by", [spell_command()]),
        _quote("Served by", commands),
        "\n".join(_list_figures(job.target, job.written / path)),
    )
    text = "\n\n".join(filter(None, parts))
    card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n")
    write_file_atomic(job.written / path / CARD_NAME, str(card).encode())
    return (Path(path) / CARD_NAME).as_posix()


def _quote(title: str, commands: Iterable[str]) -> str:
    shown = "\n".join(map(publish_command, filter(None, commands)))
    return f"{title}:\n\n```sh\n{shown}\n```" if shown else ""


def _name_model(model: Model) -> str:
    """Give the Hub id, also of a copy in the Hub's cache, or the name of the folder."""
    if not isinstance(model, str | Path):
        return _name_model(model.name_or_path or type(model).__name__)
    folder = Path(model).resolve()
    if not folder.exists():
        return cut_path(str(model))
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return folder.name


def _read_front_matter(job: CardJob) -> Iterator[tuple[str, Any]]:
    """Read what the source's README says that is still true; nothing where it cannot be read."""
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415
    from huggingface_hub.repocard import metadata_load  # noqa: PLC0415

    if not isinstance(job.model, str | Path):
        return
    path: Any = Path(job.model) / CARD_NAME
    try:
        if not path.parent.exists():
            path = try_to_load_from_cache(str(job.model), CARD_NAME, revision=job.revision)
        found = metadata_load(path) or {}
    except (OSError, TypeError, ValueError, yaml.YAMLError):
        return
    for key in _KEPT:
        if key == "tags" and not job.is_quantized:
            continue  # they tell of the quantization
        if isinstance(found.get(key), list if key == "tags" else str | list):
            yield key, found[key]


def _list_figures(reports: Path, folder: Path) -> Iterator[str]:
    """Describe a checkpoint as those of the reports do that measured the same bytes."""
    paths = sorted(filter(is_result, reports.glob("*.json")))
    if not paths:
        return
    from fp8calib.commands._verify import VerifyResult  # noqa: PLC0415 -- imports transformers

    for path in paths:
        try:
            report = VerifyResult.from_json(load_json_object(path))
        except ValidationError:  # of another command
            continue
        rows = [each for each in report.candidates if _is_measured(report, each.name, folder)]
        if rows:
            data = ", ".join(map(cut_path, report.data))
            yield (
                f"Compared with the unquantized model on {report.tokens:,} tokens of {data}, "
                f"emulated as {report.engine_version} computes (`{path.name}`):\n"
            )
        for each in rows:
            yield (
                f"* {each.verdict}: KLD {format_mean_kld(each.kld_mean, each.kld_se)}, perplexity "
                f"ratio {format_ratio(each.ppl_ratio, each.ppl_ratio_se)}, top-1 "
                f"{format_share(each.top1_agreement)}"
            )


def _is_measured(report: VerifyResult, name: str, folder: Path) -> bool:
    known = () if report.hashes is None else report.hashes.scales.get(name, ())
    paths = [folder / each.name for each in known]
    return bool(known) and all(map(Path.is_file, paths)) and hash_files(paths, {}) == known
