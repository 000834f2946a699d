"""What is recorded about a folder that is to be published: its kind, origin, loss and files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.hashes import FileHash, hash_folder
from fp8calib.checkpoint.json_files import load_json_object
from fp8calib.checkpoint.model_config import CONFIG_NAME, list_inner_checkpoints
from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.dialects.fp8.pairing import is_fp8_checkpoint, pair_tensors
from fp8calib.dialects.fp8.quantization_config import StoredScheme
from fp8calib.dialects.fp8.registry import load_finder
from fp8calib.dialects.metadata import find_origin, read_file_origin
from fp8calib.dialects.read import has_kv_scales
from fp8calib.errors import ModelError, UsageError, cut_list
from fp8calib.fp8.schemes import SCHEMES
from fp8calib.jobs.published import publish_command
from fp8calib.results.verify import VerifyResult
from fp8calib.stats.calibration_origin import CalibrationOrigin
from fp8calib.stats.calibration_stats import REPORT_NAME, is_stats_file
from fp8calib.verification.report import CandidateResult, VerifyReport

CARD_NAME = "README.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The figures of one verification of the folder."""

    report: VerifyReport
    own: CandidateResult
    others: tuple[CandidateResult, ...]
    """Compared on the same text, such as scale 1.0."""
    command: str

    @property
    def engine(self) -> str:
        """The engine and its release."""
        return self.report.engine_version or self.report.engine


class Calibration(BaseModel):
    """What the report of `calibrate` tells of the run that wrote the folder."""

    command: str
    data: tuple[str, ...]
    seq_len: int
    tokens: int
    files: tuple[str, ...]
    """What was written, relative to the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """Everything that a card says."""

    folder: Path
    weights: str
    """The schemes of the FP8 weights, in words; empty where there are none."""
    has_kv_scales: bool
    is_checkpoint: bool
    """Whether a config is beside the tensors; otherwise the folder holds files of scales alone."""
    quant_method: str
    origin: CalibrationOrigin | None
    calibration: Calibration | None
    losses: tuple[Loss, ...]
    files: tuple[FileHash, ...]


def read_card_facts(folder: Path, reports: Sequence[Path]) -> CardFacts:
    """Read what is recorded in a folder, beside it, and in reports of `verify --json`.

    Raises:
        UsageError: the folder holds nothing to publish, or a report is of something else.
        ModelError: a file is damaged, or a report is of another model.
    """
    if folder.is_file():
        hint = "name the folder to publish, and a report by --verify-report"
        raise UsageError(f"{folder}: a file, not a folder", hint=hint)
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder", hint="name the folder to publish")
    tensors = sorted(folder.glob("*.safetensors"))
    if any(map(is_stats_file, tensors)):
        raise UsageError(
            f"{folder}: holds statistics, which nobody can serve",
            hint="name the checkpoint or the overlay in it",
        )
    if inner := list_inner_checkpoints(folder):
        names = cut_list([each.name for each in inner])
        raise UsageError(
            f"{folder}: not a checkpoint: it holds {names}, and each has a card of its own",
            hint=f"name the one to publish, such as {inner[0]}",
        )
    has_weights = is_fp8_checkpoint(folder)
    has_scales = has_kv_scales(folder)
    if not has_weights and not has_scales:
        raise UsageError(
            f"{folder}: holds neither FP8 weights nor KV scales", hint="name the folder to publish"
        )
    is_checkpoint = (folder / CONFIG_NAME).is_file()
    weights = (n for path in tensors for n in TensorFile(path).tensors if n.endswith(".weight"))
    if not is_checkpoint and (name := next(weights, None)) is not None:
        raise ModelError(
            f"{folder}: holds weights ({name}), and no {CONFIG_NAME}",
            hint=f"copy the {CONFIG_NAME} that was written with them",
        )
    origin = _find_origin(folder, tensors)
    return CardFacts(
        folder=folder,
        weights=_describe_weights(folder) if has_weights else "",
        has_kv_scales=has_scales,
        is_checkpoint=is_checkpoint,
        quant_method=_find_method(folder) if is_checkpoint else "",
        origin=origin,
        calibration=_find_calibration(folder),
        losses=tuple(_read_loss(path, folder, origin) for path in reports),
        files=tuple(hash_folder(folder, frozenset({CARD_NAME}))),
    )


def _describe_weights(folder: Path) -> str:
    """Describe the schemes of the FP8 weights, each with the number of its linears."""
    with Checkpoint.open(folder) as checkpoint:
        try:
            config = load_json_object(folder / CONFIG_NAME)
            weights = pair_tensors(checkpoint, load_finder(folder, config)[1]).weights
        except ModelError:  # `check`, whose verdict is in the card, says what is wrong
            return "FP8 weights"
    counts = Counter(_describe_scheme(weight.scheme) for weight in weights.values())
    if len(counts) == 1:
        return f"FP8 weights ({next(iter(counts))})"
    parts = (f"{count} linears {scheme}" for scheme, count in counts.most_common())
    return f"FP8 weights ({'; '.join(parts)})"


def _describe_scheme(stored: StoredScheme) -> str:
    for scheme in SCHEMES.values():
        found = (stored.weights, stored.inputs, stored.is_mx)
        if (scheme.weights, scheme.inputs, scheme.is_mx) == found:
            return f"{scheme.name}: {scheme.description}"
    return f"weights per {stored.weights}, scales of inputs: {stored.inputs}"


def _find_method(folder: Path) -> str:
    section = load_json_object(folder / CONFIG_NAME).get("quantization_config")
    return str(section.get("quant_method", "")) if isinstance(section, dict) else ""


def _find_origin(folder: Path, tensors: Sequence[Path]) -> CalibrationOrigin | None:
    found = find_origin(folder, [TensorFile(path) for path in tensors])
    documents = (read_file_origin(path) for path in sorted(folder.glob("*.json")))
    return found or next((each for each in documents if each is not None), None)


def _find_calibration(folder: Path) -> Calibration | None:
    """Find the report of `calibrate` above the folder, if it wrote the folder."""
    place = folder.resolve()
    try:
        found = Calibration.model_validate(load_json_object(place.parent / REPORT_NAME))
    except (ModelError, ValidationError):  # there is none, or one of another kind
        return None
    found = found.model_copy(update={"command": publish_command(found.command)})
    return found if any(name.partition("/")[0] == place.name for name in found.files) else None


def _read_loss(path: Path, folder: Path, origin: CalibrationOrigin | None) -> Loss:
    document = load_json_object(path)
    try:
        loss = _from_verify(VerifyResult.from_json(document), path, folder)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UsageError(
            f"{path}: no report of this version's verify: {where}: {first['msg']}",
            hint="write it again: `fp8calib verify MODEL --scales DIR --json`",
        ) from error
    made = loss.report.provenance
    measured = "" if made is None else made.model_hash
    if origin is not None and measured and origin.model != measured:
        raise ModelError(
            f"{path}: measured on another model than the one that {folder} was made from",
            hint="verify this folder with the model that was calibrated",
        )
    return loss


def _from_verify(report: VerifyReport, path: Path, folder: Path) -> Loss:
    place = folder.resolve()
    own = [each for each in report.candidates if _is_at(Path(each.name), place)]
    if not own:
        raise UsageError(
            f"{path}: none of its candidates is {folder}",
            hint=f"write it with `fp8calib verify MODEL --scales {folder} --json`",
        )
    return Loss(
        report=report,
        own=own[0],
        others=tuple(each for each in report.candidates if each not in own),
        command=publish_command("" if report.provenance is None else report.provenance.command),
    )


def _is_at(candidate: Path, place: Path) -> bool:
    """Whether a candidate is the folder, or a file in it."""
    return candidate.exists() and place in (candidate.resolve(), candidate.resolve().parent)


def find_version(facts: CardFacts) -> str:
    """Find the version of fp8calib that measured the folder; empty if it is not recorded."""
    made = (each.report.provenance for each in facts.losses)
    found: Any = next(filter(None, made), None)
    return "" if found is None else str(found.versions.get("fp8calib", ""))
