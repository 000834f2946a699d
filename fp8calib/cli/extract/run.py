"""Run `fp8calib extract-kv-scales`: read scales, convert, write, print.

Of the quantized model no weight is read; of the other model only those of its fingerprint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from fp8calib.api.export.graft import (
    GraftOptions,
    describe_graft,
    relate_to_quantized,
    require_server,
)
from fp8calib.checkpoint.atomic import OutputFolder
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.cli.console import list_top_level, print_json, print_text, warn
from fp8calib.cli.extract.settings import ExtractSettings
from fp8calib.cli.option_types import split_names
from fp8calib.cli.serving import describe_serving
from fp8calib.cli.setup import quiet_libraries
from fp8calib.dialects.dialect import Dialect, Graft
from fp8calib.dialects.graft import QuantizedModel, find_quantized
from fp8calib.dialects.metadata import Provenance
from fp8calib.dialects.read import FoundScales, check_origin, read_scales
from fp8calib.dialects.registry import find_dialect, list_written
from fp8calib.dialects.write import list_owned, write_table
from fp8calib.engines.serving import Serving, find_scale_serving
from fp8calib.errors import UsageError
from fp8calib.fp8.formats import E4M3FN, KV_FORMATS
from fp8calib.geometry.kv_bytes import kv_bytes_per_token
from fp8calib.geometry.model_geometry import Attention, ModelGeometry
from fp8calib.geometry.sites import Role
from fp8calib.model.geometry_from_config import read_geometry
from fp8calib.model.load import build_skeleton, fetch_hub_id, find_folder, open_source
from fp8calib.model.prepared import prepare
from fp8calib.scales.convert import convert_table, explain_fit, explain_joint
from fp8calib.scales.ranks import fits_heads
from fp8calib.scales.scale_table import ScaleTable
from fp8calib.stats.calibration_origin import CalibrationOrigin
from fp8calib.stats.fingerprint import fingerprint_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Extracted:
    """The scales that were written, and the notes on them."""

    found: FoundScales
    dialect: Dialect
    tables: tuple[ScaleTable, ...]
    """One for each number of ranks."""
    taken_from: tuple[str, ...]
    """The source's files, each as folder and file name."""
    files: tuple[str, ...]
    notes: tuple[str, ...]
    servings: tuple[Serving, ...]
    """One for each number of ranks."""


def run_extract(settings: ExtractSettings) -> None:
    """Read the scales, write them in the requested format and print the outcome.

    Raises:
        UsageError: an option is invalid, or the source does not state its FP8 format.
        ModelError: the unquantized model cannot be read.
        ExportError: the format cannot hold the scales, or cannot be written.
        ModelError: the source's scales are incomplete, invalid, or of another model.
    """
    dialect = _check_options(settings)
    quiet_libraries()
    settings = replace(settings, quantized_model=fetch_hub_id(settings.quantized_model))
    folder = find_folder(settings.model, settings.revision)
    with Checkpoint.open(folder, require_config=True) as checkpoint:
        quantized = find_quantized(checkpoint)
        target = _Target(
            source=checkpoint,
            geometry=_find_geometry(settings, checkpoint, is_quantized=quantized is not None),
            quantized=quantized,
            options=GraftOptions(
                base=settings.base,
                other_weights=settings.other_weights,
                replaces_scales=settings.replace_scales,
            ),
        )
        extracted = _extract(settings, dialect, target)
    _show(settings, extracted)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """The model that the scales are written for."""

    source: Checkpoint
    geometry: ModelGeometry
    quantized: QuantizedModel | None
    """None for an unquantized model."""
    options: GraftOptions

    def relate(self, name: str, origin: CalibrationOrigin | None) -> Graft:
        """Check that scales belong to the model.

        Raises:
            UsageError: an option is not for an unquantized model, or --base is needed.
            ModelError: they belong to another one.
        """
        if self.quantized is not None:
            return relate_to_quantized(name, origin, self.source, self.geometry, self.options)
        self.options.refuse()
        check_origin(name, origin, self.fingerprint)
        return Graft(replaces_scales=self.options.replaces_scales)

    @property
    def fingerprint(self) -> str:
        """The model's own."""
        return fingerprint_model(self.source.load_config(), self.source)


def _find_geometry(
    settings: ExtractSettings, checkpoint: Checkpoint, *, is_quantized: bool
) -> ModelGeometry:
    if is_quantized:
        return read_geometry(checkpoint.folder, checkpoint.load_config())
    source = open_source(
        str(checkpoint.folder),
        revision=None,
        trust_remote_code=settings.trust_remote_code,
        if_quantized="--model must be the unquantized model",
    )
    return prepare(build_skeleton(source), checkpoint).geometry


def _check_options(settings: ExtractSettings) -> Dialect:
    """Check the options, and find the dialect of --format."""
    names = split_names(settings.formats) or ["kv-overlay"]
    if len(names) > 1:
        raise UsageError(
            f"--format {' '.join(names)}: only one format can be written to --save-path",
            hint="run the command once for each format",
        )
    dialect = find_dialect(names[0])
    named = {"--source-dtype": settings.source_dtype, "--fp8-dtype": settings.fp8_dtype}
    for option, name in named.items():
        if name is not None and name not in KV_FORMATS:
            raise UsageError(f"{option} {name}: unknown", hint=f"use {' or '.join(KV_FORMATS)}")
    if settings.tp and not dialect.per_tp:
        others = " or ".join(each.name for each in list_written() if each.per_tp)
        raise UsageError(
            f"--tp {settings.tp[0]}: {dialect.name} does not depend on the number of ranks",
            hint=f"leave out --tp, or choose --format {others}",
        )
    return dialect


def _extract(settings: ExtractSettings, dialect: Dialect, target: _Target) -> Extracted:
    geometry, checkpoint = target.geometry, target.source
    found = read_scales(
        settings.quantized_model,
        geometry,
        source_fmt=None if settings.source_dtype is None else KV_FORMATS[settings.source_dtype],
        needs_dtype=True,
        drops_bad_query=True,
    )
    graft = target.relate(str(settings.quantized_model), found.table.origin)
    known = found.table.origin or CalibrationOrigin.of_model(target.fingerprint)
    tables = tuple(
        convert_table(
            replace(found.table, origin=known),
            fmt=KV_FORMATS[settings.fp8_dtype or E4M3FN.name],
            tp=tp,
            per_head=dialect.per_head,
        )
        for tp in _choose_degrees(settings, dialect, found.table)
    )
    taken_from = _name_files(found)
    provenance = _describe_source(found, taken_from)
    with OutputFolder(
        settings.save_path,
        owned=frozenset[str]().union(
            *(list_owned(dialect.name, table.tp, geometry, checkpoint) for table in tables)
        ),
        force=settings.force,
        inputs=[checkpoint.folder, settings.quantized_model],
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
                shown=settings.save_path / place.relative_to(folder),
                provenance=provenance,
                graft=graft,
            )
        ]
        written = sorted(path for path in folder.rglob("*") if path.is_file())
        files = tuple(path.relative_to(folder).as_posix() for path in written)
        if target.quantized is not None and dialect.needs_model:
            require_server(folder, geometry, target.quantized)
        servings = tuple(
            find_scale_serving(
                place,
                settings.save_path / place.relative_to(folder),
                geometry,
                model=checkpoint.folder,
                model_name=settings.model,
                tp=table.tp,
            )
            for table, place in zip(tables, places, strict=True)
        )
    return Extracted(
        found=found,
        dialect=dialect,
        tables=tables,
        taken_from=taken_from,
        files=files,
        servings=servings,
        notes=tuple(
            dict.fromkeys(
                [
                    *([provenance.describe()] if provenance else []),
                    *describe_graft(graft, checkpoint, geometry),
                    *found.notes,
                    *(text for table in tables for text in _explain_table(found, table, dialect)),
                    *map(str, notes),
                ]
            )
        ),
    )


def _explain_table(found: FoundScales, table: ScaleTable, dialect: Dialect) -> Iterable[str]:
    yield from explain_fit(found.table, table)
    yield from explain_joint(table) if dialect.joins_kv else ()
    yield from _advise_heads(found.table, table)


def _choose_degrees(
    settings: ExtractSettings, dialect: Dialect, table: ScaleTable
) -> tuple[int, ...]:
    """Choose the ranks: those of --tp, or those found if the format and the model allow them."""
    if settings.tp:
        return tuple(dict.fromkeys(settings.tp))
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


def _build_report(settings: ExtractSettings, extracted: Extracted) -> dict[str, Any]:
    table, dialect = extracted.tables[0], extracted.dialect
    degrees = [each.tp for each in extracted.tables]
    before, after = kv_bytes_per_token(table.geometry)
    return {
        "save_path": str(settings.save_path),
        "files": list(extracted.files),
        "dialect": extracted.found.dialect,
        "source_dtype": extracted.found.table.fmt.name,
        "format": dialect.name,
        "fp8_dtype": table.fmt.name,
        "tp": degrees[0] if len(degrees) == 1 else degrees,
        "taken_from": list(extracted.taken_from),
        "layers": [
            _describe_layer(table, index, attention, joins_kv=dialect.joins_kv)
            for index, attention in ((layer.index, a) for layer, a in table.geometry.attentions())
        ],
        "notes": list(extracted.notes),
        "kv_bytes_per_token": {"before": before, "after": after},
        "serving": _list_once(each.commands for each in extracted.servings),
        "limitations": _list_once(each.limitations for each in extracted.servings),
        "other_engines": _list_once(each.others for each in extracted.servings),
    }


def _list_once(found: Iterable[Iterable[Any]]) -> list[dict[str, Any]]:
    return [asdict(item) for item in dict.fromkeys(item for items in found for item in items)]


def _describe_layer(
    table: ScaleTable, index: int, attention: Attention, *, joins_kv: bool
) -> dict[str, Any]:
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
    return {"layer": index, "module": attention.module, **scales}


def _show(settings: ExtractSettings, extracted: Extracted) -> None:
    report = _build_report(settings, extracted)
    for note in extracted.notes:
        warn(note)
    if settings.as_json:
        print_json(report)
        return
    for text in _describe_extraction(report):
        print_text(text)


def _describe_extraction(report: Mapping[str, Any]) -> Iterable[str]:
    layers = len(report["layers"])
    before, after = report["kv_bytes_per_token"].values()
    yield f"{report['dialect']} scales of {layers} layers, {report['fp8_dtype']}"
    yield f"KV cache: {before:,} bytes per token now, {after:,} with FP8"
    yield f"written to {report['save_path']}: {list_top_level(report['files'])}"
    yield from describe_serving(report, report["format"])
