"""Read the KV scales of a quantized checkpoint or file, and write them for another model.

Of the quantized model no weight is read; of the other model only those of its fingerprint.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from fp8calib.calibration.calibration_origin import CalibrationOrigin
from fp8calib.calibration.fingerprint import fingerprint_model
from fp8calib.checkpoint.atomic import output_folder
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.commands.extract_kv_scales import ExtractedLayer, ExtractRequest, ExtractResult
from fp8calib.commands.options import split_names
from fp8calib.commands.result import BeforeAfter, WrittenCheck
from fp8calib.commands.written import check_written
from fp8calib.errors import UsageError
from fp8calib.formats.convert import convert_table, explain_fit, explain_joint, explain_no_query
from fp8calib.formats.dialect import Attachment, Dialect
from fp8calib.formats.metadata import Provenance
from fp8calib.formats.quantized_model import QuantizedModel, find_quantized
from fp8calib.formats.ranks import fits_heads
from fp8calib.formats.read import FoundScales, check_origin, read_scales
from fp8calib.formats.registry import find_dialect, list_written
from fp8calib.formats.table import ScaleTable
from fp8calib.formats.write import list_owned, write_table
from fp8calib.jobs.attachment import (
    describe_attachment,
    refuse_options,
    relate_to_quantized,
    require_server,
)
from fp8calib.jobs.card import CardJob, write_card
from fp8calib.model.geometry_from_config import read_geometry
from fp8calib.model.kv_bytes import kv_bytes_per_token
from fp8calib.model.load import build_skeleton, fetch_hub_id, find_folder, open_source
from fp8calib.model.prepared import prepare
from fp8calib.model.shapes import Attention, ModelGeometry, Role
from fp8calib.numerics.formats import E4M3FN, KV_FORMATS


def extract(request: ExtractRequest) -> ExtractResult:
    """Read the scales, and write them in the requested format."""
    dialect = _check_options(request)
    path = fetch_hub_id(Path(request.quantized_model))
    with Checkpoint.open(find_folder(str(request.model), request.revision)) as checkpoint:
        return _extract(request, dialect, path, checkpoint, find_quantized(checkpoint))


def _check_options(request: ExtractRequest) -> Dialect:
    """Check the options, and find the dialect of --format."""
    names = split_names(request.formats) or ["kv-overlay"]
    if len(names) > 1:
        raise UsageError(
            f"--format {' '.join(names)}: only one format can be written to --save-path",
            hint="run the command once for each format",
        )
    dialect = find_dialect(names[0])
    named = {"--source-dtype": request.source_dtype, "--fp8-dtype": request.fp8_dtype}
    for option, name in named.items():
        if name is not None and name not in KV_FORMATS:
            raise UsageError(f"{option} {name}: unknown", hint=f"use {' or '.join(KV_FORMATS)}")
    if request.tp and not dialect.per_tp:
        others = " or ".join(each.name for each in list_written() if each.per_tp)
        raise UsageError(
            f"--tp {request.tp[0]}: {dialect.name} does not depend on the number of ranks",
            hint=f"leave out --tp, or choose --format {others}",
        )
    return dialect


def _extract(
    request: ExtractRequest,
    dialect: Dialect,
    path: Path,
    checkpoint: Checkpoint,
    quantized: QuantizedModel | None,
) -> ExtractResult:
    """Write the scales of `path` for the model of a checkpoint."""
    geometry, out = _find_geometry(request, checkpoint, quantized), Path(request.save_path)
    found = read_scales(
        path,
        geometry,
        source_fmt=None if request.source_dtype is None else KV_FORMATS[request.source_dtype],
        needs_dtype=True,
        drops_bad_query=True,
    )
    measured, name = found.table.origin, str(path)
    if quantized is not None:
        attachment = relate_to_quantized(name, measured, checkpoint, geometry, request)
    else:
        refuse_options(request)
        check_origin(name, measured, fingerprint_model(checkpoint.load_config(), checkpoint))
        attachment = Attachment(replaces_scales=request.replace_scales)
    origin = measured or CalibrationOrigin.of_model(
        fingerprint_model(checkpoint.load_config(), checkpoint)
    )
    tables = [
        convert_table(
            replace(found.table, origin=origin),
            fmt=KV_FORMATS[request.fp8_dtype or E4M3FN.name],
            tp=tp,
            per_head=dialect.per_head,
        )
        for tp in _choose_degrees(request, dialect, found.table)
    ]
    taken_from = tuple(map(_name_file, found.files))
    provenance = None  # of scales of `calibrate`; those of a quantized source are biased
    if measured is None or not measured.data:
        provenance = Provenance(
            dialect=found.dialect, files=taken_from, has_fp8_weights=found.has_weights
        )
    notes: list[str] = []
    owned = (list_owned(dialect.name, table.tp, geometry, checkpoint) for table in tables)
    with output_folder(
        out,
        owned=frozenset[str]().union(*owned),
        force=request.force,
        inputs=[checkpoint.folder, path],
    ) as folder:
        for table in tables:
            place = folder if dialect.needs_model else folder / dialect.path(table.tp)
            written = write_table(
                table,
                dialect.name,
                place,
                source=checkpoint,
                shown=out / place.relative_to(folder),
                provenance=provenance,
                attachment=attachment,
            )
            notes += map(str, written)
        checked: tuple[WrittenCheck, ...] = ()
        if dialect.needs_model:
            if quantized is not None:
                require_server(folder, geometry, quantized)
            checked = check_written(folder, out) if request.check else ()
            job = CardJob(
                written=folder,
                target=out,
                model=request.model,
                revision=request.revision,
                checked=checked,
            )
            write_card(job, dialect.name)
        files = sorted(each for each in folder.rglob("*") if each.is_file())
        files_written = tuple(each.relative_to(folder).as_posix() for each in files)
    told = [
        *([provenance.describe()] if provenance else []),
        *describe_attachment(attachment, checkpoint, geometry),
        *found.notes,
        *(text for table in tables for text in _explain_table(found, table, dialect)),
        *notes,
    ]
    degrees = tuple(table.tp for table in tables)
    before, after = kv_bytes_per_token(geometry)
    return ExtractResult(
        save_path=out,
        files=files_written,
        dialect=found.dialect,
        source_dtype=found.table.fmt.name,
        format=dialect.name,
        fp8_dtype=tables[0].fmt.name,
        tp=degrees[0] if len(degrees) == 1 else degrees,
        taken_from=taken_from,
        layers=tuple(
            _describe_layer(tables[0], layer.index, attention, joins_kv=dialect.joins_kv)
            for layer, attention in geometry.attentions()
        ),
        notes=tuple(dict.fromkeys(told)),
        compared=attachment.compared,
        kv_bytes_per_token=BeforeAfter(before=before, after=after),
        checked=checked,
    )


def _find_geometry(
    request: ExtractRequest, checkpoint: Checkpoint, quantized: QuantizedModel | None
) -> ModelGeometry:
    if quantized is not None:
        return read_geometry(checkpoint.folder, checkpoint.load_config())
    source = open_source(str(checkpoint.folder), trust_remote_code=request.trust_remote_code)
    return prepare(build_skeleton(source), checkpoint).geometry


def _choose_degrees(
    request: ExtractRequest, dialect: Dialect, table: ScaleTable
) -> tuple[int, ...]:
    """Choose the ranks: those of --tp, or those found if the format and the model allow them."""
    if request.tp:
        return tuple(dict.fromkeys(request.tp))
    is_kept = dialect.per_tp and fits_heads(table.geometry, table.tp)
    return (table.tp if is_kept else 1,)


def _name_file(path: Path) -> str:
    resolved = path.resolve()
    # JSON readers in other languages reject names that are not valid Unicode
    return f"{resolved.parent.name}/{resolved.name}".encode("utf-8", "replace").decode()


def _explain_table(found: FoundScales, table: ScaleTable, dialect: Dialect) -> Iterable[str]:
    yield from explain_fit(found.table, table)
    if dialect.joins_kv:
        yield from explain_joint(table)
    elif not dialect.has_query:
        yield from explain_no_query(table)
    if found.table.per_head and not table.per_head:
        kept = " or ".join(each.name for each in list_written() if each.per_head)
        yield f"--format {kept} keeps a scale for each head"


def _describe_layer(
    table: ScaleTable, index: int, attention: Attention, *, joins_kv: bool
) -> ExtractedLayer:
    """List the scales of a layer as written: one number, or one per rank or head."""
    if joins_kv:
        joint = [table.kv(attention, rank) for rank in range(table.tp)]
        pair = dict.fromkeys(("k", "v"), joint)
    else:
        sites = (attention.site(role) for role in (Role.K, Role.V, Role.Q))
        pair = {
            str(site.role): table.scales[site].values.flatten().tolist()
            for site in sites
            if site in table.scales
        }
    scales = {role: values[0] if len(values) == 1 else values for role, values in pair.items()}
    return ExtractedLayer(layer=index, module=attention.module, **scales)
