"""Write a table of scales in any dialect."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fp8calib.calibration.origin import CalibrationOrigin
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.output import refuse_unknown_entries
from fp8calib.checkpoint.overlay import list_overlay
from fp8calib.errors import ExportError, UsageError, cut_list
from fp8calib.formats.convert import convert_table, explain_conversion
from fp8calib.formats.dialect import NO_ATTACHMENT, Attachment, Dialect, WriteJob
from fp8calib.formats.metadata import describe_source
from fp8calib.formats.quantized_model import check_attachable, find_quantized, list_kv_scales
from fp8calib.formats.registry import find_dialect
from fp8calib.formats.table import ScaleTable
from fp8calib.model.geometry import ModelGeometry
from fp8calib.model.module_paths import list_paths
from fp8calib.model.tensor_parallel import check_heads, check_linears
from fp8calib.numerics.formats import Fp8Format

_KV_ALONE = (
    "only its kv_cache section is written: `fp8calib calibrate MODEL --format rfc --out DIR` "
    "measures the scales of weights and activations"
)


def list_outputs(formats: Iterable[str], tps: Iterable[int]) -> frozenset[str]:
    """Name the files and folders that these formats write into the output folder."""
    degrees = tuple(tps)
    dialects = map(find_dialect, formats)
    return frozenset(dialect.path(tp) for dialect in dialects for tp in dialect.degrees(degrees))


def check_export(
    geometry: ModelGeometry, formats: Sequence[str], tps: Sequence[int], fmt: Fp8Format
) -> None:
    """Refuse what cannot be written, before any computation.

    Raises:
        UsageError: a format is unknown or has no scales for `fmt`, or a degree does not fit the
            model.
    """
    for dialect in map(find_dialect, formats):
        fault = dialect.find_misfit(geometry) if dialect.find_misfit is not None else ""
        hint = "choose another format"
        if fmt not in dialect.formats:
            fault, hint = f"it has no scales for {fmt.name}", "leave out --fp8-dtype"
        if fault:
            raise UsageError(f"--format {dialect.name}: {fault}", hint=hint)
    has_linears = any(find_dialect(name).has_linears for name in formats)
    for tp in tps:
        check_heads(geometry, tp)
        if has_linears:
            check_linears(geometry, tp)


def check_overlay_source(
    geometry: ModelGeometry,
    formats: Iterable[str],
    source: Checkpoint | None,
    *,
    replaces_scales: bool = False,
) -> None:
    """Refuse a model that overlays in these formats cannot be made from.

    Raises:
        UsageError: a format needs a model, and there is none; or the model has no place for the
            scales.
        ModelError: the model's config.json is missing or broken.
        ExportError: the model does not have this geometry, has KV scales already, or is quantized
            in a way that does not allow these scales.
    """
    dialects = [dialect for dialect in map(find_dialect, formats) if dialect.needs_model]
    if not dialects:
        return
    if source is None:
        name = dialects[0].name
        hint = f"add --model MODEL: the {name} folder contains its weights"
        raise UsageError(f"--format {name} needs --model", hint=hint)
    modules = {path for name in source.tensors for path in list_paths(name)}
    for layer, attention in geometry.attentions():
        if attention.checkpoint_module not in modules:
            raise ExportError(
                f"{source.folder}: no tensor is under {attention.checkpoint_module}, where layer "
                f"{layer.index} of the calibrated model has its attention",
                hint="pass the model that was calibrated",
            )
    for dialect in dialects:
        check_attachable(source, geometry, dialect, replaces_scales=replaces_scales)


def list_owned(dialect: Dialect, tps: Iterable[int], source: Checkpoint) -> frozenset[str]:
    """Name the entries of an output folder that *is* the overlay, or holds the files."""
    if not dialect.needs_model:
        return list_outputs([dialect.name], tps)
    return list_overlay(source)


def check_replaced(formats: Iterable[str], out: Path, source: Checkpoint) -> None:
    """Refuse to replace an overlay folder that holds entries no overlay of `source` has.

    Raises:
        UsageError: naming what would be lost.
    """
    for dialect in map(find_dialect, formats):
        folder = out / dialect.path()
        if dialect.needs_model and folder.is_dir():
            found = {entry.name for entry in folder.iterdir()}
            refuse_unknown_entries(folder, found - list_overlay(source))


def write_found(
    table: ScaleTable,
    dialect: Dialect,
    folder: Path,
    *,
    fmt: Fp8Format,
    tps: Iterable[int],
    model: str,
    source: Checkpoint,
    shown: Path,
    attachment: Attachment = NO_ATTACHMENT,
) -> tuple[list[ScaleTable], tuple[str, ...]]:
    """Convert scales that were read to what a dialect holds, for each number of ranks, and write.

    `folder` becomes an overlay, or holds the files; `shown` is its final path. `model` is the
    model's fingerprint, recorded if the scales record none. `attachment` says how they belong to a
    `source` that is quantized already.

    Returns:
        The tables as they were written, and what a user should know.

    Raises:
        ExportError: they cannot be converted or written.
    """
    notes = [*filter(None, [describe_source(table)]), *table.notes]
    table = replace(table, origin=table.origin or CalibrationOrigin(model=model))
    tables = [convert_table(table, fmt=fmt, tp=tp, per_head=dialect.per_head) for tp in tps]
    for converted in tables:
        notes += explain_conversion(
            table, converted, joins_kv=dialect.joins_kv, has_query=dialect.has_query
        )
    for converted in tables:
        place = folder if dialect.needs_model else folder / dialect.path(converted.tp)
        notes += write_table(
            converted,
            dialect.name,
            place,
            source=source,
            shown=shown / place.relative_to(folder),
            attachment=attachment,
        )
    return tables, tuple(dict.fromkeys(notes))


def write_table(
    table: ScaleTable,
    format_name: str,
    target: Path,
    *,
    source: Checkpoint | None,
    shown: Path | None = None,
    attachment: Attachment = NO_ATTACHMENT,
    **given: Any,
) -> tuple[str, ...]:
    """Write a table of scales whose ranks or heads are those that the dialect has.

    The target is a file, or an overlay's folder, empty or not yet existing; `shown` is its final
    path, if that is another one. `given` has other fields of the `WriteJob`. What a user should
    know is returned: layers without their own scales, skipped files.

    Raises:
        UsageError: the format is not known, or needs a model.
        ExportError: it cannot be written.
    """
    dialect, geometry = find_dialect(format_name), table.geometry
    check_export(geometry, [format_name], [], table.fmt)
    check_overlay_source(
        geometry, [format_name], source, replaces_scales=attachment.replaces_scales
    )
    job = WriteJob(table=table, **given)
    if source is not None and dialect.needs_model:
        job = replace(
            job,
            source=source,
            attachment=attachment,
            quantized=find_quantized(source),
            replaced=list_kv_scales(source, geometry),
        )
    assert dialect.write is not None  # noqa: S101 -- find_dialect gives none that is only read
    dialect.write(job, target)
    return tuple(_describe(dialect, job, shown or target))


def _describe(dialect: Dialect, job: WriteJob, shown: Path) -> Iterator[str]:
    """Describe what a user should know about what was written."""
    if dialect.unread:
        yield f"{dialect.name}: {dialect.unread}; they load kv-overlay"
    for written in filter(None, (job.linears, job.table)):
        for site, scale in written.not_observed():
            yield f"{site}: {scale.why_not_observed}"
        for why in dict.fromkeys(written.kept_amax.values()):
            first, *more = (str(site) for site, text in written.kept_amax.items() if text == why)
            yield f"{first} and {len(more)} more: {why}" if more else f"{first}: {why}"
    for name, why in job.skipped.items():
        yield f"{name}: left out of {dialect.name}: {why}"
    has_scheme = job.quantized is not None and any(job.quantized.list_schemes())
    if job.replaced:
        yield f"KV scales of the model: replaced: {cut_list(sorted(job.replaced))}"
    elif job.attachment.replaces_scales and job.source is not None and not has_scheme:
        yield f"--replace-scales has no effect: {job.source.folder} has no KV scales"
    for name, why in job.copied.items():
        yield f"{shown / name}: {why}"
    if dialect.lists_all_layers:
        layers = job.table.geometry.layers
        why = "caches no K and V; its scale is 1.0, as the JSON formats require every layer"
        yield from (f"{each.module}: {why}" for each in layers if each.attention is None)
    if dialect.has_linears and job.linears is None:
        yield f"{dialect.name}: {_KV_ALONE}"
