"""Copy the KV scales of a quantized checkpoint or file to another model.

Of the quantized model no weight is read; of the other model only those of its fingerprint.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from fp8calib.checkpoint.atomic import output_folder
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.commands.written import check_written
from fp8calib.dialects.dialect import Attachment, Dialect
from fp8calib.dialects.metadata import Provenance
from fp8calib.dialects.quantized_model import QuantizedModel, find_quantized
from fp8calib.dialects.read import FoundScales, check_origin, read_scales
from fp8calib.dialects.registry import find_dialect, list_written
from fp8calib.dialects.write import list_owned, write_table
from fp8calib.errors import UsageError
from fp8calib.geometry.kv_bytes import kv_bytes_per_token
from fp8calib.geometry.model_geometry import Attention, ModelGeometry
from fp8calib.geometry.sites import Role
from fp8calib.jobs.attachment import (
    describe_attachment,
    refuse_options,
    relate_to_quantized,
    require_server,
)
from fp8calib.jobs.card import CardJob, write_card
from fp8calib.jobs.function import as_function
from fp8calib.jobs.reporter import Reporter
from fp8calib.model.geometry_from_config import read_geometry
from fp8calib.model.load import build_skeleton, fetch_hub_id, find_folder, open_source
from fp8calib.model.prepared import prepare
from fp8calib.numerics.formats import E4M3FN, KV_FORMATS
from fp8calib.options.recipe_keys import split_names
from fp8calib.requests.extract_kv_scales import ExtractRequest
from fp8calib.results.extract_kv_scales import ExtractedLayer, ExtractResult
from fp8calib.results.record import BeforeAfter
from fp8calib.scales.convert import (
    convert_table,
    explain_fit,
    explain_joint,
    explain_no_query,
)
from fp8calib.scales.ranks import fits_heads
from fp8calib.scales.scale_table import ScaleTable
from fp8calib.stats.calibration_origin import CalibrationOrigin
from fp8calib.stats.fingerprint import fingerprint_model


def run(request: ExtractRequest, reporter: Reporter) -> ExtractResult:
    """Read the scales, and write them in the requested format.

    Raises:
        UsageError: an option is invalid, or the source does not state its FP8 format.
        ModelError: the unquantized model cannot be read.
        ExportError: the format cannot hold the scales, or cannot be written.
        ModelError: the source's scales are incomplete, invalid, or of another model.
    """
    dialect = _check_options(request)
    source = fetch_hub_id(Path(request.quantized_model))
    folder = find_folder(str(request.model), request.revision)
    with Checkpoint.open(folder) as checkpoint:
        quantized = find_quantized(checkpoint)
        target = _Target(
            source=checkpoint,
            geometry=_find_geometry(request, checkpoint, is_quantized=quantized is not None),
            quantized=quantized,
            request=request,
        )
        result = _extract(source, dialect, target)
    for note in result.notes:
        reporter.warn(note)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """The model that the scales are written for."""

    source: Checkpoint
    geometry: ModelGeometry
    quantized: QuantizedModel | None
    """None for an unquantized model."""
    request: ExtractRequest

    def relate(self, name: str, origin: CalibrationOrigin | None) -> Attachment:
        """Check that scales belong to the model.

        Raises:
            UsageError: an option is not for an unquantized model, or --base is needed.
            ModelError: they belong to another one.
        """
        if self.quantized is not None:
            return relate_to_quantized(name, origin, self.source, self.geometry, self.request)
        refuse_options(self.request)
        check_origin(name, origin, self.fingerprint)
        return Attachment(replaces_scales=self.request.replace_scales)

    @property
    def fingerprint(self) -> str:
        """The model's own."""
        return fingerprint_model(self.source.load_config(), self.source)


def _find_geometry(
    request: ExtractRequest, checkpoint: Checkpoint, *, is_quantized: bool
) -> ModelGeometry:
    if is_quantized:
        return read_geometry(checkpoint.folder, checkpoint.load_config())
    source = open_source(str(checkpoint.folder), trust_remote_code=request.trust_remote_code)
    return prepare(build_skeleton(source), checkpoint).geometry


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


def _extract(source: Path, dialect: Dialect, target: _Target) -> ExtractResult:
    request = target.request
    geometry, checkpoint, out = target.geometry, target.source, Path(request.save_path)
    found = read_scales(
        source,
        geometry,
        source_fmt=None if request.source_dtype is None else KV_FORMATS[request.source_dtype],
        needs_dtype=True,
        drops_bad_query=True,
    )
    attachment = target.relate(str(source), found.table.origin)
    known = found.table.origin or CalibrationOrigin.of_model(target.fingerprint)
    tables = tuple(
        convert_table(
            replace(found.table, origin=known),
            fmt=KV_FORMATS[request.fp8_dtype or E4M3FN.name],
            tp=tp,
            per_head=dialect.per_head,
        )
        for tp in _choose_degrees(request, dialect, found.table)
    )
    taken_from = _name_files(found)
    provenance = _describe_source(found, taken_from)
    with output_folder(
        out,
        owned=frozenset[str]().union(
            *(list_owned(dialect.name, table.tp, geometry, checkpoint) for table in tables)
        ),
        force=request.force,
        inputs=[checkpoint.folder, source],
    ) as folder:
        places = [
            folder if dialect.needs_model else folder / dialect.path(table.tp) for table in tables
        ]
        notes = [
            note
            for table, place in zip(tables, places, strict=True)
            for note in write_table(
                table,
                dialect.name,
                place,
                source=checkpoint,
                shown=out / place.relative_to(folder),
                provenance=provenance,
                attachment=attachment,
            )
        ]
        if target.quantized is not None and dialect.needs_model:
            require_server(folder, geometry, target.quantized)
        checked = check_written(folder, out) if dialect.needs_model and request.check else ()
        if dialect.needs_model:
            cards = CardJob(
                written=folder,
                target=out,
                model=request.model,
                revision=request.revision,
                checked=checked,
            )
            write_card(cards, dialect.name)
        written = sorted(path for path in folder.rglob("*") if path.is_file())
        files = tuple(path.relative_to(folder).as_posix() for path in written)
    degrees = tuple(table.tp for table in tables)
    before, after = kv_bytes_per_token(geometry)
    return ExtractResult(
        save_path=out,
        files=files,
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
        notes=tuple(
            dict.fromkeys(
                [
                    *([provenance.describe()] if provenance else []),
                    *describe_attachment(attachment, checkpoint, geometry),
                    *found.notes,
                    *(text for table in tables for text in _explain_table(found, table, dialect)),
                    *map(str, notes),
                ]
            )
        ),
        compared=attachment.compared,
        kv_bytes_per_token=BeforeAfter(before=before, after=after),
        checked=checked,
    )


def _explain_table(found: FoundScales, table: ScaleTable, dialect: Dialect) -> Iterable[str]:
    yield from explain_fit(found.table, table)
    yield from explain_joint(table) if dialect.joins_kv else ()
    if not dialect.joins_kv and not dialect.has_query:
        yield from explain_no_query(table)
    yield from _advise_heads(found.table, table)


def _choose_degrees(
    request: ExtractRequest, dialect: Dialect, table: ScaleTable
) -> tuple[int, ...]:
    """Choose the ranks: those of --tp, or those found if the format and the model allow them."""
    if request.tp:
        return tuple(dict.fromkeys(request.tp))
    is_kept = dialect.per_tp and fits_heads(table.geometry, table.tp)
    return (table.tp if is_kept else 1,)


def _name_files(found: FoundScales) -> tuple[str, ...]:
    files = (path.resolve() for path in found.files)
    names = (f"{path.parent.name}/{path.name}" for path in files)
    # JSON readers in other languages reject names that are not valid Unicode
    return tuple(name.encode("utf-8", "replace").decode() for name in names)


def _describe_source(found: FoundScales, files: tuple[str, ...]) -> Provenance | None:
    """Describe a quantized source, whose scales are biased; None for scales of `calibrate`."""
    measured = found.table.origin
    if measured is not None and measured.data:
        return None
    return Provenance(dialect=found.dialect, files=files, has_fp8_weights=found.has_weights)


def _advise_heads(source: ScaleTable, table: ScaleTable) -> Iterable[str]:
    if source.per_head and not table.per_head:
        kept = " or ".join(dialect.name for dialect in list_written() if dialect.per_head)
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


extract_kv_scales = as_function("extract_kv_scales", ExtractRequest, run)
