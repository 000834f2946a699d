"""What is said of a written checkpoint: what engines do with it, and its model card."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from fp8calib.checkpoint.output import write_file_atomic
from fp8calib.checkpoint.overlay import CARD_NAME
from fp8calib.commands.check import CheckRequest
from fp8calib.commands.check_run import replay_path
from fp8calib.commands.command_line import UNTOLD, cut_path, spell_command
from fp8calib.commands.options import Model
from fp8calib.commands.result import WrittenCheck
from fp8calib.engines.registry import DEFAULT_ENGINES, find_replayed
from fp8calib.engines.replay.folder import open_folder
from fp8calib.engines.replay.verdicts import Refusal
from fp8calib.engines.status import Status
from fp8calib.errors import ExportError, Fp8CalibError, name_ranges
from fp8calib.formats.registry import find_dialect
from fp8calib.model.geometry import ModelGeometry

if TYPE_CHECKING:  # only named
    from fp8calib.calibration.calibration_stats import RunStats
    from fp8calib.formats.quantized_model import QuantizedModel

_NO_OVERLAY = ("tgi",)
"""Formats whose folders no engine of `check` loads."""
_WITH_PLACE = ("compressed-tensors", "autofp8", "modelopt", "quark")
_SERVE_PLAIN = "serve the quantized checkpoint as it is; with an FP8 cache these servers use 1.0"
_OTHER_METHODS = (
    "vLLM and SGLang have a place for them beside compressed-tensors (which also stores INT4 and "
    "INT8 weights), fp8, ModelOpt and Quark: use a checkpoint in one of these, or the unquantized "
    "model"
)

_QUANTIZED: dict[str, Any] = {"base_model_relation": "quantized", "quantized_by": "fp8calib"}
_KEPT = ("license", "license_name", "license_link", "language", "tags", "pipeline_tag")
"""Keys of the source's front matter that are true of what is made from it."""


def require_server(written: Path, geometry: ModelGeometry, quantized: QuantizedModel) -> None:
    """Refuse a quantized checkpoint with KV scales that no server would use.

    One of the default engines has to use the scales of every layer. Whether it loads the weights is
    not asked.
    """
    folder = open_folder(written)
    faults: dict[str, str] = {}
    for engine in map(find_replayed, DEFAULT_ENGINES):
        assert engine.replay_folder is not None  # noqa: S101 -- the default engines have one
        try:
            slots = engine.replay_folder(folder, geometry, 1).slots.values()
        except Refusal as refusal:
            faults[engine.release] = refusal.why
            continue
        unused = [each.why for each in slots if each.status is not Status.USED]
        if not unused:
            return
        faults[engine.release] = unused[0]
    reasons = "; ".join(f"{title}: {why}" for title, why in faults.items())
    has_place = quantized.dialect is not None and quantized.dialect.name in _WITH_PLACE
    raise ExportError(
        f"{quantized.source.folder}: no server uses KV scales beside quant_method "
        f"{quantized.method} in this model: {reasons}",
        hint=_SERVE_PLAIN if has_place else _OTHER_METHODS,
    )


def finish_formats(
    names: Iterable[str], written: Path, target: Path, model: Model, **more: Any
) -> tuple[WrittenCheck, ...]:
    """Finish the checkpoints among written formats: `finish_checkpoint` of each."""
    checkpoints = [dialect for dialect in map(find_dialect, names) if dialect.needs_model]
    return tuple(
        check
        for each in checkpoints
        for check in finish_checkpoint(
            *(written, target, each.name, model), path=each.path(), **more
        )
    )


def finish_checkpoint(
    written: Path,
    target: Path,
    scheme: str,
    model: Model,
    *,
    path: str = ".",
    revision: str | None = None,
    check: bool = True,
    plain_caches: Sequence[int] = (),
    stats: RunStats | None = None,
) -> tuple[WrittenCheck, ...]:
    """Check a written checkpoint as `check` does, and write its card.

    It is at `path` in the output folder, which is `written` now and will be `target`. Without
    `check` no engine is asked. `plain_caches` are the layers whose KV cache stays in 16 bits, and
    `stats` are those that `check --stats` gets.
    """
    asks, why_unknown, checked = check and path not in _NO_OVERLAY, "", list[WrittenCheck]()
    try:
        found = replay_path(CheckRequest(written / path, stats=stats)) if asks else {}
    except Fp8CalibError as error:
        found, why_unknown = {}, error.message
    for engine in map(find_replayed, DEFAULT_ENGINES if asks else ()):
        report, command = found.get(engine.key), ""
        verdict = report.verdict if report else "unknown"
        summary = f"{verdict}: {report.fault if report else why_unknown}"
        if report and plain_caches and not engine.skip_flag:
            verdict = "not ok" if report.ok else report.verdict
            layers = name_ranges(plain_caches)
            summary = f"{verdict}: it cannot leave the KV cache of {layers} in 16 bits"
        elif report and report.ok:
            summary = report.summary
            command = engine.spell_launch(
                str(target / path), has_kv=report.asks_for_kv, plain_caches=plain_caches
            )
        checked.append(
            WrittenCheck(
                path=path,
                engine=engine.release,
                verdict=verdict,
                summary=summary,
                command=command,
            )
        )
    commands = [each.command for each in checked if each.command]
    name = (target / path).resolve().name
    write_card(written / path, name, scheme, model, revision=revision, commands=commands)
    return tuple(checked)


def write_card(
    folder: Path,
    name: str,
    scheme: str,
    model: Model,
    *,
    revision: str | None = None,
    commands: Sequence[str] = (),
    is_quantized: bool = True,
) -> None:
    """Write the card of a checkpoint that is made of `model`. The same run gives the same bytes.

    `name` is what the folder will be called, and `scheme` says how weights or the KV cache are
    stored. `commands` serve it.
    """
    from huggingface_hub import ModelCard, ModelCardData

    base, kept = _name_model(model), dict(_read_front_matter(model, revision))
    if not is_quantized:
        kept.pop("tags", None)  # they tell of the quantization
    data = ModelCardData(
        base_model=base, scheme=scheme, **(_QUANTIZED if is_quantized else {}), **kept
    )
    parts = [f"# {name}\n\n`{scheme}` of {base}, made with fp8calib."]
    made_by = [command] if (command := spell_command()) else []
    for title, lines in (("Made by", made_by), ("Served by", commands)):
        if lines:
            words = ([w for w in shlex.split(line) if w not in UNTOLD] for line in lines)
            shown = "\n".join(shlex.join(map(cut_path, line)) for line in words)
            parts.append(f"{title}:\n\n```sh\n{shown}\n```")
    text = "\n\n".join(parts)
    card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n")
    write_file_atomic(folder / CARD_NAME, str(card).encode())


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


def _read_front_matter(model: Model, revision: str | None) -> Iterator[tuple[str, Any]]:
    """Read what the source's README says that is still true; nothing where it cannot be read."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.repocard import metadata_load

    if not isinstance(model, str | Path):
        return
    path: Any = Path(model) / CARD_NAME
    try:
        if not path.parent.exists():
            path = try_to_load_from_cache(str(model), CARD_NAME, revision=revision)
        found = metadata_load(path) or {}
    except (OSError, TypeError, ValueError, yaml.YAMLError):
        return
    for key in _KEPT:
        if isinstance(found.get(key), list if key == "tags" else str | list):
            yield key, found[key]
